"""A gang's place under the router, which it keeps over all its lives."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from dp_engine.messages import Fault

if TYPE_CHECKING:
    from launcher.gang_link import GangLink

State: TypeAlias = Literal["starting", "serving", "restarting", "failed"]


@dataclass
class Replica:
    """Owned by the router. `link`: the present life, None between two.

    state: "starting" until the first life is ready, "failed" when it has been given up. started, finished: requests per
    rank (and per finish reason); reasons of the router's own are `abort`, `rejected`, `carried_over`, `gang_down` and
    `poisoned`. standing: faults on demand for its ranks, in every life.
    """

    number: int
    world_size: int
    state: State = "starting"
    reason: str = ""
    restarts: int = 0
    link: "GangLink | None" = None
    standing: list[tuple[int, Fault]] = field(default_factory=list)
    started: list[int] = field(init=False)
    finished: list[Counter[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.started = [0] * self.world_size
        self.finished = [Counter() for _ in range(self.world_size)]

    @property
    def name(self) -> str:
        return f"gang {self.number}"

    @property
    def serving(self) -> "GangLink | None":
        """The link to hand requests to."""
        return self.link if self.link is not None and self.link.ready else None

    @property
    def unready_reason(self) -> str:
        """Why it serves nobody at present."""
        if self.state == "restarting":
            return f"{self.name} is being started again ({self.reason})"
        if self.state == "failed" or self.link is None:
            return self.reason or "the ranks are being placed"
        return self.link.unready_reason or ""
