"""Settlement: optimistic accounting, what a result is worth, and how a sequence ends."""

import time
from typing import Any

import numpy as np
import pytest

from dp_engine.batch import StepStats
from dp_engine.messages import Add, Sampling
from dp_engine.output import StepOutput
from dp_engine.sequence import FINISH_REASONS, Status
from tests.scheduler_world import EOS, World, expected, prompt_of
from vote.decision import StepType

POLICIES = pytest.mark.parametrize("policy", ["phased", "unified"])


def issue(world: World, step_type: StepType) -> np.ndarray:
    """Put a step in flight; its result."""
    scheduler = world.scheduler
    if world.config.policy == "unified":
        step_type = StepType.MIXED
    elif step_type is StepType.PREFILL:
        assert scheduler.facts().wants_prefill and scheduler.try_prefill()
    scheduler.plan(step_type)
    return world.model(scheduler.batch())


# ---- optimistic accounting


@POLICIES
def test_tokens_count_as_computed_when_issued_and_as_committed_when_settled(policy: str) -> None:
    world = World(policy=policy)
    world.add(1, 6)
    result = issue(world, StepType.PREFILL)
    row = world.seq(1).row
    ledgers = world.scheduler.ledgers
    assert (world.computed(1), ledgers.length[row], ledgers.inflight[row]) == (6, 6, 1)
    world.note(world.scheduler.settle(result))
    assert (world.computed(1), ledgers.length[row], ledgers.inflight[row]) == (6, 7, 0)
    result = issue(world, StepType.DECODE)
    assert (world.computed(1), ledgers.length[row], ledgers.inflight[row]) == (7, 7, 1)
    world.note(world.scheduler.settle(result))
    world.run()


@POLICIES
def test_a_chunk_commits_nothing(policy: str) -> None:
    world = World(policy=policy, max_num_batched_tokens=8)
    world.add(1, 12)
    result = issue(world, StepType.PREFILL)
    row = world.seq(1).row
    assert world.scheduler.ledgers.inflight[row] == 0 and len(result) == 1
    output = world.scheduler.settle(result)
    assert output == StepOutput() and world.computed(1) == 8
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 12), 4)


@POLICIES
def test_every_scheduled_sequence_yields_one_output(policy: str) -> None:
    world = World(policy=policy, max_num_batched_tokens=8)
    for request_id in (1, 2, 3):
        world.add(request_id, 6)
    while world.scheduler.num_unfinished:
        batch = world.step()
        assert batch is not None
        assert batch.num_outputs == len(batch) and (batch.seqlens_q > 0).all()
        assert batch.seqlens_q.sum() == batch.num_tokens <= 8


@POLICIES
def test_a_result_of_the_wrong_size_is_an_error(policy: str) -> None:
    world = World(policy=policy)
    world.add(1, 6)
    issue(world, StepType.PREFILL)
    with pytest.raises(AssertionError):
        world.scheduler.settle(np.array([5, 6]))


def test_one_step_at_a_time() -> None:
    world = World()
    world.add(1, 6)
    issue(world, StepType.PREFILL)
    world.scheduler.plan(StepType.DECODE)
    with pytest.raises(AssertionError):
        world.scheduler.batch()


# ---- aborts in flight


@POLICIES
def test_the_result_of_a_sequence_aborted_in_flight_is_dropped_whole(policy: str) -> None:
    world = World(policy=policy, block_size=4)
    world.add(1, 6)
    world.add(2, 6)
    world.step()
    result = issue(world, StepType.DECODE)
    world.scheduler.abort(1)
    assert world.scheduler.num_unfinished == 1
    assert world.scheduler.pool.num_used == 4, "the step in flight still writes there"
    output = world.scheduler.settle(result)
    assert output.request_ids == [2] and output.finished == []
    assert world.scheduler.pool.num_used == 2
    assert world.scheduler.counters.generated_tokens == 3
    world.note(output)
    world.run()
    assert world.outputs[2] == expected(prompt_of(2, 6), 4)


@POLICIES
def test_a_chunk_aborted_in_flight_gives_its_blocks_back_after_settlement(policy: str) -> None:
    world = World(policy=policy, block_size=4, max_num_batched_tokens=8)
    world.add(1, 20)
    result = issue(world, StepType.PREFILL)
    used = world.scheduler.pool.num_used
    world.scheduler.abort(1)
    world.scheduler.abort(1)
    assert used and world.scheduler.pool.num_used == used
    assert world.scheduler.settle(result) == StepOutput()
    world.check_drained()


@POLICIES
def test_an_id_may_come_again_while_its_old_result_is_in_flight(policy: str) -> None:
    world = World(policy=policy)
    world.add(1, 6)
    result = issue(world, StepType.PREFILL)
    world.scheduler.abort(1)
    world.add(1, 9)
    assert world.scheduler.settle(result) == StepOutput()
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 9), 4)


# ---- ends


def stopped(policy: str, answer: dict[int, int], **sampling: Any) -> World:
    """A prompt of 4 tokens; the model says 50 but for what `answer` has for a context's length."""
    world = World(policy=policy)
    world.add(1, 4, max_tokens=6, **sampling)
    world.answer = lambda context: answer.get(len(context), 50)  # type: ignore[method-assign]
    world.run()
    return world


@POLICIES
@pytest.mark.parametrize(
    ("answer", "sampling", "output", "reason"),
    [
        ({6: EOS}, {}, [50, 50, EOS], "stop"),
        ({4: EOS}, {}, [EOS], "stop"),
        ({6: EOS}, {"ignore_eos": True}, [50, 50, EOS, 50, 50, 50], "length"),
        ({}, {"stop_token_ids": (50,)}, [50], "stop"),
        ({5: 7}, {"stop_token_ids": (8, 7)}, [50, 7], "stop"),
        ({5: 7}, {"stop_token_ids": (7,), "ignore_eos": True}, [50, 7], "stop"),
        ({5: 7}, {}, [50, 7, 50, 50, 50, 50], "length"),
        ({9: EOS}, {}, [50, 50, 50, 50, 50, EOS], "stop"),  # with the last token that is allowed
    ],
)
def test_how_a_sequence_ends(
    answer: dict[int, int], sampling: dict[str, Any], output: list[int], reason: str, policy: str
) -> None:
    world = stopped(policy, answer, **sampling)
    assert world.outputs[1] == output and world.finished == {1: reason}


@POLICIES
def test_any_of_several_eos_tokens_stops(policy: str) -> None:
    world = World(policy=policy, eos_token_ids=(EOS, 5))
    world.answer = lambda context: 5 if len(context) == 8 else 50  # type: ignore[method-assign]
    world.add(1, 4, max_tokens=9)
    world.add(2, 4, max_tokens=9, ignore_eos=True)
    world.run()
    assert world.finished == {1: "stop", 2: "length"}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.STOPPED, "stop"),
        (Status.LENGTH, "length"),
        (Status.ABORTED, "abort"),
        (Status.IGNORED, "prompt_length_exceeded"),
        (Status.PREEMPTED, "insufficient_system_resource"),
        (Status.STRUCTURED_OUTPUT_FAILED, "structured_output_failed"),
        (Status.PREPROCESS_FAILED, "preprocess_failed"),
        (Status.PREFILLED, "prefilled"),
    ],
)
def test_finish_reasons(status: Status, reason: str) -> None:
    assert status.finished and status.reason == reason


def test_statuses_without_a_reason_are_not_finished() -> None:
    assert [status for status in Status if not status.finished] == [Status.WAITING, Status.RUNNING]
    assert set(FINISH_REASONS) == {status for status in Status if status.finished}


# ---- what a step gives


@POLICIES
def test_tokens_come_in_the_order_of_the_batch(policy: str) -> None:
    world = World(policy=policy)
    for request_id, length in ((3, 9), (1, 5), (2, 7)):
        world.add(request_id, length, max_tokens=2)
    scheduler = world.scheduler
    first = scheduler.settle(issue(world, StepType.PREFILL))
    assert first.request_ids == [3, 1, 2] and first.finished == []
    assert first.tokens == [expected(prompt_of(i, length), 1)[0] for i, length in ((3, 9), (1, 5), (2, 7))]
    result = issue(world, StepType.DECODE)
    order = world.in_flight()
    second = scheduler.settle(result)
    assert second.request_ids == order and second.finished == [(request_id, "length") for request_id in order]
    assert second.tokens == [expected(prompt_of(i, {3: 9, 1: 5, 2: 7}[i]), 2)[1] for i in order]


@POLICIES
def test_ends_without_a_token_follow_those_of_the_step(policy: str) -> None:
    world = World(policy=policy)
    world.add(1, 12, max_tokens=9)
    world.add(2, 15, max_tokens=2)
    world.step()
    world.add(3, 4, schedulable=False)
    world.scheduler.ready(3, error="broken")
    output = world.scheduler.settle(issue(world, StepType.DECODE))
    assert output.finished == [(2, "length"), (3, "preprocess_failed")]


def test_preempted_sequences_are_reported_with_the_step_that_took_their_blocks() -> None:
    world = World(num_blocks=9, block_size=4, kv_watermark=1.0, decode_headroom=1)
    world.add(1, 16, max_tokens=9)
    world.add(2, 15, max_tokens=9)
    world.step()
    output = world.scheduler.settle(issue(world, StepType.DECODE))
    assert output.request_ids == [2] and output.finished == [(1, "insufficient_system_resource")]


@POLICIES
def test_time_to_first_token(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per request, from its arrival on, however often it is preempted."""
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    world = World(policy=policy, num_blocks=13, block_size=4, preemption="recompute", kv_watermark=1.0)
    world.add(1, 20, max_tokens=20)  # at 0
    world.add(2, 20, max_tokens=20)  # at 1
    times = []
    while world.scheduler.num_unfinished:
        output = world.scheduler.settle(
            issue(world, StepType.PREFILL if world.scheduler.facts().wants_prefill else StepType.DECODE)
        )
        times += output.first_token_s
    assert world.scheduler.counters.preemptions > 0
    assert times == [2.0, 1.0]  # the step that gave both was settled at 2


@POLICIES
def test_a_resubmitted_request_has_no_first_token(policy: str) -> None:
    world = World(policy=policy)
    world.scheduler.add(Add(1, 1, prompt_of(1, 6), Sampling(9), num_emitted=2))
    output = world.scheduler.settle(issue(world, StepType.PREFILL))
    assert output.request_ids == [1] and output.first_token_s == []


@pytest.mark.parametrize("policy", ["phased", "unified"])
def test_counters(policy: str) -> None:
    world = World(policy=policy, max_num_batched_tokens=16)
    world.add(1, 20, max_tokens=3)
    world.add(2, 6, max_tokens=5)
    world.add(3, 6, max_tokens=5)
    world.scheduler.abort(3)
    world.run()
    counters = world.scheduler.counters
    assert (counters.prompt_tokens, counters.generated_tokens, counters.aborted) == (26, 8, 1)
    assert (counters.preemptions, counters.forks, counters.draft_tokens) == (0, 0, 0)


@POLICIES
def test_size_of_a_step(policy: str) -> None:
    """Attention costs query times key length; a chunk counts with the KV it sees."""
    world = World(policy=policy, max_num_batched_tokens=8)
    world.add(1, 6, max_tokens=1)
    world.add(2, 5, max_tokens=1)
    sizes = []
    while world.scheduler.num_unfinished:
        batch = world.step()
        assert batch is not None
        sizes.append(batch.stats())
    assert sizes == [StepStats(8, 0, 6 * 6 + 2 * 2, 6, 2), StepStats(3, 0, 3 * 5, 5, 5)]
    world.scheduler.plan(StepType.MIXED if policy == "unified" else StepType.DECODE)
    assert world.scheduler.batch().stats() == StepStats()
