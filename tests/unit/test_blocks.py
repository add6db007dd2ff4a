"""The block pool: conservation, references, errors."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dp_engine.blocks import NULL_BLOCK, Admission, BlockPool


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


class PoolMachine(RuleBasedStateMachine):
    """Against a dictionary of reference counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if self.pool.can_allocate(count) is Admission.OK:
            blocks = self.pool.allocate(count).tolist()
            used = {block for holder in self.holders for block in holder}
            assert NULL_BLOCK not in blocks and not used & set(blocks)
            self.holders.append(blocks)

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

    @invariant()
    def conserved(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len({block for holder in self.holders for block in holder})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
