"""Forks: sharing a parent's KV, and copying before writing."""

import pytest

from tests.forks import PROMPT, check, parent, prefilled_tokens
from tests.scheduler_world import expected, prompt_of
from vote.decision import StepType

POLICIES = pytest.mark.parametrize("policy", ["phased", "unified"])

# ---- from where


@POLICIES
def test_a_fork_of_a_waiting_parent_waits_for_its_prompt(policy: str) -> None:
    world = parent(policy, prefilled=False)
    world.add(2, PROMPT, 12, parent=1)
    world.add(3, PROMPT, 12, parent=1)
    assert world.waiting() == [1] and not world.scheduler.prompted
    world.step()
    assert [seq.request_id for seq in world.scheduler.prompted] == [2, 3]
    assert world.scheduler.counters.forks == 2
    check(world, {1: PROMPT, 2: PROMPT, 3: PROMPT})
    assert prefilled_tokens(world) == 10


@POLICIES
def test_a_fork_of_a_running_parent_shares_at_once(policy: str) -> None:
    world = parent(policy)
    world.step()
    world.add(2, PROMPT, 12, parent=1)
    assert [seq.request_id for seq in world.scheduler.prompted] == [2] and world.waiting() == []
    assert world.blocks(2) == world.blocks(1)[:3] and world.computed(2) == 9
    assert world.scheduler.pool.references[world.blocks(2)].tolist() == [2, 2, 2]
    check(world, {1: PROMPT, 2: PROMPT})
    assert prefilled_tokens(world) == 10


@POLICIES
def test_a_fork_of_a_prompted_fork(policy: str) -> None:
    world = parent(policy)
    for request_id in (2, 3, 4):
        world.add(request_id, PROMPT, 12, parent=request_id - 1)
    assert [seq.request_id for seq in world.scheduler.prompted] == [2, 3, 4]
    assert world.scheduler.pool.references[world.blocks(1)].tolist() == [4, 4, 4]
    check(world, dict.fromkeys((1, 2, 3, 4), PROMPT))


@POLICIES
def test_a_fork_of_a_half_prefilled_parent_waits_for_the_rest(policy: str) -> None:
    world = parent(policy, max_num_batched_tokens=8)
    assert world.computed(1) == 8
    world.add(2, PROMPT, 12, parent=1)
    assert world.scheduler.num_unfinished == 2 and not world.scheduler.prompted and 2 not in world.waiting()
    check(world, {1: PROMPT, 2: PROMPT})


@POLICIES
def test_a_fork_may_take_over_what_its_parent_has_said(policy: str) -> None:
    world = parent(policy)
    for _ in range(4):
        world.step()
    text = PROMPT + world.outputs[1]
    assert len(text) == 15
    world.add(2, text, 12, parent=1)
    assert world.computed(2) == 14
    check(world, {1: PROMPT, 2: text})
    assert prefilled_tokens(world) == 10


@POLICIES
@pytest.mark.parametrize(("cut", "extra", "shared"), [(10, 3, 10), (8, 5, 8), (6, 1, 6), (9, 1, 9), (1, 1, 1)])
def test_a_diverging_fork_goes_to_the_head_of_waiting(cut: int, extra: int, shared: int, policy: str) -> None:
    """It shares as far as the tokens are the same, and prefills the rest."""
    world = parent(policy)
    world.add(3, 6, schedulable=False)
    prompt = PROMPT[:cut] + prompt_of(50, extra)
    world.add(2, prompt, 12, parent=1)
    if shared == len(prompt) - 1:
        assert [seq.request_id for seq in world.scheduler.prompted] == [2]
    else:
        assert world.waiting() == [2, 3]
    assert world.computed(2) == shared
    while 2 in world.waiting():
        world.step(StepType.PREFILL)
    world.scheduler.ready(3)
    check(world, {1: PROMPT, 2: prompt})


@POLICIES
def test_a_shorter_prompt_is_shared_to_its_last_token(policy: str) -> None:
    world = parent(policy)
    world.add(2, PROMPT[:6], 12, parent=1)
    assert world.computed(2) == 5 and world.blocks(2) == world.blocks(1)[:2]
    check(world, {1: PROMPT, 2: PROMPT[:6]})


@POLICIES
@pytest.mark.parametrize("prompt", [[9, *PROMPT], PROMPT[:1]])
def test_without_a_common_token_a_fork_runs_on_its_own(prompt: list[int], policy: str) -> None:
    world = parent(policy)
    world.add(2, prompt, 12, parent=1)
    assert world.waiting() == [2] and world.scheduler.counters.forks == 0
    check(world, {1: PROMPT, 2: prompt})


@POLICIES
def test_another_salt_shares_nothing(policy: str) -> None:
    world = parent(policy)
    world.add(2, PROMPT, 12, parent=1, cache_salt="mine")
    assert world.waiting() == [2] and world.scheduler.counters.forks == 0
    check(world, {1: PROMPT, 2: PROMPT})


@POLICIES
def test_a_fork_of_nobody_is_an_ordinary_request(policy: str) -> None:
    world = parent(policy)
    world.add(2, PROMPT, 12, parent=77)
    assert world.waiting() == [2]
    check(world, {1: PROMPT, 2: PROMPT})


# ---- copies


@POLICIES
@pytest.mark.parametrize(
    ("length", "copies"),
    [
        (8, 1),  # 7 of 8 tokens are shared: the second block is half written
        (9, 0),  # 8: nothing is half written
        (10, 1),
        (12, 1),
        (13, 0),
    ],
)
def test_the_tail_is_copied_only_if_it_is_half_written(length: int, copies: int, policy: str) -> None:
    prompt = prompt_of(1, length)
    world = parent(policy, prompt)
    world.add(2, prompt, 12, parent=1)
    tail = world.blocks(1)[(length - 1) // 4]
    free = world.scheduler.pool.num_free
    batch = world.step(StepType.DECODE)
    assert batch is not None
    assert len(batch.block_copies) == copies
    own = world.blocks(2)[(length - 1) // 4]
    assert own != tail
    if copies:
        assert batch.block_copies.tolist() == [[tail, own]]
    assert world.blocks(2)[: (length - 1) // 4] == world.blocks(1)[: (length - 1) // 4]
    grown = len(world.blocks(1)) - -(-length // 4)
    assert free - world.scheduler.pool.num_free == 1 + grown, "one block is what a fork costs"
    check(world, {1: prompt, 2: prompt})


@POLICIES
def test_a_diverging_fork_copies_the_tail_when_it_starts(policy: str) -> None:
    world = parent(policy)
    world.add(2, [*PROMPT, 7, 8, 9], 12, parent=1)
    tail = world.blocks(1)[2]
    assert world.blocks(2)[2] == tail
    batch = world.step(StepType.PREFILL)
    assert batch is not None and batch.block_copies.tolist() == [[tail, world.blocks(2)[2]]]
    assert dict(world.ran[-1])[2] == 3
    check(world, {1: PROMPT, 2: [*PROMPT, 7, 8, 9]})


@POLICIES
def test_the_source_of_a_copy_lives_until_it_has_been_made(policy: str) -> None:
    """Though it is in nobody's table any more."""
    world = parent(policy)
    scheduler = world.scheduler
    world.add(2, PROMPT, 12, parent=1)
    scheduler.abort(1)
    scheduler.plan(StepType.MIXED if policy == "unified" else StepType.DECODE)
    batch = scheduler.batch()
    ((source, target),) = batch.block_copies.tolist()
    assert scheduler.pool.references[[source, target]].tolist() == [1, 1] and source not in world.blocks(2)
    world.note(scheduler.settle(world.model(batch)))
    assert scheduler.pool.references[[source, target]].tolist() == [0, 1]
    check(world, {2: PROMPT})


@POLICIES
def test_an_aborted_fork_leaves_its_parent_alone(policy: str) -> None:
    for steps in (0, 1, 2):
        world = parent(policy)
        world.add(2, PROMPT, 12, parent=1)
        for _ in range(steps):
            world.step()
        world.scheduler.abort(2)
        world.scheduler.check_integrity()
        check(world, {1: PROMPT})


# ---- odd ones


@POLICIES
def test_a_fork_that_is_not_schedulable_waits_until_it_is(policy: str) -> None:
    world = parent(policy)
    world.add(2, PROMPT, 12, parent=1, schedulable=False)
    for _ in range(3):
        world.step()
    assert world.outputs[2] == []
    world.scheduler.ready(2)
    check(world, {1: PROMPT, 2: PROMPT})


@POLICIES
def test_a_fork_of_itself_is_an_ordinary_request(policy: str) -> None:
    world = parent(policy)
    world.add(2, PROMPT, 12, parent=2)
    world.run(100)
    assert world.outputs[2] == expected(PROMPT, 12)
