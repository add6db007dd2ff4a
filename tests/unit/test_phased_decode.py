"""Phased decode: order, who makes room for whom, and when the blocks of what has ended come back."""

import numpy as np
import pytest

from dp_engine.messages import Add, Sampling
from tests.running_world import FULL, PREEMPTED, running
from tests.scheduler_world import World, expected, prompt_of
from vote.decision import StepType

# ---- order


def test_every_running_sequence_decodes_one_token() -> None:
    world = running(4, 4, 4)
    assert sorted(world.decode()) == [(1, 1), (2, 1), (3, 1)]


def test_a_batch_is_ordered_by_length_and_the_younger_first() -> None:
    """DeepInfer's order: longest KV first; of equal ones that which has said least."""
    world = running(4, 9, 3)  # outputs so far: 3, 2, 1
    assert [request_id for request_id, _ in world.decode()] == [2, 1, 3]
    world = running(4, 5, 6)  # all are 7 long
    assert [request_id for request_id, _ in world.decode()] == [3, 2, 1]


def test_prefill_is_not_mixed_with_decode() -> None:
    world = running(4)
    world.add(2, 4)
    assert [world.decode(), world.prefill(), world.decode()] == [[(1, 1)], [(2, 4)], [(1, 1), (2, 1)]]


# ---- making room


def test_the_oldest_is_sacrificed() -> None:
    """Last come, first served: the newest keeps its latency."""
    world = running(12, 12, num_blocks=9)
    world.run()
    assert world.finished == {1: PREEMPTED, 2: "length"}
    assert world.scheduler.counters.preemptions == 1
    assert world.outputs[1] == expected(prompt_of(1, 12), len(world.outputs[1]))


def test_age_is_what_a_sequence_has_said_not_when_it_came() -> None:
    world = running(12, num_blocks=9)
    prompt = prompt_of(2, 12)
    world.scheduler.add(Add(1, 2, prompt + expected(prompt, 4), Sampling(20), num_emitted=4))  # of an earlier gang
    world.run()
    assert world.finished == {1: "length", 2: PREEMPTED}


def test_as_many_are_sacrificed_as_are_needed() -> None:
    """Oldest first: two small ones go when two younger ones need a block in the same step."""
    world = running(2, 2, 13, 14, num_blocks=5, block_size=16, max_tokens=9)
    assert world.scheduler.pool.num_free == 0
    steps = [world.decode() for _ in range(3)]
    assert [sorted(request_id for request_id, _ in pairs) for pairs in steps] == [[1, 2, 3, 4], [1, 2, 3, 4], [3, 4]]
    world.run()
    assert world.finished == {1: PREEMPTED, 2: PREEMPTED, 3: "length", 4: "length"}


def test_a_sequence_alone_that_lacks_a_block_goes_itself() -> None:
    """Whoever waits half-prefilled has the rest of the pool."""
    world = World(num_blocks=9, max_num_batched_tokens=8, preemption="recompute", **FULL)
    world.add(1, 8, 20)
    world.prefill()
    world.add(2, 20, 4)
    world.prefill()
    assert world.blocks(2) and world.waiting() == [2]
    world.decode()
    while world.scheduler.pool.num_free:
        world.decode()
    for _ in range(4):
        world.decode()
    assert world.running() == [] and world.waiting() == [1, 2]
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 8), 20)
    assert world.outputs[2] == expected(prompt_of(2, 20), 4)


def test_no_sequence_ends_while_none_needs_a_block() -> None:
    """Two sequences of 51 tokens in 4 blocks of 16 each: the pool is full, nobody lacks anything."""
    world = World(num_blocks=9, block_size=16, kv_watermark=1.0)
    world.add(1, 51, max_tokens=8)
    world.add(2, 51, max_tokens=8)
    world.run()
    assert world.finished == {1: "length", 2: "length"}


def test_decode_headroom_wants_a_free_block_that_nobody_needs() -> None:
    """DeepInfer's rule, kept by its preset."""
    world = World(num_blocks=9, block_size=16, kv_watermark=1.0, decode_headroom=1)
    world.add(1, 51, max_tokens=8)
    world.add(2, 51, max_tokens=8)
    world.run()
    assert world.finished == {1: PREEMPTED, 2: "length"}
    assert len(world.outputs[1]) == 1


def test_a_decode_batch_keeps_to_the_token_budget() -> None:
    """Drafts or not; with the sequence limit above it somebody has to wait for a turn."""
    world = World(max_num_seqs=8, max_num_batched_tokens=4)
    for request_id in range(1, 9):
        world.add(request_id, 2, 20)
    while world.scheduler.num_unfinished:
        batch = world.step()
        assert batch is not None and batch.num_tokens <= 4


# ---- blocks of a growing table


def test_a_table_grows_by_one_block_at_its_edge() -> None:
    world = running(7, num_blocks=9)
    grown = []
    for _ in range(5):
        world.decode()
        grown.append(len(world.blocks(1)))
    assert grown == [2, 3, 3, 3, 3]  # lengths computed: 8, 9, ...; the 9th token is written into block 3


@pytest.mark.parametrize(("block_size", "drafts", "blocks"), [(1, 3, [4, 8]), (2, 5, [2, 5]), (4, 3, [1, 2])])
def test_a_table_may_grow_by_more_than_one_block_a_step(block_size: int, drafts: int, blocks: list[int]) -> None:
    world = World(block_size=block_size, num_draft_tokens=drafts)
    world.guess(right=drafts)
    world.add(1, 4, max_tokens=20)
    world.prefill()
    before = len(world.blocks(1))
    world.decode()
    assert [before, len(world.blocks(1))] == blocks
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 4), 20)


# ---- what has ended


def test_a_finished_sequence_gives_its_blocks_back_at_settlement() -> None:
    world = running(8, max_tokens=1)
    assert world.finished == {1: "length"}
    assert world.scheduler.pool.num_used == 0 and world.running() == []


def test_release_next_decode() -> None:
    """DeepInfer's rule: what has ended keeps blocks and place until the next decode step has been planned."""
    world = running(8, max_tokens=1, release="next_decode", max_num_seqs=1)
    assert world.finished == {1: "length"} and world.scheduler.num_unfinished == 0
    assert world.scheduler.pool.num_used == 2
    world.add(2, 4, max_tokens=1)
    assert world.scheduler.facts().has_decode
    assert world.prefill() == []  # 1 has the only place; became an empty decode step
    assert world.scheduler.pool.num_used == 0
    assert world.prefill() == [(2, 4)]


def test_release_next_decode_of_an_aborted_sequence() -> None:
    world = running(8, release="next_decode")
    world.scheduler.abort(1)
    assert world.scheduler.pool.num_used == 2 and world.scheduler.num_unfinished == 0
    world.decode()
    assert world.scheduler.pool.num_used == 0
    world.run()
    assert world.finished == {}


@pytest.mark.parametrize("release", ["settlement", "next_decode"])
@pytest.mark.parametrize("schedulable", [True, False])
def test_a_dead_head_does_not_veto(release: str, schedulable: bool) -> None:
    world = World(release=release)
    world.add(1, 4, schedulable=schedulable)
    world.add(2, 4)
    world.scheduler.abort(1)
    if release == "next_decode" and not schedulable:
        assert not world.scheduler.facts().wants_prefill
        assert world.scheduler.facts().has_decode
        world.decode()  # swept
    assert world.scheduler.facts().wants_prefill
    world.run()
    assert world.finished[2] == "length"


@pytest.mark.parametrize(
    "release",
    ["settlement", "next_decode"],
)
def test_a_request_that_could_not_be_prepared_is_no_abort(release: str) -> None:
    world = World(release=release)
    world.add(1, 4, schedulable=False)
    world.scheduler.ready(1, error="no such picture")
    world.run()
    assert world.finished == {1: "preprocess_failed"} and world.scheduler.counters.aborted == 0


def test_a_dead_head_alone_leaves_nothing_to_do() -> None:
    world = World()
    world.add(1, 4, schedulable=False)
    world.scheduler.abort(1)
    assert world.step() is None
    world.check_drained()


@pytest.mark.parametrize("release", ["settlement", "next_decode"])
def test_an_aborted_half_prefilled_request_gives_all_its_blocks_back(release: str) -> None:
    """The walk-through's A: 188 of 255 blocks."""
    world = World(num_blocks=256, max_model_len=4096, release=release)
    world.add(1, 3000)
    assert world.prefill() == [(1, 2048)]
    assert world.scheduler.pool.num_used == 188
    world.scheduler.abort(1)
    world.run()
    assert world.scheduler.pool.num_free == 255 and world.scheduler.num_unfinished == 0


def test_abort_everywhere_gives_everything_back() -> None:
    world = World(max_num_batched_tokens=16, block_size=4)
    for request_id in range(4):
        world.add(request_id, 12, max_tokens=50)
    world.step(StepType.PREFILL)  # 0 runs, 1 is half prefilled, 2 and 3 wait
    for request_id in (1, 0, 3, 2, 2, 77):
        world.scheduler.abort(request_id)
    assert world.scheduler.num_unfinished == 0
    assert world.scheduler.counters.aborted == 4
    world.check_drained()
    assert world.step() is None and not world.finished


def test_giving_back_is_idempotent_per_sequence() -> None:
    world = running(8)
    seq = world.seq(1)
    world.scheduler.abort(1)
    world.scheduler.abort(1)
    world.scheduler.resources.release(seq)
    assert world.scheduler.pool.num_used == 0 and world.scheduler.counters.aborted == 1
    with pytest.raises(RuntimeError, match="freeing free blocks"):
        world.scheduler.pool.free(np.array([1], np.int32))
