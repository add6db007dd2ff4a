"""The ballot: the fixed-shape int32 vector that every rank puts into the MIN all-reduce before a step.

Layout, in this order:

    AGREED   x, -x      values that must be equal on all ranks: MIN(x) == -MIN(-x) exactly when they are, so the same
                        all-reduce that decides a step also proves that the ranks are in lockstep
    RANGED   x, -x      values that may differ; the tally knows their least and greatest
    VOTES    v, 1 - v   booleans: MIN(v) is ALL, 1 - MIN(1 - v) is ANY

A fact that a ballot has nothing to say about is False on every rank, which decides nothing.
"""

import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple

import numpy as np

PROTOCOL_VERSION = 2
MAX_VALUE = 2**31 - 1  # of an agreed or ranged value; counters wrap here


class BallotKind(IntEnum):
    """Which vote of a step a ballot belongs to."""

    FIRST = 1  # what kind of step
    SECOND = 2  # after PREFILL was chosen: was anything scheduled?


class Lockstep(NamedTuple):
    """AGREED: what proves that all ranks are at the same place. Non-negative int32."""

    protocol: int
    epoch: int
    vote: int  # ballots cast since the gang's start
    step: int
    ballot: int  # BallotKind
    decode_step: int
    settings: int  # digest of the settings that must match
    collectives: int  # data-plane collectives entered so far
    owed: int = 0  # decode steps
    placement: int = 0  # digest of where the experts are


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank's situation before a step: numbers (RANGED) and VOTES."""

    wants_prefill: bool = False
    has_decode: bool = False
    unfinished: bool = False
    wants_stop: bool = False
    scheduled: bool = False  # phased policy: second ballot only; unified: first ballot only
    backlog: bool = False  # wants prefill, and what waits outweighs what runs here
    wants_rebalance: bool = False  # a piece of moving experts is due before the next forward
    wake: int = 0  # last wake-up number seen
    running: int = 0  # sequences that decode here

    @property
    def asker(self) -> int:
        """`running` of a rank that wants prefill; the tally's least is that of the emptiest one."""
        return self.running if self.wants_prefill else MAX_VALUE


AGREED = Lockstep._fields
RANGED = ("wake", "running", "asker")
VOTES = tuple(field.name for field in fields(Facts) if field.name not in RANGED)
BALLOT_SIZE = 2 * (len(AGREED) + len(RANGED) + len(VOTES))

_ranged, _votes = attrgetter(*RANGED), attrgetter(*VOTES)
_pack = struct.Struct(f"={BALLOT_SIZE}i").pack_into
_AGREED_END = 2 * len(AGREED)
_VOTES_AT = 2 * len(AGREED + RANGED)
_PLACES = {name: 2 * index for index, name in enumerate(AGREED + RANGED + VOTES)}


def write_ballot(out: np.ndarray, lockstep: Lockstep, facts: Facts) -> None:
    """Fill `out`, int32 [BALLOT_SIZE], contiguous."""
    row = [0] * BALLOT_SIZE
    row[0:_VOTES_AT:2] = values = lockstep + _ranged(facts)
    row[1:_VOTES_AT:2] = [-value for value in values]
    row[_VOTES_AT::2] = votes = _votes(facts)
    row[_VOTES_AT + 1 :: 2] = [1 - vote for vote in votes]
    _pack(out.data, 0, *row)


class Tally:
    """The element-wise MIN of all ranks' ballots."""

    __slots__ = ("_row",)

    def __init__(self, minimum: np.ndarray) -> None:
        """`minimum`: int32 [BALLOT_SIZE]."""
        self._row: list[int] = minimum.tolist()

    def all(self, vote: str) -> bool:
        """Every rank voted yes."""
        return self._row[_PLACES[vote]] == 1

    def any(self, vote: str) -> bool:
        """At least one rank voted yes."""
        return self._row[_PLACES[vote] + 1] == 0

    def range(self, name: str) -> tuple[int, int]:
        """Least and greatest value of an AGREED or RANGED field."""
        place = _PLACES[name]
        return self._row[place], -self._row[place + 1]

    def disagreements(self) -> dict[str, tuple[int, int]]:
        """AGREED fields that are not equal on all ranks, with their least and greatest value."""
        row = self._row
        if not sum(row[:_AGREED_END]):  # MIN(x) + MIN(-x) is never above 0
            return {}
        places = [place for place in range(0, _AGREED_END, 2) if row[place] + row[place + 1]]
        return {AGREED[place // 2]: (row[place], -row[place + 1]) for place in places}
