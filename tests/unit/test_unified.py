"""The unified policy: one token budget, running first, then waiting; recompute from the tail or the worst priority."""

from typing import Any

import pytest

from tests.scheduler_world import World, expected, prompt_of
from vote.decision import StepType


def unified(*prompts: int, max_tokens: int = 20, **config: Any) -> World:
    """Requests 1, 2, ... were added together and have made one step."""
    world = World(**({"policy": "unified", "block_size": 4, "prefix_cache": False} | config))
    for request_id, prompt in enumerate(prompts, 1):
        world.add(request_id, prompt, max_tokens)
    if prompts:
        world.step()
    return world


def until_preempted(world: World) -> list[tuple[int, int]]:
    """Steps up to the first that preempts; what ran in it."""
    before = world.scheduler.counters.preemptions
    while world.scheduler.counters.preemptions == before:
        world.step()
    return world.ran[-1]


# ---- one budget


def test_a_step_mixes_prefill_and_decode() -> None:
    world = unified(6)
    world.add(2, 9)
    assert world.scheduled() == [(1, 1), (2, 9)]
    assert [step_type.value for step_type, _ in world.steps] == ["mixed", "mixed"]


def test_running_come_first_in_the_order_of_their_admission() -> None:
    world = unified(6, 5, max_num_batched_tokens=16)
    world.add(3, 30)
    assert [world.scheduled() for _ in range(3)] == [
        [(1, 1), (2, 1), (3, 14)],
        [(1, 1), (2, 1), (3, 14)],
        [(1, 1), (2, 1), (3, 2)],
    ]


def test_a_half_prefilled_prompt_runs_before_those_that_wait() -> None:
    world = unified(30, 6, max_num_batched_tokens=16)
    assert world.running() == [1] and world.waiting() == [2]
    assert world.scheduled() == [(1, 14), (2, 2)]
    assert world.scheduled() == [(1, 1), (2, 4)]


@pytest.mark.parametrize("prompt", [15, 16, 17, 32])
def test_prompt_at_the_budget(prompt: int) -> None:
    world = unified(prompt, max_num_batched_tokens=16, max_tokens=1)
    world.run()
    assert [pairs[0][1] for pairs in world.ran] == [16] * (prompt // 16) + [prompt % 16] * (prompt % 16 > 0)
    assert world.outputs[1] == expected(prompt_of(1, prompt), 1)


@pytest.mark.parametrize(("tokens", "inputs", "wanted"), [(None, 10, 10), (6, 10, 6), (12, 10, 10)])
def test_both_budgets_hold(tokens: int | None, inputs: int, wanted: int) -> None:
    world = unified(20, max_num_scheduled_tokens=tokens, max_num_batched_tokens=inputs)
    assert world.ran == [[(1, wanted)]]


def test_running_beyond_the_budget_wait_for_their_turn_without_loss() -> None:
    world = unified(2, 2, 2, 2, max_num_batched_tokens=3, max_tokens=4)
    world.run()
    assert all(sum(length for _, length in pairs) <= 3 for pairs in world.ran)
    for request_id in (1, 2, 3, 4):
        assert world.outputs[request_id] == expected(prompt_of(request_id, 2), 4)


def test_sequence_limit() -> None:
    world = unified(4, 4, 4, max_num_seqs=2, max_tokens=2)
    assert world.running() == [1, 2]
    assert [world.scheduled(), world.scheduled()] == [[(1, 1), (2, 1)], [(3, 4)]]


def test_without_chunked_prefill_a_prompt_waits_for_its_whole_budget() -> None:
    world = unified(10, 8, 2, max_num_batched_tokens=16, chunked_prefill=False)
    assert world.ran == [[(1, 10)]] and world.waiting() == [2, 3]
    assert world.scheduled() == [(1, 1), (2, 8), (3, 2)]


# ---- long prompts


def test_long_prefill_threshold_caps_a_prompt_while_others_run() -> None:
    world = unified(40, 4, long_prefill_token_threshold=8)
    assert world.ran == [[(1, 8), (2, 4)]]
    assert world.scheduled() == [(1, 8), (2, 1)]


def test_long_prefill_threshold_does_not_hold_for_a_lone_request() -> None:
    world = unified(40, long_prefill_token_threshold=8, max_num_batched_tokens=16)
    assert world.ran == [[(1, 16)]]
    world.add(2, 40)
    assert world.scheduled() == [(1, 8), (2, 8)]
    world.scheduler.abort(2)
    assert world.scheduled() == [(1, 16)]


# ---- waiting


def test_a_head_that_does_not_fit_blocks() -> None:
    world = unified(20, num_blocks=9, max_tokens=3)  # 5 of 8 blocks
    world.add(2, 16)
    world.add(3, 4)
    assert world.scheduled() == [(1, 1)] and world.waiting() == [2, 3]
    assert world.scheduled() == [(1, 1)]
    assert world.scheduled() == [(2, 16), (3, 4)]


def test_a_waiting_request_needs_room_for_its_whole_prompt() -> None:
    """Though its first chunk would fit: otherwise two half-prefilled prompts block each other."""
    world = unified(20, num_blocks=9, max_num_batched_tokens=8, max_tokens=3)
    assert len(world.blocks(1)) == 2  # blocks come as they are needed all the same
    world.add(2, 28)
    assert world.scheduled() == [(1, 8)]
    assert world.scheduled() == [(1, 4)]
    assert world.waiting() == [2]
    world.run()
    assert world.outputs[2] == expected(prompt_of(2, 28), 4)


def test_an_unschedulable_head_blocks() -> None:
    world = unified()
    world.add(1, 4, schedulable=False)
    world.add(2, 4)
    assert world.step() is None and not world.scheduler.facts().unfinished
    world.scheduler.ready(1)
    assert world.scheduled() == [(1, 4), (2, 4)]


# ---- order


def test_priority_before_arrival() -> None:
    world = unified(order="priority")
    for request_id, priority in ((1, 5), (2, 0), (3, 5), (4, 0)):
        world.add(request_id, 4, priority=priority)
    assert world.scheduled() == [(2, 4), (4, 4), (1, 4), (3, 4)]


def test_fcfs_ignores_priorities() -> None:
    world = unified()
    for request_id, priority in ((1, 5), (2, 0)):
        world.add(request_id, 4, priority=priority)
    assert world.scheduled() == [(1, 4), (2, 4)]


# ---- preemption


def test_fcfs_preempts_the_tail() -> None:
    world = unified(10, 10, 10, num_blocks=10)
    assert until_preempted(world) == [(1, 1), (2, 1)]
    assert world.running() == [1, 2] and world.waiting() == [3]
    assert world.blocks(3) == [] and world.computed(3) == 0
    world.run()
    for request_id in (1, 2, 3):
        assert world.outputs[request_id] == expected(prompt_of(request_id, 10), 20)


def test_the_tail_itself_is_preempted_if_it_lacks_a_block() -> None:
    world = unified(10, max_tokens=14, num_blocks=7)
    world.add(2, 9, 14)
    assert world.scheduled() == [(1, 1), (2, 9)]
    assert until_preempted(world) == [(1, 1)]
    assert world.waiting() == [2] and len(world.blocks(1)) == 4
    world.run()
    assert world.outputs[2] == expected(prompt_of(2, 9), 14) and len(world.outputs[1]) == 14


def test_a_preempted_request_comes_before_those_that_wait() -> None:
    world = unified(10, 10, 10, num_blocks=10, max_num_seqs=3)
    world.add(4, 4)
    until_preempted(world)
    assert world.waiting() == [3, 4]


def test_priority_preempts_the_worst_then_the_latest() -> None:
    world = unified(order="priority", num_blocks=10)
    for request_id, priority in ((1, 3), (2, 7), (3, 7)):
        world.add(request_id, 10, 20, priority=priority)
    world.step()
    assert world.running() == [1, 2, 3]
    until_preempted(world)
    assert world.running() == [1, 2]
    world.scheduler.abort(1)
    world.run()
    assert world.outputs[3] == expected(prompt_of(3, 10), 20)


def test_a_victim_that_was_served_already_gives_its_tokens_back() -> None:
    """The worst priority was served first; who comes after the one that took its place has its token, too."""
    world = unified(order="priority", num_blocks=11, max_num_batched_tokens=6)
    for request_id, prompt, priority in ((1, 2, 9), (2, 3, 5), (3, 25, 5)):
        world.add(request_id, prompt, 8, priority=priority)
        world.step()
    pairs = until_preempted(world)
    assert world.ran[-2] == [(1, 1), (2, 1), (3, 4)] and pairs == [(2, 1), (3, 5)]
    assert world.waiting() == [1]
    world.run()
    for request_id, prompt in ((1, 2), (2, 3), (3, 25)):
        assert world.outputs[request_id] == expected(prompt_of(request_id, prompt), 8)


def test_a_step_that_preempted_admits_nobody() -> None:
    world = unified(9, 9, 9, num_blocks=10, order="priority")
    while world.scheduler.pool.num_free or len(world.outputs[1]) % 4:
        world.step()
    world.add(4, 1, 1, priority=-1)  # would fit into what the victim leaves, and is the next in order
    assert until_preempted(world) == [(1, 1), (2, 1)]
    assert world.scheduler.pool.num_free == 1 and world.waiting() == [4, 3]
    assert world.scheduled() == [(1, 1), (2, 1), (4, 1)]


def test_terminate_ends_the_victim() -> None:
    world = unified(10, 10, 10, num_blocks=10, preemption="terminate")
    until_preempted(world)
    assert world.finished == {3: "insufficient_system_resource"} and world.waiting() == []
    world.run()


def test_structured_output_never_recomputes() -> None:
    world = unified(10, 10, num_blocks=10)
    world.add(3, 10, 20, structured=True)
    world.step()
    until_preempted(world)
    assert world.finished == {3: "insufficient_system_resource"}


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_preemptions_are_bounded(limit: int) -> None:
    world = unified(10, 10, 10, 10, num_blocks=11, max_preemptions=limit)
    seqs = [world.scheduler._by_id[request_id] for request_id in (1, 2, 3, 4)]
    world.run()
    assert all(seq.preemptions <= limit for seq in seqs)
    assert "length" in world.finished.values() and (limit or "insufficient_system_resource" in world.finished.values())


def test_two_that_do_not_fit_together_finish_one_after_the_other() -> None:
    """Two requests of 20 + 20 tokens in 12 blocks of 4 both finish with at most 3 preemptions each."""
    world = unified(20, 20, num_blocks=13)
    seqs = [world.seq(1), world.seq(2)]
    world.run()
    assert world.finished == {1: "length", 2: "length"}
    assert all(seq.preemptions <= 3 for seq in seqs) and world.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("order", ["fcfs", "priority"])
@pytest.mark.parametrize("num_blocks", [9, 11, 13, 17])
def test_tight_pools_change_no_token(num_blocks: int, order: str) -> None:
    world = World(policy="unified", num_blocks=num_blocks, block_size=4, max_num_batched_tokens=9, order=order)
    for request_id in range(1, 8):
        world.add(request_id, 5 + request_id, 12, priority=request_id % 3)
    world.run()
    for request_id in range(1, 8):
        assert world.outputs[request_id] == expected(prompt_of(request_id, 5 + request_id), 12)


# ---- steps that run nothing


def test_a_step_without_anything_to_schedule_needs_no_block() -> None:
    world = unified(num_blocks=9)
    scheduler = world.scheduler
    scheduler.pool.allocate(8)
    world.add(1, 4)
    for _ in range(3):
        scheduler.plan(StepType.MIXED)
        facts = scheduler.facts()
        assert facts.unfinished and not facts.scheduled
        batch = scheduler.batch()
        assert (len(batch), batch.num_tokens, batch.block_tables.shape) == (0, 0, (0, 0))
        scheduler.settle(world.model(batch))
    assert world.waiting() == [1] and scheduler.pool.num_free == 0


def test_facts_say_what_was_scheduled() -> None:
    world = unified()
    scheduler = world.scheduler
    assert not scheduler.facts().unfinished
    world.add(1, 4, max_tokens=1)
    scheduler.plan(StepType.MIXED)
    facts = scheduler.facts()
    assert facts.unfinished and facts.scheduled and not facts.wants_prefill and not facts.has_decode
    world.note(scheduler.settle(world.model(scheduler.batch())))
    scheduler.plan(StepType.MIXED)
    facts = scheduler.facts()
    assert not facts.unfinished and not facts.scheduled
    world.check_drained()


def test_an_end_without_a_step_is_worth_a_step() -> None:
    world = unified()
    world.add(1, 4, schedulable=False)
    world.scheduler.ready(1, error="no such picture")
    batch = world.step()
    assert batch is not None and len(batch) == 0
    assert world.finished == {1: "preprocess_failed"}


def test_prefill_is_no_word_of_this_policy() -> None:
    with pytest.raises(NotImplementedError):
        unified().scheduler.try_prefill()


def test_forks_do_not_push_a_step_over_the_token_budget() -> None:
    world = unified(4, max_num_batched_tokens=4)
    for request_id in range(2, 9):
        world.add(request_id, prompt_of(1, 4), 20, parent=1)
    for _ in range(4):
        assert sum(length for _, length in world.scheduled()) <= 4


def test_refusal_at_prefill_is_refused() -> None:
    with pytest.raises(ValueError, match="refusal at_prefill needs the phased policy"):
        unified(refusal="at_prefill", num_blocks=5)
