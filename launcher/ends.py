"""How ranks end, and who ended the gang: any end of any rank is the gang's."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from launcher.whereabouts import Whereabouts

CUT_OFF = {"RouterLost", "MessagesLost"}  # errors of ranks whose way to the router has gone
BYSTANDERS = {"LockstepBroken", "SettingsMismatch", "RanksMissing"}  # errors of ranks that only noticed something

EndKind = Literal["killed", "raised", "left", "lost"]


@dataclass(frozen=True)
class RankEnd:
    """How a rank's `run` ended.

    kind: "killed", its process is gone; "raised", an exception; "left", it returned unasked; "lost", its node is gone
    or cannot be reached, or its router cannot. bystander: it only noticed that another rank had left, as its reason
    says.
    """

    rank: int
    reason: str
    bystander: bool
    kind: EndKind


@dataclass(frozen=True)
class GangEnd:
    """`reason`: whom to blame, in one line. `ends`: of the ranks that had ended when the gang was given up, by rank."""

    reason: str
    ends: tuple[RankEnd, ...]

    @property
    def blamed(self) -> list[RankEnd]:
        """Those that did not merely notice another one's end."""
        return [end for end in self.ends if not end.bystander]


def blame(ends: Iterable[RankEnd]) -> str:
    """Who ended the gang, in one line: not those that only noticed, unless there is nobody else."""
    known = sorted(ends, key=lambda end: end.rank)
    culprits = [end for end in known if not end.bystander]
    return "; ".join(f"rank {end.rank} {end.reason}" for end in culprits) or next(end.reason for end in known)


def end_of(rank: int, error: BaseException | None, where: Whereabouts, alive: Collection[str]) -> RankEnd:
    """What the outcome of a rank's `run` means. error: None if it returned. alive: ids of the nodes that are.

    Actor errors are not all RayActorError: an exception inside `run` comes as RayTaskError.
    """
    if error is None:
        return RankEnd(rank, "left unasked", False, "left")
    if isinstance(error, RayTaskError):
        cause = error.cause
        if type(cause).__name__ in BYSTANDERS:
            return RankEnd(rank, one_line(cause), True, "raised")
        kind: EndKind = "lost" if type(cause).__name__ in CUT_OFF else "raised"
        return RankEnd(rank, f"failed: {type(cause).__name__}: {one_line(cause)}", False, kind)
    node = f"node {where.node_ip} ({where.node_id[:8]})"
    if where.node_id not in alive:
        return RankEnd(rank, f"was lost with its {node}", False, "lost")
    if isinstance(error, ActorUnavailableError):
        return RankEnd(rank, f"was lost: its {node} cannot be reached", False, "lost")
    if isinstance(error, RayActorError):
        if "low on memory" in str(error):
            return RankEnd(rank, f"died: killed by Ray because its {node} ran low on memory", False, "killed")
        return RankEnd(rank, f"died: its process (pid {where.pid}) was killed or crashed", False, "killed")
    return RankEnd(rank, f"ended: {type(error).__name__}: {one_line(error)}", False, "killed")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:1000]
