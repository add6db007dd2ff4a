"""A gang of simulated ranks in one thread: each is a greenlet that runs until it meets the others.

What a rank does between two meetings is plain code, and nothing is left to chance: given the same ranks, everything
happens in the same order. A rank that has ended, or waits somewhere else, is missing at once, not after a time-out.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from greenlet import getcurrent, greenlet

T = TypeVar("T")


class RankMissing(RuntimeError):
    """Others wait at a meeting that will never be complete."""


class Meetings(Protocol):
    """Where ranks meet."""

    size: int

    def meet(self, rank: int, place: Hashable, value: T) -> list[T]:
        """Wait until all ranks are at `place`; everybody's values by rank."""
        ...


class SimulatedGang:
    """Owns the ranks' greenlets while `run` runs. Meetings are named, as groups and operations are."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._hub: greenlet | None = None
        self._waiting: dict[int, tuple[Hashable, Any]] = {}

    def group(self, rank: int) -> "SimulatedGroup":
        return SimulatedGroup(self, rank)

    def meet(self, rank: int, place: Hashable, value: T) -> list[T]:
        """Wait until all ranks are at `place`; everybody's values by rank. Raises RankMissing if one never comes."""
        assert self._hub is not None, "ranks run inside `run`"
        self._waiting[rank] = place, value
        return self._hub.switch()

    def run(self, mains: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Run one function per rank to its end. Results, or what was raised, by rank."""
        assert len(mains) == self.size
        outer, self._hub = self._hub, getcurrent()
        results: list[Any] = [None] * self.size
        ranks = [greenlet(_catching(main, results, rank)) for rank, main in enumerate(mains)]
        self._waiting = {}
        try:
            for rank in ranks:
                rank.switch()
            while self._waiting:
                self._meeting(ranks)
        finally:
            self._hub = outer
        return results

    def _meeting(self, ranks: list[greenlet]) -> None:
        waiting, self._waiting = self._waiting, {}
        places = {place for place, _ in waiting.values()}
        if len(waiting) == self.size and len(places) == 1:
            values = [waiting[rank][1] for rank in range(self.size)]
            for rank in ranks:
                rank.switch(list(values))
            return
        for missed in waiting:
            ranks[missed].throw(RankMissing("a simulated rank is missing"))


def _catching(main: Callable[[], Any], results: list[Any], rank: int) -> Callable[..., None]:
    def run() -> None:
        try:
            results[rank] = main()
        except Exception as error:
            results[rank] = error

    return run


class SimulatedGroup:
    """One rank's control group in a simulated gang."""

    def __init__(self, gang: Meetings, rank: int) -> None:
        self._gang = gang
        self.rank = rank
        self.size = gang.size

    def all_reduce_min(self, vector: np.ndarray) -> np.ndarray:
        return np.minimum.reduce(self._gang.meet(self.rank, "control", vector.copy()))

    def close(self) -> None:
        """Its greenlet ends; that is enough."""
