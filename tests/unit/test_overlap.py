"""Overlap: the next step is decided while the last one is in flight; the tokens are the same as without."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.scheduler_world import EOS, World, expected, prompt_of
from vote.decision import StepType

POLICIES = pytest.mark.parametrize("policy", ["phased", "unified"])
TIGHT = {"block_size": 4, "kv_watermark": 1.0, "num_blocks": 13}


class Watched(World):
    """Counts the plans that had to wait for the step in flight."""

    put_off = 0

    def settle(self) -> None:
        self.put_off += self.scheduler._put_off is not None
        super().settle()


def requests(world: World, *prompts: int, max_tokens: int = 16, **more: Any) -> None:
    for request_id, length in enumerate(prompts, 1):
        world.add(request_id, length, max_tokens, **more)


# ---- the same with and without


def preempted(world: World) -> None:
    requests(world, 12, 12, 9, max_tokens=20)


def chunks_and_decodes(world: World) -> None:
    requests(world, 3, 30, 17, 5, max_tokens=9)


def later_arrivals(world: World) -> None:
    requests(world, 14, 13)
    for request_id in range(3, 8):
        for _ in range(3):
            world.step()
        world.add(request_id, 3 + request_id, 10)


def forks_of_a_waiting_parent(world: World) -> None:
    world.add(1, 10, 12)
    for request_id in (2, 3, 4):
        world.add(request_id, prompt_of(1, 10), 12, parent=1)


def forks_on_the_way(world: World) -> None:
    world.add(1, 10, 14)
    for request_id in (2, 3, 4):
        world.step()
        world.add(request_id, prompt_of(1, 10) + [7] * (request_id - 2), 9, parent=request_id - 1)


def stops(world: World) -> None:
    say = world.answer
    world.answer = lambda context: EOS if sum(context) % 5 == 0 else say(context)  # type: ignore[method-assign]
    requests(world, 5, 6, 7, 8, 9, 10)


def a_pool_for_one(world: World) -> None:
    requests(world, 28, 28, 28)


SCENARIOS: list[tuple[Callable[[World], None], dict[str, Any]]] = [
    (preempted, {"preemption": "recompute"}),
    (preempted, {"preemption": "terminate"}),
    (preempted, {"preemption": "recompute", "num_draft_tokens": 3}),
    (preempted, {"preemption": "recompute", "prefix_cache": False, "num_state_slots": 4}),
    (preempted, {"admission": "full"}),
    (chunks_and_decodes, {"max_num_batched_tokens": 8, "preemption": "recompute"}),
    (chunks_and_decodes, {"max_num_batched_tokens": 8, "preemption": "recompute", "num_draft_tokens": 2}),
    (later_arrivals, {"preemption": "recompute", "max_num_batched_tokens": 9}),
    (later_arrivals, {"preemption": "recompute", "max_num_seqs": 2}),
    (forks_of_a_waiting_parent, {"preemption": "recompute"}),
    (forks_of_a_waiting_parent, {"preemption": "recompute", "num_draft_tokens": 3, "prefix_cache": False}),
    (forks_on_the_way, {"preemption": "recompute"}),
    (forks_on_the_way, {"preemption": "recompute", "prefix_cache": False, "num_blocks": 9}),
    (stops, {"preemption": "recompute"}),
    (stops, {"preemption": "recompute", "num_draft_tokens": 4}),
    (a_pool_for_one, {"preemption": "recompute", "num_draft_tokens": 1}),
]


@POLICIES
@pytest.mark.parametrize(("scenario", "config"), SCENARIOS, ids=lambda part: getattr(part, "__name__", None))
def test_the_same_tokens_with_and_without(
    scenario: Callable[[World], None], config: dict[str, Any], policy: str
) -> None:
    results = []
    for overlap in (False, True):
        world = World(policy=policy, overlap=overlap, **(TIGHT | config))
        if world.config.num_draft_tokens:
            world.guess(right=1)
        scenario(world)
        world.run()
        results.append((dict(world.outputs), world.finished))
    assert results[0] == results[1]


# ---- short of blocks


@POLICIES
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_plan_that_lacks_blocks_is_put_off(policy: str, drafts: int) -> None:
    """Nobody is preempted while a step is in flight that writes into his blocks."""
    world = Watched(policy=policy, overlap=True, preemption="recompute", num_draft_tokens=drafts, **TIGHT)
    world.guess(right=2)
    preempted(world)
    world.run()
    assert world.put_off > 0 and world.scheduler.counters.preemptions > 0
    for request_id, length in ((1, 12), (2, 12), (3, 9)):
        assert world.outputs[request_id] == expected(prompt_of(request_id, length), 20)


@POLICIES
def test_a_put_off_plan_may_find_that_nobody_has_to_go(policy: str) -> None:
    """The step in flight ends a sequence, as its last token says."""
    world = Watched(policy=policy, overlap=True, preemption="terminate", block_size=4, num_blocks=7, kv_watermark=1.0)
    world.answer = lambda context: EOS if context[0] == 114 and len(context) == 12 else 50  # type: ignore[method-assign]
    requests(world, 11, 11, max_tokens=12)  # both need their fourth block with the same step
    world.run()
    assert world.put_off > 0 and world.scheduler.counters.preemptions == 0
    assert world.finished == {1: "length", 2: "stop"}


@POLICIES
def test_a_put_off_step_counts_as_work(policy: str) -> None:
    """The ballot is before the step in flight is settled: the gang must not fall asleep over it."""
    world = Watched(policy=policy, overlap=True, preemption="recompute", **TIGHT)
    preempted(world)
    while not world.put_off:
        before = world.scheduler.facts()
        world.step()
    assert before.unfinished and (before.has_decode or policy == "unified")
    world.run()


# ---- ends in flight


@POLICIES
def test_a_sequence_that_ends_for_certain_is_not_planned_again(policy: str) -> None:
    world = World(policy=policy, overlap=True)
    requests(world, 5, 6, max_tokens=3)
    world.run()
    assert [len(pairs) for pairs in world.ran] == [2, 2, 2]


@POLICIES
def test_a_sequence_that_stopped_in_flight_leaves_the_planned_step(policy: str) -> None:
    world = World(policy=policy, overlap=True)
    world.answer = lambda context: EOS if len(context) == 8 else 50  # type: ignore[method-assign]
    requests(world, 5, 6, max_tokens=9)
    world.run()
    assert world.outputs[1] == [50, 50, 50, EOS] and world.outputs[2] == [50, 50, EOS]
    decodes = [sorted(request_id for request_id, _ in pairs) for pairs in world.ran[1:] if pairs]
    assert decodes == [[1, 2], [1, 2], [1]]


@POLICIES
def test_an_abort_in_flight_gives_back_when_the_step_has_been_settled(policy: str) -> None:
    world = World(policy=policy, overlap=True, block_size=4, prefix_cache=False)
    requests(world, 6, 6)
    world.step()
    world.step(StepType.DECODE)  # in flight
    used = world.scheduler.pool.num_used
    world.scheduler.abort(1)
    world.add(1, 9, 3)  # the id may come again
    assert world.scheduler.pool.num_used == used
    world.scheduler.plan(StepType.MIXED if policy == "unified" else StepType.DECODE)
    world.settle()
    assert [tokens for output in world.noted for tokens in output.request_ids].count(1) == 1
    world.outputs.pop(1)
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 9), 3)
    assert world.outputs[2] == expected(prompt_of(2, 6), 16)


@POLICIES
def test_an_abort_in_flight_takes_a_sequence_out_of_the_planned_step(policy: str) -> None:
    world = World(policy=policy, overlap=True, block_size=4)
    requests(world, 6, 6)
    world.step()
    world.scheduler.plan(StepType.MIXED if policy == "unified" else StepType.DECODE)
    world.scheduler.abort(1)
    world.settle()
    batch = world.scheduler.batch()
    assert len(batch) == 1 and world.in_flight() == [2]
    world.pending = world.model(batch)
    world.run()
    assert world.outputs[1] == [] and world.outputs[2] == expected(prompt_of(2, 6), 16)


@POLICIES
def test_blocks_of_an_aborted_chunk_are_not_given_to_the_next_step(policy: str) -> None:
    """The step in flight still writes there."""
    world = World(policy=policy, overlap=True, max_num_batched_tokens=16, prefix_cache=False, **TIGHT)
    world.add(1, 40, 4)
    world.step()
    used = set(world.blocks(1)[:4])
    world.scheduler.abort(1)
    world.add(2, 16, 4)
    batch = world.step(StepType.PREFILL)  # planned before that one was settled
    if policy == "phased":
        assert batch is None, "all blocks of the prompt were taken with its first chunk"
    else:
        assert batch is not None and not used & set(batch.block_tables[0].tolist())
    world.run()
    assert world.outputs[2] == expected(prompt_of(2, 16), 4)


@POLICIES
def test_aborts_at_any_moment(policy: str) -> None:
    for moment in range(1, 12):
        world = World(policy=policy, overlap=True, preemption="recompute", num_draft_tokens=2, **TIGHT)
        world.guess(right=1)
        requests(world, 12, 12, 9)
        for _ in range(moment):
            world.step()
        world.scheduler.abort(1 + moment % 3)
        world.run()
        for request_id, length in ((1, 12), (2, 12), (3, 9)):
            output = world.outputs[request_id]
            assert output == expected(prompt_of(request_id, length), len(output))
            assert request_id == 1 + moment % 3 or len(output) == 16


# ---- drafts


@POLICIES
def test_drafts_are_guessed_when_the_last_tokens_are_known(policy: str) -> None:
    """And within what was reserved for them: the plan took the most there could be."""
    world = World(policy=policy, overlap=True, num_draft_tokens=4, block_size=4)
    world.guess(right=4)
    world.add(1, 6, 20)
    world.step()
    scheduler = world.scheduler
    scheduler.plan(StepType.MIXED if policy == "unified" else StepType.DECODE)
    assert scheduler._planned is not None and scheduler._planned.drafts_due
    assert scheduler._planned.num_drafts.tolist() == [4]
    scheduler.propose = lambda ledgers, rows, limits: np.minimum(limits, 0)  # nothing comes to mind
    world.settle()
    batch = scheduler.batch()
    assert batch.num_drafts.tolist() == [0] and batch.seqlens_q.tolist() == [1]
    world.pending = world.model(batch)
    world.guess(right=4)
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 6), 20)


@pytest.mark.parametrize("budget", [4, 7, 9])
@POLICIES
def test_upper_bounds_of_drafts_keep_to_the_budget(policy: str, budget: int) -> None:
    world = World(policy=policy, overlap=True, num_draft_tokens=4, max_num_batched_tokens=budget, max_num_seqs=3)
    world.guess(right=2)
    requests(world, 4, 4, 4)
    while world.scheduler.num_unfinished:
        batch = world.step()
        assert batch is None or batch.num_tokens <= budget
    world.run()


# ---- calls in order


def test_a_step_is_issued_once_the_one_before_is_settled() -> None:
    world = World(overlap=True)
    requests(world, 6)
    world.step()
    world.scheduler.plan(StepType.DECODE)
    with pytest.raises(AssertionError, match="one step at a time"):
        world.scheduler.batch()
    world.settle()
    assert len(world.scheduler.batch()) == 1


def test_a_step_is_planned_before_it_is_issued() -> None:
    with pytest.raises(AssertionError, match="plan comes first"):
        World(overlap=True).scheduler.batch()
