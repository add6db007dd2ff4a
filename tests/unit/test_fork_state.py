"""Forks of sequences that have a state of their own: it is cloned, or the fork starts from nothing."""

import pytest

from tests.forks import PROMPT, check, parent
from tests.scheduler_world import World, prompt_of
from vote.decision import StepType

POLICIES = pytest.mark.parametrize("policy", ["phased", "unified"])


@POLICIES
def test_a_forks_state_is_cloned_into_a_slot_of_its_own(policy: str) -> None:
    world = parent(policy, num_state_slots=4)
    world.add(2, PROMPT, 12, parent=1)
    slots = world.scheduler.resources.slots
    assert slots is not None and slots.num_used == 2
    ledgers = world.scheduler.ledgers
    pair = [int(ledgers.state_slot[world.seq(request_id).row]) for request_id in (1, 2)]
    batch = world.step(StepType.DECODE)
    assert batch is not None and batch.state_copies.tolist() == [pair] and sorted(batch.state_slots.tolist()) == pair
    check(world, {1: PROMPT, 2: PROMPT})


@POLICIES
def test_without_a_free_slot_a_fork_runs_on_its_own(policy: str) -> None:
    world = parent(policy, num_state_slots=2)
    world.add(2, PROMPT, 12, parent=1)
    assert world.waiting() == [2] and world.scheduler.counters.forks == 0
    check(world, {1: PROMPT, 2: PROMPT})


@POLICIES
def test_a_state_that_has_seen_more_than_is_shared_is_not_cloned(policy: str) -> None:
    world = parent(policy, num_state_slots=4)
    world.step()
    world.add(2, PROMPT, 12, parent=1)  # the parent's state has seen its first output
    assert world.waiting() == [2] and world.scheduler.counters.forks == 0
    check(world, {1: PROMPT, 2: PROMPT})


@POLICIES
def test_the_slot_a_clone_reads_lives_until_it_has_been_made(policy: str) -> None:
    world = parent(policy, num_state_slots=4)
    world.add(2, PROMPT, 12, parent=1)
    slots = world.scheduler.resources.slots
    assert slots is not None
    world.scheduler.abort(1)
    assert slots.num_used == 2
    world.step()
    assert slots.num_used == 1
    check(world, {2: PROMPT})


@POLICIES
def test_a_fork_of_a_fork_clones_a_state_that_is_there(policy: str) -> None:
    """Copies of one step are made at once, so none may read what another one writes."""
    world = parent(policy, num_state_slots=5)
    for request_id in (2, 3):
        world.add(request_id, PROMPT, 12, parent=request_id - 1)
    batch = world.step(StepType.DECODE)
    assert batch is not None
    sources, targets = zip(*batch.state_copies.tolist(), strict=True)
    assert not set(sources) & set(targets)
    check(world, {1: PROMPT, 2: PROMPT, 3: PROMPT})


@POLICIES
def test_no_two_states_are_cloned_into_one_slot(policy: str) -> None:
    world = World(policy=policy, block_size=4, prefix_cache=False, num_state_slots=4)
    for request_id in (1, 2):
        world.add(request_id, prompt_of(request_id, 10), max_tokens=12)
    world.step()
    world.add(3, prompt_of(1, 10), 12, parent=1)
    world.scheduler.abort(3)
    world.add(4, prompt_of(2, 10), 12, parent=2)  # gets the slot that 3 had
    batch = world.step(StepType.DECODE)
    assert batch is not None
    assert len(set(batch.state_copies[:, 1].tolist())) == len(batch.state_copies)
