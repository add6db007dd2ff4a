"""Phased prefill: which heads of `waiting` a step takes, limit by limit, and when a rank asks for one."""

from typing import Any

import pytest

from tests.scheduler_world import World, expected, prompt_of
from vote.decision import StepType

# ---- number of sequences


def test_sequence_limit_counts_running_and_admitted() -> None:
    world = World(max_num_seqs=3)
    world.add(1, 4)
    world.step()
    for request_id in (2, 3, 4):
        world.add(request_id, 4)
    assert world.prefill() == [(2, 4), (3, 4)]
    assert not world.scheduler.facts().wants_prefill
    assert world.prefill() == [(3, 1), (2, 1), (1, 1)]  # nothing can be admitted, so this became a decode step


def test_a_chunk_needs_no_place_among_the_running() -> None:
    """It is counted while it is admitted, not while it waits for its next chunk."""
    world = World(max_num_seqs=1, max_num_batched_tokens=16)
    world.add(1, 20)
    world.add(2, 4)
    assert world.prefill() == [(1, 16)]
    assert world.scheduler.num_running == 0
    assert world.prefill() == [(1, 4)]
    assert world.waiting() == [2]


# ---- sum of KV lengths


@pytest.mark.parametrize(("limit", "taken"), [(None, 3), (36, 3), (35, 2), (24, 2), (23, 1)])
def test_sum_k_counts_whole_lengths(limit: int | None, taken: int) -> None:
    world = World(prefill_max_sum_seqlen_k=limit)
    for request_id in (1, 2, 3):
        world.add(request_id, 12)
    assert world.prefill() == [(request_id, 12) for request_id in range(1, taken + 1)]


def test_sum_k_counts_the_whole_length_of_a_chunk_too() -> None:
    world = World(prefill_max_sum_seqlen_k=40, max_num_batched_tokens=16)
    world.add(1, 30)
    world.add(2, 12)
    assert world.prefill() == [(1, 16)]
    assert world.prefill() == [(1, 14)]  # two tokens of 2 would be in the budget, but 30 + 12 are above 40
    assert world.prefill() == [(2, 12)]


# ---- token budget


def test_token_budget_splits_a_prompt_over_steps() -> None:
    world = World(max_num_batched_tokens=16, block_size=4)
    world.add(1, 40, max_tokens=2)
    assert [world.scheduled() for _ in range(4)] == [[(1, 16)], [(1, 16)], [(1, 8)], [(1, 1)]]
    assert world.finished == {1: "length"}
    assert world.outputs[1] == expected(prompt_of(1, 40), 2)


@pytest.mark.parametrize("prompt", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("block_size", [4, 16, 5])
def test_prompt_at_the_budget(prompt: int, block_size: int) -> None:
    """One less, exactly, one more; with chunks that end on a block's edge or next to it."""
    world = World(max_num_batched_tokens=16, block_size=block_size)
    world.add(1, prompt, max_tokens=2)
    world.run()
    chunks = [16] * (prompt // 16) + ([prompt % 16] if prompt % 16 else [])
    assert [lengths for _, lengths in world.steps] == [[chunk] for chunk in chunks] + [[1]]
    assert world.outputs[1] == expected(prompt_of(1, prompt), 2)


@pytest.mark.parametrize("step_of_prompts", [15, 16, 17])
def test_prompts_fill_the_budget_together(step_of_prompts: int) -> None:
    world = World(max_num_batched_tokens=16)
    world.add(1, 6)
    world.add(2, step_of_prompts - 6)
    second = min(step_of_prompts - 6, 10)
    assert world.prefill() == [(1, 6), (2, second)]
    assert world.waiting() == ([2] if step_of_prompts == 17 else [])


def test_without_chunked_prefill_a_prompt_waits_for_a_budget_of_its_own() -> None:
    world = World(max_num_batched_tokens=16, chunked_prefill=False)
    for request_id, length in ((1, 10), (2, 7), (3, 2)):
        world.add(request_id, length)
    assert world.prefill() == [(1, 10)]  # 3 would fit, but may not overtake 2
    assert world.prefill() == [(2, 7), (3, 2)]


# ---- a chunk


def test_a_chunk_ends_the_batch_and_stays_at_the_head() -> None:
    world = World(max_num_batched_tokens=16, block_size=4, chunked_prefill=True)
    world.add(1, 10)
    world.add(2, 20, chunk_checkpoints=(3,))
    world.add(3, 2)
    assert world.prefill() == [(1, 10), (2, 3)]  # three tokens of budget are left, but the batch is over
    assert world.waiting() == [2, 3] and world.running() == [1]
    assert world.prefill() == [(2, 16)]
    assert world.waiting() == [2, 3]
    assert world.prefill() == [(2, 1), (3, 2)]


def test_a_chunk_has_no_token_before_the_prompt_is_complete() -> None:
    world = World(max_num_batched_tokens=16)
    world.add(1, 20)
    world.step()
    assert not world.outputs and world.computed(1) == 16
    assert world.scheduler.counters.prompt_tokens == 16
    world.step()
    assert len(world.outputs[1]) == 1
    assert world.scheduler.counters.prompt_tokens == 20


def test_the_first_chunk_reserves_blocks_of_the_whole_prompt() -> None:
    world = World(max_num_batched_tokens=16, block_size=4)
    world.add(1, 30)
    world.step()
    assert len(world.blocks(1)) == 8


def test_a_new_arrival_does_not_overtake_a_half_prefilled_head() -> None:
    world = World(max_num_batched_tokens=8)
    world.add(1, 20)
    world.step()
    world.add(2, 4)
    assert [world.prefill() for _ in range(2)] == [[(1, 8)], [(1, 4), (2, 4)]]


# ---- the head blocks


def test_an_unschedulable_head_blocks() -> None:
    world = World()
    world.add(1, 4, schedulable=False)
    world.add(2, 4)
    assert world.step() is None
    facts = world.scheduler.facts()
    assert not facts.wants_prefill and not facts.unfinished  # `Ready` wakes the gang
    world.scheduler.ready(1)
    assert world.prefill() == [(1, 4), (2, 4)]


def test_an_unschedulable_request_ends_the_batch_before_it() -> None:
    world = World()
    world.add(1, 4)
    world.add(2, 4, schedulable=False)
    world.add(3, 4)
    assert world.prefill() == [(1, 4)]
    world.scheduler.ready(2, error="no such picture")
    assert world.prefill() == [(3, 4)]
    assert world.finished == {2: "preprocess_failed"}


def test_ready_of_an_unknown_request_is_ignored() -> None:
    world = World()
    world.scheduler.ready(5)
    world.scheduler.ready(5, error="gone")
    world.run()
    assert not world.finished


def test_a_head_that_does_not_fit_blocks() -> None:
    world = World(num_blocks=11, block_size=4, kv_watermark=1.0)
    world.add(1, 24, max_tokens=4)
    world.step()
    world.add(2, 30, max_tokens=2)  # 8 blocks, 4 are free
    world.add(3, 4, max_tokens=4)  # would fit
    assert not world.scheduler.facts().wants_prefill
    assert world.prefill() == [(1, 1)]
    world.run()
    assert [pairs for pairs in world.ran if pairs[0][0] != 1] == [[(2, 30), (3, 4)], [(2, 1), (3, 1)]] + [[(3, 1)]] * 2
    assert set(world.finished.values()) == {"length"}


def test_an_empty_rank_admits_whatever_add_let_in() -> None:
    """A half-prefilled request behind the head gives back what the head needs."""
    world = World(num_blocks=9, block_size=4, max_num_batched_tokens=8, preemption="recompute")
    world.add(1, 20, max_tokens=3)
    world.step()  # 1 is half prefilled: 5 of 8 blocks
    world.scheduler.waiting.push_front(world.seq(1))
    world.add(2, 20, max_tokens=3)
    world.scheduler.waiting.push_front(world.seq(2))  # as after a preemption
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 20), 3)
    assert world.outputs[2] == expected(prompt_of(2, 20), 3)


# ---- when a rank asks for prefill


def test_a_head_that_may_run_is_work_whether_it_fits_or_not() -> None:
    """So that the gang does not fall asleep over it."""
    world = World(num_blocks=11, block_size=4, kv_watermark=1.0)
    assert not world.scheduler.facts().unfinished
    world.add(1, 30)
    facts = world.scheduler.facts()
    assert facts.unfinished and facts.wants_prefill and not facts.has_decode
    world.scheduler.pool.allocate(3)  # of ten blocks seven are left, eight are needed
    assert world.scheduler.facts().unfinished


@pytest.mark.parametrize(("length", "wants"), [(68, True), (69, False)])
def test_watermark(length: int, wants: bool) -> None:
    """No prefill while more than 90 % of the pool, null block included, are in use."""
    world = World(num_blocks=20, block_size=4, kv_watermark=0.9)
    world.add(1, length, max_tokens=3)  # 2 or 1 of 20 blocks are left
    world.step()
    world.add(2, 1)
    assert world.scheduler.facts().wants_prefill is wants
    world.run()


def half_prefilled_above_the_watermark(**config: Any) -> World:
    """310 tokens in 20 blocks of 16: nothing runs, and the pool is full."""
    world = World(num_blocks=21, block_size=16, max_num_batched_tokens=64, **config)
    world.add(1, 310, max_tokens=4)
    world.step()
    assert world.scheduler.pool.num_free == 0 and not world.scheduler.num_running
    return world


def test_watermark_does_not_hold_while_nothing_runs() -> None:
    world = half_prefilled_above_the_watermark()
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 310), 4)


def test_without_the_escape_the_watermark_holds_for_ever() -> None:
    """DeepInfer's own rule, kept by its preset."""
    world = half_prefilled_above_the_watermark(watermark_escape=False, decode_headroom=1)
    assert all(world.step() is None for _ in range(10))
    assert world.computed(1) == 64


@pytest.mark.parametrize(("want", "wants"), [("head", True), ("admissible", False)])
@pytest.mark.parametrize("what", ["sequences", "blocks"])
def test_want(what: str, want: str, wants: bool) -> None:
    """`head`: a schedulable head is enough, and the second ballot finds out; `admissible`: it must fit."""
    world = World(want=want, max_num_seqs=1 if what == "sequences" else 8, num_blocks=11, block_size=4)
    world.add(1, 16, max_tokens=9)
    world.step()
    world.add(2, 4 if what == "sequences" else 28)
    assert world.scheduler.facts().wants_prefill is wants
    assert world.prefill() == [(1, 1)]  # no rank had anything to prefill
    world.run()


def test_half_prefilled_needs_no_fit() -> None:
    """It has its blocks already."""
    world = World(num_blocks=11, block_size=4, max_num_batched_tokens=8, kv_watermark=1.0)
    world.add(1, 8, max_tokens=5)
    world.step()
    world.add(2, 30, max_tokens=2)
    world.step(StepType.PREFILL)
    assert world.scheduler.pool.num_free == 0 and world.running() == [1]
    assert world.scheduler.facts().wants_prefill
    assert world.prefill() == [(2, 8)]
    world.run()


def test_a_rank_that_did_not_want_prefill_has_nothing_for_it() -> None:
    """Its peers may run one at an ANY point all the same: a placeholder, though there would be blocks."""
    world = World(num_blocks=21, block_size=4, kv_watermark=0.4)
    world.add(1, 37, max_tokens=3)
    world.step()
    world.add(2, 4)
    scheduler = world.scheduler
    assert not scheduler.facts().wants_prefill
    assert not scheduler.try_prefill()
    scheduler.plan(StepType.PREFILL)
    batch = scheduler.batch()
    assert (len(batch), batch.num_tokens, batch.block_tables.shape) == (0, 0, (0, 0))
    world.note(scheduler.settle(world.model(batch)))
    world.run()


@pytest.mark.parametrize("step_type", [StepType.PREFILL, StepType.DECODE])
def test_a_placeholder_step_needs_no_block_no_slot_no_request(step_type: StepType) -> None:
    world = half_prefilled_above_the_watermark(num_state_slots=2, prefix_cache=False)
    scheduler = world.scheduler
    scheduler.pause("all")  # whatever keeps its requests from running
    for _ in range(3):
        assert not scheduler.facts().wants_prefill
        if step_type is StepType.PREFILL:
            assert not scheduler.try_prefill()
        scheduler.plan(step_type)
        batch = scheduler.batch()
        assert len(batch) == 0 and not batch.block_copies.size and not batch.state_copies.size
        scheduler.settle(world.model(batch))
        scheduler.check_integrity()
    assert scheduler.pool.num_free == 0 and world.computed(1) == 64
    scheduler.pause("none")
    world.run()
    assert world.finished == {1: "length"}
