"""Where ranks that share memory say how far they are, and wait for each other.

A line of numbers for each rank, written by that rank alone. It writes what goes with an exchange first and the number
of the exchange last; whoever has seen that number may read the rest, on the board and elsewhere in shared memory. x86
keeps both orders by itself; on other machines the kernel's scheduler is asked for a barrier on either side.
"""

import os
import platform
import select
import time
from mmap import mmap

from ep.dispatch import CollectiveFailed

DISPATCHED, COMBINED = 0, 1  # the number of the last exchange of each kind
_PID, _LEFT, _FACTS = 2, 3, 4
_LINE = 16  # numbers of 8 bytes: two cache lines, since the next one is fetched along
NUM_FACTS = _LINE - _FACTS

SPIN_S = 0.002  # of asking over and over before a rank sleeps between two questions
NAP_S = 0.0002


def _nothing() -> None:
    """x86: stores become visible in the order of the program, and loads are made in it."""


# sched_yield enters the scheduler, which begins with a full memory barrier.
fence = _nothing if platform.machine() in ("x86_64", "AMD64") else os.sched_yield


class Board:
    """One rank's view. Owns its own line, and descriptors of the processes of ranks that
    were late once, so that it sees them end."""

    def __init__(self, memory: mmap, rank: int, size: int, timeout_s: float):
        """memory: zero at first, at least `size` lines. timeout_s: longest wait for another rank."""
        self.rank = rank
        self.timeout_s = timeout_s
        self._cells = memoryview(memory).cast("q")
        self._lines = [_LINE * other for other in range(size)]
        self._own = self._lines[rank]
        self._cells[self._own + _PID] = os.getpid()
        self._processes: dict[int, int] = {}  # descriptor -> rank
        self._ended = select.poll()

    def publish(self, kind: int, number: int, facts: tuple[int, ...] = ()) -> None:
        """Say that this rank's part of exchange `number` is in shared memory; `facts` go with it."""
        at = self._own + _FACTS
        for offset, fact in enumerate(facts):
            self._cells[at + offset] = fact
        fence()
        self._cells[self._own + kind] = number

    def wait(self, kind: int, number: int) -> None:
        """Until every rank has published exchange `number`. Raises CollectiveFailed when one has left, died, or does
        not come in time."""
        cells = self._cells
        for line in self._lines:
            if cells[line + kind] < number:
                self._wait_for_all(kind, number)
                break
        fence()

    def facts(self, count: int) -> list[tuple[int, ...]]:
        """The first `count` facts of every rank."""
        return [tuple(self._cells[line + _FACTS : line + _FACTS + count]) for line in self._lines]

    def leave(self) -> None:
        """Tell the others that this rank comes to no further exchange. Idempotent."""
        self._cells[self._own + _LEFT] = 1

    def _wait_for_all(self, kind: int, number: int) -> None:
        cells, began = self._cells, time.monotonic()
        for line in self._lines:
            while cells[line + kind] < number:
                waited = time.monotonic() - began
                if waited < SPIN_S:
                    os.sched_yield()
                else:
                    self._look_after(kind, number, waited)
                    time.sleep(NAP_S)

    def _look_after(self, kind: int, number: int, waited: float) -> None:
        """Is there anybody left to wait for? Who went away is asked before who is missing: a rank may go after its last
        exchange."""
        died, left = self._dead(), [rank for rank, line in enumerate(self._lines) if self._cells[line + _LEFT]]
        absent = [rank for rank, line in enumerate(self._lines) if self._cells[line + kind] < number]
        reasons = {"left": set(left) & set(absent), "died": died & set(absent) - set(left)}
        words = [f"ranks {sorted(ranks)} have {what}" for what, ranks in reasons.items() if ranks]
        if not words and waited > self.timeout_s:
            words = [f"ranks {absent} did not come within {self.timeout_s:g} s"]
        if self._cells[self._own + _LEFT]:
            words = ["this rank has left"]
        if words:
            raise CollectiveFailed(f"rank {self.rank}: {' and '.join(words)}")

    def _dead(self) -> set[int]:
        """Ranks whose processes have ended."""
        dead = {self._processes[descriptor] for descriptor, _ in self._ended.poll(0)}
        for rank in {*range(len(self._lines))} - {self.rank, *self._processes.values()}:
            if pid := self._cells[self._lines[rank] + _PID]:  # 0: not here yet
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:
                    dead.add(rank)
                else:
                    self._processes[descriptor] = rank
                    self._ended.register(descriptor, select.POLLIN)
        return dead
