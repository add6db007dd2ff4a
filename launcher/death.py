"""Why a gang's life ended, and which of its requests may have been the cause."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Death:
    """culprits: the ranks at fault; None: nobody could be told from the others, so it may have been any of them.

    innocent: nothing that a request can do ends a gang in this way (a host that is out of reach, a process that
    somebody has stopped), so none is suspected.
    """

    reason: str
    culprits: frozenset[int] | None = None
    innocent: bool = False

    def blames(self, rank: int) -> bool:
        """Whether a request that ran on this rank may have caused it."""
        return not self.innocent and (self.culprits is None or rank in self.culprits)
