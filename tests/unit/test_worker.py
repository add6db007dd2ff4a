"""Where steps are computed: when, in which thread, and what `num_collectives` says meanwhile."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dp_engine.worker import StepWorker, ThreadWorker
from ep.dispatch import CollectiveFailed
from vote.decision import StepType


class Job:
    """In the place of a batch: a function."""

    step_type = StepType.DECODE
    input_ids = ()

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function


class FakeRunner:
    """Computes by calling a job's function; four collectives a step."""

    def __init__(self) -> None:
        self.num_collectives = 8  # of the warm-up
        self.computing = threading.Event()

    def run(self, batch: Job) -> np.ndarray:
        self.num_collectives += 4
        self.computing.set()
        return np.array([batch.function()])


Make = Callable[..., StepWorker]
KINDS: dict[str, Make] = {
    "same thread": lambda runner, rebalancer=None: StepWorker(runner, None, rebalancer),
    "own thread": lambda runner, rebalancer=None: ThreadWorker(runner, 1, None, rebalancer),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def compute(worker: StepWorker, step: Callable[[], Any]) -> Any:
    worker.submit(Job(step), 0)  # type: ignore[arg-type]
    return worker.result()[0]


@every_kind
def test_results_come_in_the_order_of_the_steps(make: Make) -> None:
    worker = make(FakeRunner())
    assert [compute(worker, lambda number=number: number) for number in range(5)] == list(range(5))  # type: ignore[misc]


@every_kind
def test_collectives_count_when_their_step_is_settled(make: Make) -> None:
    runner = FakeRunner()
    worker = make(runner)
    assert worker.num_collectives == 8
    worker.submit(Job(lambda: 0), 0)  # type: ignore[arg-type]
    if isinstance(worker, ThreadWorker):
        assert runner.computing.wait(5)
    assert worker.num_collectives == 8
    worker.result()
    assert worker.num_collectives == runner.num_collectives == 12


@every_kind
@pytest.mark.parametrize("error", [CollectiveFailed("the dispatch of layer 1"), ValueError("no such thing")])
def test_what_a_step_raises_comes_out_and_others_follow(make: Make, error: Exception) -> None:
    def fail() -> None:
        raise error

    worker = make(FakeRunner())
    with pytest.raises(type(error)) as caught:
        compute(worker, fail)
    assert caught.value is error
    assert compute(worker, lambda: 7) == 7


@every_kind
def test_a_result_needs_a_step(make: Make) -> None:
    with pytest.raises(AssertionError, match="submit comes first"):
        make(FakeRunner()).result()


class FakeRebalancer:
    """Wants to go on until it has done three pieces."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.pieces = self.steps = 0

    placement = property(lambda self: 100 + self.pieces)
    wanted = property(lambda self: self.pieces < 3)

    def advance(self) -> None:
        self.runner.num_collectives += 1
        self.pieces += 1

    def step_done(self) -> None:
        self.steps += 1


@every_kind
def test_experts_move_before_their_step_and_count_when_it_is_settled(make: Make) -> None:
    runner = FakeRunner()
    rebalancer = FakeRebalancer(runner)
    worker = make(runner, rebalancer)
    assert (worker.placement, worker.wants_rebalance) == (100, False)
    assert compute(worker, lambda: rebalancer.pieces) == 0
    assert (worker.placement, worker.wants_rebalance, rebalancer.steps) == (100, True, 1)
    worker.submit(Job(lambda: rebalancer.pieces), 1, rebalance=True)  # type: ignore[arg-type]
    assert (worker.placement, worker.wants_rebalance) == (100, False)  # until it is known what has come of it
    assert worker.result()[0] == 1
    assert (worker.placement, worker.wants_rebalance, worker.num_collectives) == (101, True, 8 + 2 * 4 + 1)
    for step in (2, 3):
        worker.submit(Job(lambda: 0), step, rebalance=True)  # type: ignore[arg-type]
        worker.result()
    assert (worker.placement, worker.wants_rebalance, rebalancer.steps) == (103, False, 4)


def test_without_overlap_a_step_is_computed_when_its_result_is_wanted() -> None:
    runner = FakeRunner()
    worker = StepWorker(runner)  # type: ignore[arg-type]
    worker.submit(Job(threading.get_ident), 0)  # type: ignore[arg-type]
    assert not runner.computing.is_set()
    assert worker.result()[0] == threading.get_ident()


def test_with_overlap_a_step_is_computed_while_nobody_waits_for_it() -> None:
    """In one thread for all steps, with its own number of torch threads."""
    threads = torch.get_num_threads()
    worker = ThreadWorker(FakeRunner(), threads + 1)  # type: ignore[arg-type]
    go_on = threading.Event()
    started = threading.Event()

    def step() -> int:
        started.set()
        assert go_on.wait(5)
        return threading.get_ident()

    worker.submit(Job(step), 0)  # type: ignore[arg-type]
    assert started.wait(5)
    go_on.set()
    thread = worker.result()[0]
    assert thread != threading.get_ident()
    assert compute(worker, threading.get_ident) == thread
    assert (compute(worker, torch.get_num_threads), torch.get_num_threads()) == (threads + 1, threads)
