"""The KV block pool of a rank: block numbers, reference counts and names, no memory."""

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum

import numpy as np

NULL_BLOCK = 0  # padding of block tables; never allocated


class Admission(Enum):
    """Can k blocks be had?"""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockPool:
    """Blocks 1..num_blocks-1, each free or referenced. State slots are such a pool too.

    Free blocks without a name are a FIFO. A block may be named for its content (prefix cache); freed, it keeps the name
    and can be taken again by it, until blocks without a name run out: then the one longest unused loses its name.

    Invariant: a block without references is in the FIFO or, with a name, in the LRU order; exactly once.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.capacity = num_blocks - 1
        self.num_free = self.capacity  # with and without name
        self._references = np.zeros(num_blocks, np.int32)
        self._unnamed = np.arange(1, num_blocks, dtype=np.int32)  # ring buffer
        self._head = 0
        self._num_unnamed = self.capacity
        self._cached: OrderedDict[int, None] = OrderedDict()  # free blocks with a name, longest unused first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._copies_of: dict[bytes, list[int]] = {}  # further blocks of the same content, first named first

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    @property
    def references(self) -> np.ndarray:
        """How often each block is held, int32 [num_blocks]; not to be written to."""
        return self._references

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a named prefix."""
        return len(self._cached)

    def can_allocate(self, count: int) -> Admission:
        if count > self.capacity:
            return Admission.NEVER
        return Admission.OK if count <= self.num_free else Admission.LATER

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` blocks, int32 [count], each with one reference and no name."""
        if count > self.num_free:
            raise RuntimeError(f"block pool: {count} blocks wanted, {self.num_free} free")
        if self._num_unnamed < count:
            self._evict(count - self._num_unnamed)
        first, end = self._head, self._head + count
        blocks = self._unnamed[first:end].copy() if end <= self.capacity else self._unnamed.take(
            np.arange(first, end), mode="wrap"
        )  # fmt: skip
        self._head = end % self.capacity
        self._num_unnamed -= count
        self.num_free -= count
        self._references[blocks] = 1
        return blocks

    def pin(self, blocks: np.ndarray) -> None:
        """Add a reference to each block (all different, all in use)."""
        if (self._references[blocks] <= 0).any():
            raise RuntimeError(f"block pool: pinning free blocks {blocks[self._references[blocks] <= 0].tolist()}")
        self._references[blocks] += 1

    def free(self, blocks: np.ndarray) -> None:
        """Drop a reference of each block (all different, all in use), last block first; those left without one become
        free."""
        blocks = blocks[::-1]
        left = self._references[blocks] - 1
        if (left < 0).any():
            raise RuntimeError(f"block pool: freeing free blocks {blocks[left < 0].tolist()}")
        self._references[blocks] = left
        released = blocks[left == 0]
        self.num_free += len(released)
        if self._key_of:
            named = [block in self._key_of for block in released.tolist()]
            self._cached.update(dict.fromkeys(released[named].tolist()))
            released = released[np.logical_not(named)]
        self._append(released)

    # ---- names

    def name(self, blocks: list[int], keys: list[bytes]) -> None:
        """Give blocks in use their names. Several blocks may have the same."""
        if (self._references[blocks] <= 0).any() or not self._key_of.keys().isdisjoint(blocks):
            raise RuntimeError(f"block pool: blocks {blocks} cannot be named, one is free or has a name")
        self._key_of.update(zip(blocks, keys, strict=True))
        for block, key in zip(blocks, keys, strict=True):
            if self._block_of.setdefault(key, block) != block:
                self._copies_of.setdefault(key, []).append(block)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest run of known names from the first."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: list[int]) -> int:
        """How many of these named blocks are free at present."""
        return sum(block in self._cached for block in blocks)

    def take(self, blocks: list[int]) -> None:
        """Add a reference to each of these named blocks (all different), free or in use."""
        for block in blocks:
            if block in self._cached:
                del self._cached[block]
                self.num_free -= 1
        self._references[blocks] += 1

    def forget_names(self) -> None:
        """Empty the prefix cache. Blocks in use stay with their owners."""
        cached = np.array(list(self._cached), np.int32)
        self._cached.clear()
        self._key_of.clear()
        self._block_of.clear()
        self._copies_of.clear()
        self._append(cached)

    def check_integrity(self) -> None:
        """Raise if a block is neither free nor referenced, or both."""
        unnamed = self._unnamed.take(np.arange(self._head, self._head + self._num_unnamed), mode="wrap").tolist()
        free = [*unnamed, *self._cached]
        if len(set(free)) != self.num_free or len(free) != self.num_free or (self._references[free] != 0).any():
            raise RuntimeError("block pool: the free list is corrupt")
        if self.num_free + int((self._references[1:] > 0).sum()) != self.capacity:
            raise RuntimeError("block pool: blocks are lost")
        if any(block in self._key_of for block in unnamed) or any(block not in self._key_of for block in self._cached):
            raise RuntimeError("block pool: the prefix cache is corrupt")
        copies = [block for blocks in self._copies_of.values() for block in blocks]
        if sorted([*self._block_of.values(), *copies]) != sorted(self._key_of):
            raise RuntimeError("block pool: names and blocks do not match")

    def _evict(self, count: int) -> None:
        """The free blocks longest unused lose their names."""
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count)]
        for block in evicted:
            self._unname(block)
        self._append(np.array(evicted, np.int32))

    def _unname(self, block: int) -> None:
        key = self._key_of.pop(block)
        copies = self._copies_of.get(key)
        if copies is None:
            del self._block_of[key]
            return
        if self._block_of[key] == block:
            self._block_of[key] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies_of[key]

    def _append(self, blocks: np.ndarray) -> None:
        count = len(blocks)
        if count:
            tail = self._head + self._num_unnamed
            self._unnamed[np.arange(tail, tail + count) % self.capacity] = blocks
            self._num_unnamed += count
