"""Preemption under the phased policy: terminate or compute again, how often, and when it may start again."""

from typing import Any

import pytest

from tests.running_world import FULL, PREEMPTED, running
from tests.scheduler_world import World, expected, prompt_of


def test_recompute_changes_no_token() -> None:
    """Two requests of 20 + 20 tokens in 12 blocks of 4 both finish with at most 3 preemptions each."""
    world = World(num_blocks=13, preemption="recompute", **FULL)
    world.add(1, 20, max_tokens=20)
    world.add(2, 20, max_tokens=20)
    seqs = [world.seq(1), world.seq(2)]
    world.run()
    assert world.finished == {1: "length", 2: "length"}
    assert world.scheduler.counters.preemptions >= 1
    assert all(seq.preemptions <= 3 for seq in seqs)
    for request_id in (1, 2):
        assert world.outputs[request_id] == expected(prompt_of(request_id, 20), 20)


def test_a_preempted_sequence_goes_to_the_head_and_starts_from_nothing() -> None:
    world = running(12, 12, num_blocks=9, preemption="recompute")
    world.add(3, 4, schedulable=False)
    while 1 in world.running():
        world.decode()
    assert world.waiting() == [1, 3] and world.running() == [2]
    assert world.blocks(1) == [] and world.computed(1) == 0
    said = len(world.outputs[1])
    assert world.scheduler.resources.length(world.seq(1)) == 12 + said
    world.scheduler.ready(3)
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 12), 20)


def test_checkpoints_that_were_reached_count_no_more() -> None:
    world = World(num_blocks=9, preemption="recompute", prefix_cache=False, **FULL)
    world.add(1, 12, 20, chunk_checkpoints=(5,))
    assert [world.prefill(), world.prefill(), world.decode()] == [[(1, 5)], [(1, 7)], [(1, 1)]]
    world.add(2, 12, 20)
    world.run()
    again = [length for pairs in world.ran[3:] for request_id, length in pairs if request_id == 1 and length > 1]
    assert again and 5 not in again and min(again) > 12


def draws(**config: Any) -> set[tuple[int, int, int]]:
    """(seed, position, token) of all that was drawn for the requests."""
    world = World(block_size=4, kv_watermark=1.0, preemption="recompute", **config)
    seen: set[tuple[int, int, int]] = set()
    for request_id in (1, 2, 3):
        world.add(request_id, 12, max_tokens=16, seed=1000 + request_id, temperature=1.0)
    while world.scheduler.num_unfinished:
        batch = world.step()
        assert batch is not None
        for seed, position in zip(batch.sampling.seed.tolist(), batch.sampling.position.tolist(), strict=True):
            seen.add((seed, position, world.outputs[seed - 1000][position - 12]))
    assert bool(world.scheduler.counters.preemptions) == ("num_blocks" in config)
    return seen


def test_seed_and_position_of_a_token_survive_a_preemption() -> None:
    """A token depends on these two only, so nothing sampled changes."""
    assert draws(num_blocks=13) == draws()


def test_structured_output_never_recomputes() -> None:
    """Its automaton cannot be set back."""
    world = World(num_blocks=9, preemption="recompute", **FULL)
    world.add(1, 12, 20, structured=True)
    world.prefill()
    world.decode()
    world.add(2, 12, 20)
    world.run()
    assert world.finished == {1: PREEMPTED, 2: "length"}


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_preemptions_are_bounded(limit: int) -> None:
    """After so many recomputations a sequence is terminated."""
    world = World(num_blocks=13, preemption="recompute", max_preemptions=limit, max_num_seqs=4, **FULL)
    for request_id in range(1, 5):
        world.add(request_id, 12, max_tokens=30)
    seqs = [world.seq(request_id) for request_id in range(1, 5)]
    world.run()
    assert all(seq.preemptions <= limit for seq in seqs)
    assert PREEMPTED in world.finished.values()
    assert "length" in world.finished.values()


@pytest.mark.parametrize(("margin", "starts"), [(0, True), (1, False)])
def test_readmission_margin(margin: int, starts: bool) -> None:
    """A preempted sequence that would fill the free blocks would be preempted again with its next token."""
    world = running(12, 10, 2, num_blocks=9, preemption="recompute", readmission_margin=margin)
    while 1 in world.running():
        world.decode()
    world.scheduler.abort(3)
    assert world.scheduler.resources.length(world.seq(1)) == 4 * world.scheduler.pool.num_free == 16
    assert world.scheduler.facts().wants_prefill is starts
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 12), 20)


def test_a_request_never_preempted_needs_no_margin() -> None:
    world = running(8, num_blocks=7, readmission_margin=1, max_tokens=4)
    world.add(2, 16, max_tokens=1)  # the 4 blocks that are free
    assert world.scheduler.facts().wants_prefill
    assert world.prefill() == [(2, 16)]


def test_a_preempted_sequence_gets_a_fresh_slot() -> None:
    """Its old one may be somebody else's by then."""
    world = running(12, 12, num_blocks=9, preemption="recompute", num_state_slots=4, prefix_cache=False)
    slots = world.scheduler.resources.slots
    assert slots is not None and slots.num_used == 2
    old = int(world.scheduler.ledgers.state_slot[world.seq(1).row])
    while 1 in world.running():
        world.decode()
    assert slots.num_used == 1 and slots.references[old] == 0
    world.add(3, 4, 2)
    world.scheduler.waiting.push_front(world.seq(3))  # takes the slot that 1 had, or another one
    taken = []
    while world.scheduler.num_unfinished:
        batch = world.step()
        assert batch is not None
        taken.append(batch.state_slots.tolist())
    assert all(len(set(slots)) == len(slots) and 0 not in slots for slots in taken)
    assert world.outputs[1] == expected(prompt_of(1, 12), 20)
    world.check_drained()


@pytest.mark.parametrize("policy", ["phased", "unified"])
@pytest.mark.parametrize(
    "margin",
    [0, 1, 8, 24],
)
def test_a_margin_asks_for_no_more_than_the_sequence_will_need(margin: int, policy: str) -> None:
    world = running(
        12, 12, num_blocks=9, preemption="recompute", readmission_margin=margin, prefix_cache=False, policy=policy
    )
    world.run(400)
    assert world.finished == {1: "length", 2: "length"}


def test_without_chunks_a_preempted_sequence_that_is_longer_than_a_step_ends() -> None:
    """With what it has said it could never be prefilled at once."""
    limits = {"chunked_prefill": False, "max_num_batched_tokens": 12}
    world = running(12, 12, num_blocks=9, preemption="recompute", prefix_cache=False, **limits)
    world.run(400)
    assert world.finished == {1: PREEMPTED, 2: "length"}


def test_with_refusal_at_prefill_a_sequence_ends_when_it_has_filled_the_pool() -> None:
    world = World(num_blocks=6, refusal="at_prefill", preemption="recompute", num_draft_tokens=3, **FULL)
    world.guess(right=0)
    world.add(1, 18, max_tokens=20)
    world.add(2, 4, max_tokens=1)
    world.run(400)
    assert set(world.finished) == {1, 2}
