"""Where steps are computed: in the step loop's own thread, or in one beside it (overlap)."""

from queue import SimpleQueue
from threading import Thread

import torch

from dp_engine.batch import Batch, Drawn
from dp_engine.runner import ModelRunner
from vote.recorder import Recorder, Ring


class StepWorker:
    """Computes a step when its result is asked for. One step at a time.

    num_collectives: data collectives entered by all settled steps, so that it is the same on all ranks at every vote,
    however far the step in flight is.
    """

    def __init__(self, runner: ModelRunner, ring: Ring | None = None) -> None:
        """`ring`: where steps are noted; the runner's dispatcher writes there too."""
        self._runner = runner
        self._ring = ring or Recorder(0, 1).data
        self._batch: tuple[Batch, int] | None = None
        self.num_collectives = runner.num_collectives

    def submit(self, batch: Batch, step: int) -> None:
        """`step`: its number, for the record."""
        self._batch = batch, step

    def result(self) -> Drawn:
        """What the submitted step drew. Raises what the step raised, like CollectiveFailed."""
        submitted, self._batch = self._batch, None
        assert submitted is not None, "submit comes first"
        drawn = self._compute(*submitted)
        self.num_collectives = self._runner.num_collectives
        return drawn

    def _compute(self, batch: Batch, step: int) -> Drawn:
        self._ring.step = step
        entry = self._ring.enter(batch.step_type.name.encode(), len(batch.input_ids))
        drawn = self._runner.run(batch)
        self._ring.leave(entry)
        return drawn


class ThreadWorker(StepWorker):
    """Starts a step as soon as it is submitted, in a thread of its own, which ends with the process."""

    def __init__(self, runner: ModelRunner, threads: int, ring: Ring | None = None) -> None:
        super().__init__(runner, ring)
        self._threads = threads
        self._todo: SimpleQueue[tuple[Batch, int]] = SimpleQueue()
        self._done: SimpleQueue[Drawn | BaseException] = SimpleQueue()
        Thread(target=self._run, name="steps", daemon=True).start()

    def submit(self, batch: Batch, step: int) -> None:
        super().submit(batch, step)
        self._todo.put((batch, step))

    def _compute(self, batch: Batch, step: int) -> Drawn:
        del batch, step  # on their way since `submit`
        result = self._done.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a setting of each thread
        while True:
            submitted = self._todo.get()
            try:
                self._done.put(super()._compute(*submitted))
            except BaseException as error:
                self._done.put(error)


def make_worker(runner: ModelRunner, overlap: bool, threads: int, ring: Ring | None = None) -> StepWorker:
    """The worker of a rank with or without overlap. `threads`: of torch, in a thread of its own."""
    return ThreadWorker(runner, threads, ring) if overlap else StepWorker(runner, ring)
