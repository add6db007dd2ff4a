"""Where steps are computed: in the step loop's own thread, or in one beside it (overlap)."""

from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import torch

from dp_engine.batch import Batch, Drawn
from dp_engine.runner import ModelRunner
from ep.rebalance import Rebalancer
from vote.recorder import Recorder, Ring


class Submitted(NamedTuple):
    batch: Batch
    step: int
    rebalance: bool


class StepWorker:
    """Computes a step when its result is asked for. One step at a time.

    As of the last settled step, so the same on all ranks at every vote, however far the step in flight is:
    num_collectives: data collectives entered; placement: digest of where the experts are; wants_rebalance: the next
    step should begin with a piece of moving experts, unless the one in flight does.
    """

    def __init__(self, runner: ModelRunner, ring: Ring | None = None, rebalancer: Rebalancer | None = None) -> None:
        """`ring`: where steps are noted; the runner's dispatcher writes there too. `rebalancer`: None: experts stay
        where they are."""
        self._runner = runner
        self._ring = ring or Recorder(0, 1).data
        self._rebalancer = rebalancer
        self._submitted: Submitted | None = None
        self.num_collectives = runner.num_collectives
        self.placement = rebalancer.placement if rebalancer is not None else 0
        self.wants_rebalance = False

    def submit(self, batch: Batch, step: int, rebalance: bool = False) -> None:
        """`step`: its number, for the record. `rebalance`: it begins with moving experts."""
        self._submitted = Submitted(batch, step, rebalance)
        if rebalance:
            self.wants_rebalance = False

    def result(self) -> Drawn:
        """What the submitted step drew. Raises what the step raised, like CollectiveFailed."""
        submitted, self._submitted = self._submitted, None
        assert submitted is not None, "submit comes first"
        drawn = self._compute(submitted)
        self.num_collectives = self._runner.num_collectives
        if self._rebalancer is not None:
            self.placement = self._rebalancer.placement
            self.wants_rebalance = self._rebalancer.wanted
        return drawn

    def _compute(self, submitted: Submitted) -> Drawn:
        batch, rebalancer = submitted.batch, self._rebalancer
        self._ring.step = submitted.step
        if submitted.rebalance and rebalancer is not None:
            entry = self._ring.enter(b"REBALANCE")
            rebalancer.advance()
            self._ring.leave(entry)
        entry = self._ring.enter(batch.step_type.name.encode(), len(batch.input_ids))
        drawn = self._runner.run(batch)
        self._ring.leave(entry)
        if rebalancer is not None:
            rebalancer.step_done()
        return drawn


class ThreadWorker(StepWorker):
    """Starts a step as soon as it is submitted, in a thread of its own, which ends with the process."""

    def __init__(
        self, runner: ModelRunner, threads: int, ring: Ring | None = None, rebalancer: Rebalancer | None = None
    ) -> None:
        super().__init__(runner, ring, rebalancer)
        self._threads = threads
        self._todo: SimpleQueue[Submitted] = SimpleQueue()
        self._done: SimpleQueue[Drawn | BaseException] = SimpleQueue()
        Thread(target=self._run, name="steps", daemon=True).start()

    def submit(self, batch: Batch, step: int, rebalance: bool = False) -> None:
        super().submit(batch, step, rebalance)
        self._todo.put(Submitted(batch, step, rebalance))

    def _compute(self, submitted: Submitted) -> Drawn:
        del submitted  # on its way since `submit`
        result = self._done.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a setting of each thread
        while True:
            submitted = self._todo.get()
            try:
                self._done.put(super()._compute(submitted))
            except BaseException as error:
                self._done.put(error)


def make_worker(
    runner: ModelRunner,
    overlap: bool,
    threads: int,
    ring: Ring | None = None,
    rebalancer: Rebalancer | None = None,
) -> StepWorker:
    """The worker of a rank with or without overlap. `threads`: of torch, in a thread of its own."""
    return ThreadWorker(runner, threads, ring, rebalancer) if overlap else StepWorker(runner, ring, rebalancer)
