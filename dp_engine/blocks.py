"""The KV block pool of a rank: block numbers and reference counts, no memory."""

from enum import Enum

import numpy as np

NULL_BLOCK = 0  # padding of block tables; never allocated


class Admission(Enum):
    """Can k blocks be had?"""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockPool:
    """Blocks 1..num_blocks-1. Free blocks are a FIFO: freed ones go to the tail.

    Invariant: a block is in the free list exactly once, or has a reference count above 0.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.capacity = num_blocks - 1
        self._references = np.zeros(num_blocks, np.int32)
        self._free = np.arange(1, num_blocks, dtype=np.int32)  # ring buffer
        self._head = 0
        self.num_free = self.capacity

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    def can_allocate(self, count: int) -> Admission:
        if count > self.capacity:
            return Admission.NEVER
        return Admission.OK if count <= self.num_free else Admission.LATER

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` blocks, int32 [count], each with one reference."""
        if count > self.num_free:
            raise RuntimeError(f"block pool: {count} blocks wanted, {self.num_free} free")
        blocks = self._free[(self._head + np.arange(count)) % self.capacity]
        self._head = (self._head + count) % self.capacity
        self.num_free -= count
        self._references[blocks] = 1
        return blocks

    def pin(self, blocks: np.ndarray) -> None:
        """Add a reference to each block (all different, all in use)."""
        if (self._references[blocks] <= 0).any():
            raise RuntimeError(f"block pool: pinning free blocks {blocks[self._references[blocks] <= 0].tolist()}")
        self._references[blocks] += 1

    def free(self, blocks: np.ndarray) -> None:
        """Drop a reference of each block (all different, all in use); those left without one become free."""
        if (self._references[blocks] <= 0).any():
            raise RuntimeError(f"block pool: freeing free blocks {blocks[self._references[blocks] <= 0].tolist()}")
        self._references[blocks] -= 1
        released = blocks[self._references[blocks] == 0]
        tail = self._head + self.num_free
        self._free[(tail + np.arange(len(released))) % self.capacity] = released
        self.num_free += len(released)

    def check_integrity(self) -> None:
        """Raise if a block is neither free nor referenced, or both."""
        free = self._free[(self._head + np.arange(self.num_free)) % self.capacity]
        if len(set(free.tolist())) != self.num_free or (self._references[free] != 0).any():
            raise RuntimeError("block pool: the free list is corrupt")
        if self.num_free + int((self._references[1:] > 0).sum()) != self.capacity:
            raise RuntimeError("block pool: blocks are lost")
