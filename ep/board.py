"""Where ranks that share memory say how far they are, and wait for each other.

A line of numbers for each rank, written by that rank alone. It writes what goes with an exchange first and the number
of the exchange last; whoever has seen that number may read the rest, on the board and elsewhere in shared memory. x86
keeps both orders by itself; on other machines the kernel's scheduler is asked for a barrier on either side.

A rank that waits asks over and over for a moment, then sleeps until the rank it waits for wakes it: where cores are
scarce, one that goes on asking takes the core from the very rank that it waits for.
"""

import ctypes
import os
import platform
import select
import time
from mmap import mmap
from threading import Lock

from ep import futex
from ep.dispatch import CollectiveFailed

DISPATCHED, COMBINED = 0, 1  # the number of the last exchange of each kind
_PID, _LEFT, _SLEEPS, _FACTS = 2, 3, 4, 5
_LINE = 16  # numbers of 8 bytes: two cache lines, since the next one is fetched along
NUM_FACTS = _LINE - _FACTS

SPIN_S = 0.0001  # of asking over and over, between two layers of a decode step mostly enough
LOOK_S = 0.05  # of sleep before it asks whether those it waits for are still there


def _nothing() -> None:
    """x86: stores become visible in the order of the program, and loads are made in it."""


_X86 = platform.machine() in ("x86_64", "AMD64")
_lock = Lock()


def _pass_lock() -> None:
    """x86: every locked instruction is a full barrier."""
    with _lock:
        pass


# fence keeps stores before stores and loads before loads, full_fence also stores before loads. sched_yield enters the
# scheduler, which begins with a full barrier.
fence = _nothing if _X86 else os.sched_yield
full_fence = _pass_lock if _X86 else os.sched_yield


class Board:
    """One rank's view. Owns its own line, and descriptors of the processes of the others once it has had to wait long,
    so that it sees them end."""

    def __init__(self, memory: mmap, rank: int, size: int, timeout_s: float):
        """memory: zero at first, at least `size` lines. timeout_s: longest wait for another rank."""
        self.rank = rank
        self.timeout_s = timeout_s
        self._cells = memoryview(memory).cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
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
        full_fence()
        if any(self._cells[line + _SLEEPS] for line in self._lines):
            futex.wake(self._address + 8 * (self._own + kind))

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
        while any(cells[line + kind] < number for line in self._lines):
            if time.monotonic() - began < SPIN_S:
                os.sched_yield()
            else:
                self._sleep_for_all(kind, number, began)

    def _sleep_for_all(self, kind: int, number: int, began: float) -> None:
        cells, looked = self._cells, began
        cells[self._own + _SLEEPS] = 1
        full_fence()
        for line in self._lines:
            while (seen := cells[line + kind]) < number:
                futex.wait(self._address + 8 * (line + kind), seen & 0xFFFFFFFF, LOOK_S)
                if (now := time.monotonic()) - looked > LOOK_S:
                    looked = now
                    self._look_after(kind, number, now - began)
        cells[self._own + _SLEEPS] = 0

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
