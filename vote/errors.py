"""Why a gang cannot go on: errors with the facts in fields, rendered once."""

from dataclasses import dataclass, field


class VoteError(Exception):
    """Base of all errors of the vote."""


@dataclass
class LockstepBroken(VoteError):
    """The ranks are no longer at the same place, or one of them is missing.

    rank: who raises; step: where it was; what: the collective it was in; culprits: the ranks that left, with what is
    known of each; detail: the library's own words; report: all that was found out, the same text on all ranks;
    innocent: see vote.report.Report.
    """

    rank: int
    step: int
    what: str
    culprits: dict[int, str] = field(default_factory=dict)
    detail: str = ""
    report: str = ""
    innocent: bool = False

    def __str__(self) -> str:
        names = "; ".join(f"rank {rank} {words}" for rank, words in sorted(self.culprits.items()))
        blame = names or "no rank could be singled out"
        detail = f" ({self.detail})" if self.detail else ""
        return f"lockstep broken at step {self.step} in {self.what}: {blame}{detail}"


@dataclass
class SettingsMismatch(VoteError):
    """Ranks started with different settings. `differences`: setting -> value by rank."""

    differences: dict[str, dict[int, str]]

    def __str__(self) -> str:
        lines = [
            f"{name}: " + ", ".join(f"rank {rank} has {value}" for rank, value in sorted(values.items()))
            for name, values in sorted(self.differences.items())
        ]
        return "ranks were started with different settings: " + "; ".join(lines)


@dataclass
class RanksMissing(VoteError):
    """Ranks that did not arrive at the start-up check in time."""

    ranks: list[int]
    waited_s: float
    what: str

    def __str__(self) -> str:
        names = ", ".join(str(rank) for rank in self.ranks)
        return f"rank(s) {names} did not arrive at {self.what} within {self.waited_s:.0f} s"
