"""The flight recorder of a rank: what it did last, in memory that can be read while it hangs, is stopped, or is dead.

Nothing here takes a lock or a system call per entry. Each ring has one writer, the thread whose work it records; a
reader in another process sees whole entries, because an entry that is being overwritten does not have the number that
its place calls for.

Memory layout: a header (`HEADER`), the rank's last ballot, its last words, then the rings, `control` first.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass

import numpy as np

from vote.ballot import BALLOT_SIZE

CONTROL_ENTRIES = 1 << 12
DATA_ENTRIES = 1 << 13
MAX_ENTRIES = max(CONTROL_ENTRIES, DATA_ENTRIES)
WORDS_BYTES = 2048

ENTRY = np.dtype(
    [
        ("number", "<i8"),  # counts the ring's entries from 1; 0: unused
        ("entered_ns", "<i8"),  # time.monotonic_ns() of the writer's host
        ("left_ns", "<i8"),  # 0: still inside
        ("step", "<i8"),
        ("ordinal", "<i8"),  # which collective of its group it is, from 1; 0: no collective, work of this rank alone
        ("size", "<i8"),  # rows or tokens, whatever the kind counts
        ("kind", "S16"),
    ]
)
HEADER = struct.Struct("<qqqqq")  # rank, voters, pid, wall clock minus monotonic clock in ns, bytes of last words
_BALLOT_AT = HEADER.size
_WORDS_AT = _BALLOT_AT + 4 * BALLOT_SIZE
_RINGS_AT = -(-(_WORDS_AT + WORDS_BYTES) // 64) * 64
MEMORY_BYTES = _RINGS_AT + (CONTROL_ENTRIES + DATA_ENTRIES) * ENTRY.itemsize

_enter = struct.Struct("<qqqqqq16s").pack_into
_leave = struct.Struct("<q").pack_into
_now = time.monotonic_ns


class Ring:
    """The last entries of one thread. `step` is what new entries are filed under; the writer sets it."""

    __slots__ = ("_mask", "_memory", "_number", "_offset", "step")

    def __init__(self, memory: memoryview | bytearray, offset: int, capacity: int) -> None:
        self.step = 0
        self._memory = memory
        self._offset = offset
        self._mask = capacity - 1
        self._number = 0

    def enter(self, kind: bytes, size: int = 0, ordinal: int = 0) -> int:
        """Begin an entry; the result goes to `leave`. `kind`: 16 bytes at most; `ordinal`: of a collective."""
        self._number = number = self._number + 1
        at = self._offset + (number & self._mask) * 64
        _enter(self._memory, at, number, _now(), 0, self.step, ordinal, size, kind)
        return number

    def leave(self, number: int) -> None:
        """End an entry. One that was never ended is where the thread is now."""
        _leave(self._memory, self._offset + (number & self._mask) * 64 + 16, _now())


class Recorder:
    """Owns the memory of one rank's rings: `control` is the step loop's (ballots, sleep), `data` the computing
    thread's (steps and the collectives inside them). `fd`: for a process that is to read it, None on request.
    """

    def __init__(self, rank: int, voters: int, *, shared: bool = False) -> None:
        """voters: ranks that vote together, this one included."""
        self.rank = rank
        self.fd: int | None = None
        self._memory: memoryview | bytearray
        if shared:
            self.fd = os.memfd_create(f"phalanx-rank-{rank}")
            os.ftruncate(self.fd, MEMORY_BYTES)
            self._memory = memoryview(mmap.mmap(self.fd, MEMORY_BYTES))
        else:
            self._memory = bytearray(MEMORY_BYTES)
        offset_ns = time.time_ns() - time.monotonic_ns()
        HEADER.pack_into(self._memory, 0, rank, voters, os.getpid(), offset_ns, 0)
        self.control = Ring(self._memory, _RINGS_AT, CONTROL_ENTRIES)
        self.data = Ring(self._memory, _RINGS_AT + CONTROL_ENTRIES * ENTRY.itemsize, DATA_ENTRIES)

    def votes_alone(self) -> None:
        """This rank does not keep step with the others of its gang."""
        rank, _, *facts = HEADER.unpack_from(self._memory)
        HEADER.pack_into(self._memory, 0, rank, 1, *facts)

    def ballot(self, vector: np.ndarray) -> None:
        """Keep what this rank votes. int32 [BALLOT_SIZE]."""
        self._memory[_BALLOT_AT:_WORDS_AT] = vector.tobytes()

    def last_words(self, text: str) -> None:
        """Why this rank ends; what was said first stays."""
        *facts, length = HEADER.unpack_from(self._memory)
        if length == 0:
            words = text.encode()[:WORDS_BYTES]
            self._memory[_WORDS_AT : _WORDS_AT + len(words)] = words
            HEADER.pack_into(self._memory, 0, *facts, len(words))

    def read(self) -> "Recording":
        """What a reader sees now."""
        return Recording.read(self._memory)


@dataclass(frozen=True)
class Recording:
    """A copy of a rank's recorder. `control`, `data`: arrays of ENTRY, oldest first; `ballot`: int32 [BALLOT_SIZE]."""

    rank: int
    voters: int
    pid: int
    wall_offset_ns: int
    words: str
    ballot: np.ndarray
    control: np.ndarray
    data: np.ndarray

    @classmethod
    def read(cls, memory: memoryview | bytearray | mmap.mmap) -> "Recording":
        """Copy the memory of a live recorder, entries that change meanwhile left out."""
        whole = bytes(memory)
        rank, voters, pid, wall_offset_ns, length = HEADER.unpack_from(whole)
        rings_at = _RINGS_AT + CONTROL_ENTRIES * ENTRY.itemsize
        return cls(
            rank,
            voters,
            pid,
            wall_offset_ns,
            whole[_WORDS_AT : _WORDS_AT + length].decode(errors="replace"),
            np.frombuffer(whole, np.int32, BALLOT_SIZE, _BALLOT_AT),
            _in_order(np.frombuffer(whole, ENTRY, CONTROL_ENTRIES, _RINGS_AT)),
            _in_order(np.frombuffer(whole, ENTRY, DATA_ENTRIES, rings_at)),
        )


def _in_order(ring: np.ndarray) -> np.ndarray:
    """Entries by number, without those caught half-written: their number does not belong there, or is too old."""
    places = np.arange(len(ring))
    whole = (ring["number"] > 0) & (ring["number"] % len(ring) == places)
    whole &= ring["number"] > ring["number"].max(initial=0) - len(ring)
    entries = ring[whole]
    return entries[np.argsort(entries["number"])]
