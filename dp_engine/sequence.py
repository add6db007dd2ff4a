"""A request inside a rank, and the words for how it stands."""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from dp_engine.messages import Sampling


class Status(IntEnum):
    """Finished statuses come last, so that one comparison tells them."""

    WAITING = 0
    RUNNING = 1
    STOPPED = 2
    LENGTH = 3
    ABORTED = 4
    PREEMPTED = 5

    @property
    def finished(self) -> bool:
        return self >= Status.STOPPED

    @property
    def reason(self) -> str:
        """The finish reason as clients read it."""
        return FINISH_REASONS[self]


FINISH_REASONS = {
    Status.STOPPED: "stop",
    Status.LENGTH: "length",
    Status.ABORTED: "abort",
    Status.PREEMPTED: "insufficient_system_resource",
}


@dataclass(slots=True, eq=False)
class Sequence:
    """A request. While it holds blocks, its ledgers live in row `row` of `Ledgers` and `tokens` is stale.

    tokens: int32, prompt and what was generated until the sequence last lost its row.
    prompt_len: length of the original prompt; tokens beyond it were generated, here or in an earlier gang.
    stop_len: the length at which it ends with LENGTH.
    """

    request_id: int
    tokens: np.ndarray
    prompt_len: int
    stop_len: int
    sampling: Sampling
    status: Status = Status.WAITING
    row: int = -1
    preemptions: int = 0
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)

    @property
    def has_row(self) -> bool:
        return self.row >= 0
