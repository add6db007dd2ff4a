"""Where steps are computed: in the step loop's own thread, or in one beside it (overlap)."""

from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch

from dp_engine.batch import Batch
from dp_engine.runner import ModelRunner


class StepWorker:
    """Computes a step when its result is asked for. One step at a time.

    num_collectives: data collectives entered by all settled steps, so that it is the same on all ranks at every vote,
    however far the step in flight is.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._batch: Batch | None = None
        self.num_collectives = runner.num_collectives

    def submit(self, batch: Batch) -> None:
        self._batch = batch

    def result(self) -> np.ndarray:
        """Tokens of the submitted step, as `Batch` says. Raises what the step raised, like CollectiveFailed."""
        batch, self._batch = self._batch, None
        assert batch is not None, "submit comes first"
        tokens = self._compute(batch)
        self.num_collectives = self._runner.num_collectives
        return tokens

    def _compute(self, batch: Batch) -> np.ndarray:
        return self._runner.run(batch)


class ThreadWorker(StepWorker):
    """Starts a step as soon as it is submitted, in a thread of its own, which ends with the process."""

    def __init__(self, runner: ModelRunner, threads: int) -> None:
        super().__init__(runner)
        self._threads = threads
        self._todo: SimpleQueue[Batch] = SimpleQueue()
        self._done: SimpleQueue[np.ndarray | BaseException] = SimpleQueue()
        Thread(target=self._run, name="steps", daemon=True).start()

    def submit(self, batch: Batch) -> None:
        super().submit(batch)
        self._todo.put(batch)

    def _compute(self, batch: Batch) -> np.ndarray:
        del batch  # on its way since `submit`
        result = self._done.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a setting of each thread
        while True:
            batch = self._todo.get()
            try:
                self._done.put(self._runner.run(batch))
            except BaseException as error:
                self._done.put(error)
