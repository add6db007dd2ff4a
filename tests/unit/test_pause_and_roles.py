"""Pausing (new, all), and engines that only prefill or only decode."""

from typing import Any

import pytest

from dp_engine.admission import Refused
from dp_engine.messages import PauseMode
from tests.scheduler_world import EOS, World, expected, prompt_of
from vote.decision import StepType

POLICIES = pytest.mark.parametrize("policy", ["phased", "unified"])
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])

# ---- pause


def asleep(world: World) -> bool:
    """The gang may sleep once what is in flight has been settled."""
    while world.step() is not None:
        pass
    facts = world.scheduler.facts()
    return not (facts.unfinished or facts.has_decode or facts.wants_prefill or facts.scheduled)


@POLICIES
@OVERLAP
def test_pause_new_starts_nobody(policy: str, overlap: bool) -> None:
    """What runs goes on; who arrives waits, and so does the gang when nothing runs any more."""
    world = World(policy=policy, overlap=overlap)
    world.add(1, 6, max_tokens=4)
    world.step()
    world.scheduler.pause("new")
    world.add(2, 6)
    assert asleep(world)
    assert world.finished == {1: "length"} and world.waiting() == [2] and world.outputs[2] == []
    world.scheduler.pause("none")
    world.run()
    assert world.outputs[2] == expected(prompt_of(2, 6), 4)


@POLICIES
@OVERLAP
def test_pause_all_stops_everybody_where_he_is(policy: str, overlap: bool) -> None:
    world = World(policy=policy, overlap=overlap, block_size=4)
    world.add(1, 6, max_tokens=9)
    for _ in range(3):
        world.step()
    world.scheduler.pause("all")
    world.add(2, 6)
    assert asleep(world)
    said, used = len(world.outputs[1]), world.scheduler.pool.num_used
    assert 0 < said < 9 and used > 0 and world.scheduler.num_unfinished == 2
    assert world.step() is None and len(world.outputs[1]) == said
    world.scheduler.pause("none")
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 6), 9)
    assert world.outputs[2] == expected(prompt_of(2, 6), 4)


@POLICIES
def test_pause_all_takes_part_in_the_steps_of_others_with_nothing(policy: str) -> None:
    world = World(policy=policy)
    world.add(1, 6)
    world.step()
    world.scheduler.pause("all")
    world.scheduler.plan(StepType.MIXED if policy == "unified" else StepType.DECODE)
    batch = world.scheduler.batch()
    assert len(batch) == 0
    world.note(world.scheduler.settle(world.model(batch)))
    world.scheduler.pause("none")
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 6), 4)


@POLICIES
@pytest.mark.parametrize("mode", ["new", "all"])
def test_half_prefilled(policy: str, mode: PauseMode) -> None:
    """Running in the unified policy, waiting in the phased one; in the end its prompt is computed once."""
    world = World(policy=policy, max_num_batched_tokens=8)
    world.add(1, 20)
    world.step()
    world.scheduler.pause(mode)
    assert asleep(world)
    goes_on = policy == "unified" and mode == "new"
    assert (world.finished == {1: "length"}) is goes_on
    assert world.scheduler.num_unfinished == (0 if goes_on else 1)
    world.scheduler.pause("none")
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 20), 4)
    assert sum(length for pairs in world.ran for _, length in pairs) == 20 + 3


@POLICIES
@pytest.mark.parametrize("mode", ["new", "all"])
def test_forks_wait_too(policy: str, mode: PauseMode) -> None:
    world = World(policy=policy)
    world.add(1, 6, max_tokens=6)
    world.step()
    world.scheduler.pause(mode)
    world.add(2, prompt_of(1, 6), max_tokens=6, parent=1)
    assert asleep(world)
    assert world.outputs[2] == [] and len(world.scheduler.prompted) == 1
    world.scheduler.pause("none")
    world.run()
    assert world.outputs[2] == expected(prompt_of(1, 6), 6)


@POLICIES
@pytest.mark.parametrize("mode", ["new", "all"])
def test_aborts_and_failures_are_heard_while_paused(policy: str, mode: PauseMode) -> None:
    world = World(policy=policy, block_size=4)
    world.add(1, 6, max_tokens=9)
    world.step()
    world.add(2, 6, schedulable=False)
    world.scheduler.pause(mode)
    world.scheduler.ready(2, error="no such picture")
    world.scheduler.abort(1)
    assert asleep(world)
    assert world.finished == {2: "preprocess_failed"}
    world.check_drained()


@POLICIES
def test_a_preempted_sequence_is_new_again(policy: str) -> None:
    """It has lost its blocks, so pausing new ones keeps it out."""
    world = World(
        policy=policy, num_blocks=9, block_size=4, preemption="recompute", kv_watermark=1.0, prefix_cache=False
    )
    for request_id in (1, 2):
        world.add(request_id, 8, max_tokens=20)
        world.step()
        world.step(StepType.DECODE)
    world.scheduler.pause("new")
    assert asleep(world)
    assert len(world.finished) == 1 and world.scheduler.counters.preemptions == 1
    world.scheduler.pause("none")
    world.run()
    for request_id in (1, 2):
        assert world.outputs[request_id] == expected(prompt_of(request_id, 8), 20)


def test_release_next_decode_while_paused() -> None:
    """What has ended is let go when the scheduler goes on."""
    world = World(release="next_decode", block_size=4)
    world.add(1, 6, max_tokens=1)
    world.step()
    world.scheduler.pause("all")
    assert asleep(world)
    world.scheduler.pause("none")
    world.run()
    assert world.finished == {1: "length"}


# ---- prefill only


def test_a_prefill_engine_ends_every_request_with_its_first_token() -> None:
    world = World(role="prefill", max_num_batched_tokens=16, block_size=4)
    world.answer = lambda context: EOS if len(context) == 5 else 50  # type: ignore[method-assign]
    world.add(1, 30, max_tokens=9)
    world.add(2, 5, max_tokens=9)
    world.add(3, 6, max_tokens=1)
    world.run()
    assert world.finished == {1: "prefilled", 2: "stop", 3: "length"}
    assert dict(world.outputs) == {1: [50], 2: [EOS], 3: [50]}
    assert {step_type for step_type, _ in world.steps} == {StepType.PREFILL}


def test_a_prefill_engine_that_releases_in_the_next_decode_is_refused_or_releases() -> None:
    try:
        world = World(role="prefill", release="next_decode")
    except ValueError:
        return
    world.add(1, 10)
    world.run(20)


def test_a_prefill_engine_has_no_decode_work() -> None:
    world = World(role="prefill", max_num_batched_tokens=16)
    world.add(1, 30)
    world.step()
    assert not world.scheduler.facts().has_decode
    world.scheduler.plan(StepType.DECODE)  # its peers may
    assert len(world.scheduler.batch()) == 0


# ---- decode only


def transferred(world: World, request_id: int, length: int, max_tokens: int = 4) -> None:
    """A request whose KV another engine has computed: here it appears with the blocks, before they are written."""
    world.add(request_id, length, max_tokens)
    world.scheduler.plan(StepType.DECODE)
    tokens = prompt_of(request_id, length)
    for index, block in enumerate(world.blocks(request_id)):
        size = world.config.block_size
        world.cache.update({block * size + at: token for at, token in enumerate(tokens[index * size :][:size])})


def decode_world(**config: Any) -> World:
    return World(role="decode", block_size=4, prefix_cache=False, **config)


def test_a_decode_engine_starts_with_the_last_token_of_the_prompt() -> None:
    world = decode_world()
    transferred(world, 1, 10)
    transferred(world, 2, 8)
    assert not world.scheduler.facts().wants_prefill and world.waiting() == []
    assert sorted(world.decode()) == [(1, 1), (2, 1)]
    world.run()
    for request_id, length in ((1, 10), (2, 8)):
        assert world.outputs[request_id] == expected(prompt_of(request_id, length), 4)
    assert {step_type for step_type, _ in world.steps} == {StepType.DECODE}


def test_a_decode_engine_admits_in_order_while_it_has_room() -> None:
    world = decode_world(num_blocks=9, max_num_seqs=2)
    for request_id in (1, 2, 3):
        world.add(request_id, 12, max_tokens=4)
    world.scheduler.plan(StepType.DECODE)
    assert sorted(world.running()) == [1, 2] and [seq.request_id for seq in world.scheduler.prompted] == [3]
    world.scheduler.abort(3)
    assert world.scheduler.num_unfinished == 2 and not world.scheduler.prompted


def test_a_decode_engine_terminates_when_blocks_run_out() -> None:
    world = decode_world(num_blocks=9)
    transferred(world, 1, 12, max_tokens=20)
    transferred(world, 2, 12, max_tokens=20)
    world.run()
    assert sorted(world.finished.values()) == ["insufficient_system_resource", "length"]


def test_a_decode_engine_refuses_what_can_never_run() -> None:
    with pytest.raises(Refused, match="24 tokens need 6 KV blocks, a rank has 4"):
        decode_world(num_blocks=5).add(1, 15, max_tokens=9)
