"""The ballot: the fixed-shape int32 vector that every rank puts into the MIN all-reduce before a step.

Layout, in this order:

    AGREED   x, -x      values that must be equal on all ranks: MIN(x) == -MIN(-x) exactly when they are, so the same
                        all-reduce that decides a step also proves that the ranks are in lockstep
    RANGED   x, -x      values that may differ; the tally knows their least and greatest
    VOTES    v, 1 - v   booleans: MIN(v) is ALL, 1 - MIN(1 - v) is ANY

A fact that a ballot has nothing to say about is False on every rank, which decides nothing.
"""

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

PROTOCOL_VERSION = 1
MAX_VALUE = 2**31 - 1  # of an agreed or ranged value; counters wrap here


class BallotKind(IntEnum):
    """Which vote of a step a ballot belongs to."""

    FIRST = 1  # what kind of step
    SECOND = 2  # after PREFILL was chosen: was anything scheduled?


@dataclass(frozen=True, slots=True)
class Lockstep:
    """AGREED: what proves that all ranks are at the same place. Non-negative int32."""

    protocol: int
    epoch: int
    vote: int  # ballots cast since the gang's start
    step: int
    ballot: int  # BallotKind
    decode_step: int
    settings: int  # digest of the settings that must match
    collectives: int  # data-plane collectives entered so far


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank's situation before a step. `wake` is the last wake-up number seen (RANGED), the rest are VOTES."""

    wants_prefill: bool = False
    has_decode: bool = False
    unfinished: bool = False
    wants_stop: bool = False
    scheduled: bool = False  # phased policy: second ballot only; unified: first ballot only
    wake: int = 0


AGREED = tuple(field.name for field in fields(Lockstep))
RANGED = ("wake",)
VOTES = tuple(field.name for field in fields(Facts) if field.name not in RANGED)
BALLOT_SIZE = 2 * (len(AGREED) + len(RANGED) + len(VOTES))


def write_ballot(out: np.ndarray, lockstep: Lockstep, facts: Facts) -> None:
    """Fill `out`, int32 [BALLOT_SIZE]."""
    values = [getattr(lockstep, name) for name in AGREED] + [getattr(facts, name) for name in RANGED]
    votes = [int(getattr(facts, name)) for name in VOTES]
    split = 2 * len(values)
    out[0:split:2] = values
    np.negative(out[0:split:2], out=out[1:split:2])
    out[split::2] = votes
    np.subtract(1, out[split::2], out=out[split + 1 :: 2])


class Tally:
    """The element-wise MIN of all ranks' ballots."""

    def __init__(self, minimum: np.ndarray) -> None:
        """`minimum`: int32 [BALLOT_SIZE]."""
        row = minimum.tolist()
        values = len(AGREED) + len(RANGED)
        self._least = dict(zip(AGREED + RANGED, row[0 : 2 * values : 2], strict=True))
        self._greatest = dict(zip(AGREED + RANGED, (-x for x in row[1 : 2 * values : 2]), strict=True))
        self._all = dict(zip(VOTES, row[2 * values :: 2], strict=True))
        self._none = dict(zip(VOTES, row[2 * values + 1 :: 2], strict=True))

    def all(self, vote: str) -> bool:
        """Every rank voted yes."""
        return self._all[vote] == 1

    def any(self, vote: str) -> bool:
        """At least one rank voted yes."""
        return self._none[vote] == 0

    def range(self, name: str) -> tuple[int, int]:
        """Least and greatest value of an AGREED or RANGED field."""
        return self._least[name], self._greatest[name]

    def disagreements(self) -> dict[str, tuple[int, int]]:
        """AGREED fields that are not equal on all ranks, with their least and greatest value."""
        return {name: self.range(name) for name in AGREED if self._least[name] != self._greatest[name]}
