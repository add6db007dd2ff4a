"""The block pool: conservation, references, names, errors."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dp_engine.blocks import NULL_BLOCK, Admission, BlockPool

KEYS = [b"a", b"b", b"c", b"d"]


def test_admission() -> None:
    pool = BlockPool(8)
    assert [pool.can_allocate(k) for k in (0, 7, 8)] == [Admission.OK, Admission.OK, Admission.NEVER]
    pool.allocate(3)
    assert [pool.can_allocate(k) for k in (4, 5, 7, 8)] == [
        Admission.OK, Admission.LATER, Admission.LATER, Admission.NEVER,
    ]  # fmt: skip


def test_freed_blocks_go_to_the_tail_last_block_first() -> None:
    pool = BlockPool(6)
    first = pool.allocate(2)
    pool.free(first)
    assert pool.allocate(5).tolist() == [3, 4, 5, 2, 1]


def test_pinned_blocks_outlive_their_first_owner() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.pin(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 3


@pytest.mark.parametrize("operation", ["free", "pin"])
def test_touching_a_free_block_is_an_error(operation: str) -> None:
    pool = BlockPool(4)
    block = pool.allocate(1)
    pool.free(block)
    with pytest.raises(RuntimeError, match=r"free blocks \[1\]"):
        getattr(pool, operation)(block)


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="4 blocks wanted, 3 free"):
        BlockPool(4).allocate(4)
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


# ---- names


def named_pool(*keys: bytes, num_blocks: int = 8) -> BlockPool:
    """Blocks 1, 2, ... have these names, and are free, in this order."""
    pool = BlockPool(num_blocks)
    for block, key in zip(pool.allocate(len(keys)).tolist(), keys, strict=True):
        pool.name([block], [key])
        pool.free(np.array([block]))
    return pool


def test_a_name_outlives_its_last_owner() -> None:
    pool = named_pool(b"a", b"b")
    assert (pool.num_free, pool.num_used, pool.num_cached) == (7, 0, 2)
    assert pool.find([b"a", b"b"]) == [1, 2]
    pool.take([1, 2])
    assert (pool.num_free, pool.num_used, pool.num_cached) == (5, 2, 0)
    assert pool.references[[1, 2]].tolist() == [1, 1]


def test_taking_a_block_in_use_adds_a_reference() -> None:
    pool = BlockPool(4)
    block = pool.allocate(1)
    pool.name([1], [b"a"])
    pool.take([1])
    pool.free(block)
    assert pool.num_used == 1
    pool.free(block)
    assert pool.num_used == 0 and pool.find([b"a"]) == [1]


@pytest.mark.parametrize(
    ("keys", "wanted"), [([], []), ([b"a"], [1]), ([b"a", b"x", b"b"], [1]), ([b"x", b"a"], []), ([b"b", b"a"], [2, 1])]
)
def test_find_gives_the_longest_run_from_the_first(keys: list[bytes], wanted: list[int]) -> None:
    assert named_pool(b"a", b"b").find(keys) == wanted


def test_of_several_copies_the_first_named_is_found() -> None:
    pool = named_pool(b"a", b"a", b"b", num_blocks=5)
    assert pool.find([b"a"]) == [1]
    pool.allocate(2)  # block 4 has no name; 1 is the longest unused
    assert pool.find([b"a"]) == [2]
    pool.allocate(1)
    assert pool.find([b"a"]) == [] and pool.find([b"b"]) == [3]


def test_blocks_without_a_name_go_first() -> None:
    pool = named_pool(b"a", b"b")
    assert pool.allocate(5).tolist() == [3, 4, 5, 6, 7]
    assert pool.num_cached == 2 and pool.num_free == 2


def test_the_longest_unused_name_goes_next() -> None:
    pool = named_pool(b"a", b"b", b"c", num_blocks=4)
    pool.take([1])
    pool.free(np.array([1]))  # used again
    assert [pool.allocate(1).tolist() for _ in range(3)] == [[2], [3], [1]]
    assert pool.find([b"a"]) == []


def test_of_blocks_freed_together_the_last_is_evicted_first() -> None:
    """So that what is left of a prefix can still be found."""
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.name(blocks.tolist(), [b"a", b"b", b"c"])
    pool.free(blocks)
    pool.allocate(1)
    assert pool.find([b"a", b"b", b"c"]) == [1, 2]


def test_how_many_of_found_blocks_are_free() -> None:
    pool = named_pool(b"a", b"b")
    pool.take([2])
    assert pool.num_free_among([1, 2]) == 1 and pool.num_free_among([]) == 0


def test_names_can_be_forgotten() -> None:
    pool = named_pool(b"a", b"b", b"c")
    pool.take([2])
    pool.forget_names()
    assert (pool.num_free, pool.num_cached, pool.find([b"a"]), pool.find([b"b"])) == (6, 0, [], [])
    pool.name([2], [b"d"])  # its owner may name it anew
    pool.free(np.array([2]))
    assert pool.find([b"d"]) == [2]
    pool.check_integrity()


def test_only_a_block_in_use_without_a_name_can_be_named() -> None:
    pool = named_pool(b"a")
    owned = int(pool.allocate(1)[0])
    for block in (1, 5, NULL_BLOCK):
        with pytest.raises(RuntimeError, match="cannot be named"):
            pool.name([owned, block], [b"b", b"c"])
    pool.take([1])
    with pytest.raises(RuntimeError, match="cannot be named"):
        pool.name([1], [b"b"])
    assert pool.find([b"b"]) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda pool: setattr(pool, "num_free", 3), "the free list is corrupt"),
        (lambda pool: pool.references.__setitem__(7, 1), "the free list is corrupt"),
        (lambda pool: pool.references.__setitem__(2, 0), "blocks are lost"),
        (lambda pool: pool._key_of.__setitem__(7, b"z"), "the prefix cache is corrupt"),
        (lambda pool: pool._block_of.__setitem__(b"z", 2), "names and blocks do not match"),
    ],
)
def test_damage_is_found(damage: Callable[[BlockPool], object], words: str) -> None:
    pool = named_pool(b"a", b"b")
    pool.take([2])
    pool.check_integrity()
    damage(pool)
    with pytest.raises(RuntimeError, match=words):
        pool.check_integrity()


# ---- any sequence of operations


class PoolMachine(RuleBasedStateMachine):
    """Against lists: the FIFO, the LRU order and the copies of each name, in plain sight."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.holders: list[list[int]] = []
        self.unnamed = list(range(1, 9))
        self.cached: list[int] = []
        self.names: list[tuple[int, bytes]] = []  # in order of naming

    def held(self) -> set[int]:
        return {block for holder in self.holders for block in holder}

    def key_of(self, block: int) -> bytes | None:
        return dict(self.names).get(block)

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        free = len(self.unnamed) + len(self.cached)
        assert self.pool.can_allocate(count) is (Admission.OK if count <= free else Admission.LATER)
        if count > free:
            return
        while len(self.unnamed) < count:
            block = self.cached.pop(0)
            self.names = [pair for pair in self.names if pair[0] != block]
            self.unnamed.append(block)
        wanted, self.unnamed = self.unnamed[:count], self.unnamed[count:]
        assert self.pool.allocate(count).tolist() == wanted
        self.holders.append(wanted)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.pool.pin(np.array(holder, np.int32))
        self.holders.append(list(holder))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(np.array(holder, np.int32))
        for block in reversed(holder):
            if block not in self.held():
                (self.unnamed if self.key_of(block) is None else self.cached).append(block)

    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        nameless = sorted(block for block in self.held() if self.key_of(block) is None)
        if nameless:
            blocks = data.draw(st.lists(st.sampled_from(nameless), unique=True))
            keys = [data.draw(st.sampled_from(KEYS)) for _ in blocks]
            self.pool.name(blocks, keys)
            self.names += zip(blocks, keys, strict=True)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def find_and_take(self, keys: list[bytes]) -> None:
        wanted: list[int] = []
        for key in keys:
            copies = [block for block, name in self.names if name == key]
            if not copies:
                break
            wanted.append(copies[0])
        assert self.pool.find(keys) == wanted
        assert self.pool.num_free_among(wanted) == sum(block in self.cached for block in wanted)
        self.pool.take(wanted)
        self.cached = [block for block in self.cached if block not in wanted]
        self.holders.append(wanted)

    @rule()
    def forget(self) -> None:
        self.pool.forget_names()
        self.unnamed += self.cached
        self.cached, self.names = [], []

    @invariant()
    def conserved(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.held()) and self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == len(self.unnamed) + len(self.cached)
        counts = np.bincount([block for holder in self.holders for block in holder], minlength=9)
        assert self.pool.references.tolist() == counts.tolist()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
