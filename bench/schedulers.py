"""The schedulers that `bench.scheduler` measures: ours and vLLM's, behind the same methods, each with a fake model of
random tokens.
"""

import gc
import json
import os
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bench.servers import tail
from dp_engine.config import EngineConfig
from dp_engine.messages import Add, Sampling
from dp_engine.policies import make_scheduler
from vote.decision import StepType

BLOCK_SIZE = 16
TOKEN_IDS = (1000, 20000)  # the end-of-sequence token is not among them
PEER_SCRIPT = Path(__file__).with_name("scheduler_vllm.py")


class RunFailed(RuntimeError):
    """A run went wrong, so there is no figure; the message says how."""


class WrongInput(ValueError):
    """An argument is of no use; the message is one line."""


class Request(NamedTuple):
    request_id: int
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Shape:
    """Sizes of a scheduler, the same for all."""

    running: int  # most at a time
    num_blocks: int
    max_model_len: int
    budget: int
    block_size: int = BLOCK_SIZE


class Round(NamedTuple):
    """The steps up to and including the first that is no prefill. Times in µs, of all its steps together."""

    steps: int
    sequences: int  # in the last step
    schedule: float
    batch: float
    settle: float


# ---- ours


def elapsed(action: Callable[[Any], object], argument: Any) -> float:
    """Of one call, in µs."""
    began = time.perf_counter()
    action(argument)
    return 1e6 * (time.perf_counter() - began)


class OurScheduler:
    """One of our policies and the fake model. Lists of costs are µs, one per request."""

    def __init__(self, policy: str, shape: Shape) -> None:
        config = EngineConfig.model_validate(
            {
                "policy": policy,
                "block_size": shape.block_size,
                "max_num_seqs": shape.running,
                "max_num_batched_tokens": shape.budget,
            }
        )
        self._scheduler = make_scheduler(config, shape.num_blocks, shape.max_model_len, [TOKEN_IDS[1]])
        self._phased = policy == "phased"
        self._tokens = np.random.default_rng(0)

    def add(self, requests: Sequence[Request]) -> list[float]:
        costs = []
        for request_id, prompt_tokens, max_tokens in requests:
            prompt = np.random.default_rng(request_id).integers(*TOKEN_IDS, prompt_tokens).tolist()
            costs.append(elapsed(self._scheduler.add, Add(0, request_id, prompt, Sampling(max_tokens))))
        return costs

    def run(self, rounds: Sequence[Sequence[Request]]) -> list[Round]:
        """One round for each entry, before which these requests arrive."""
        costs = []
        for arrivals in rounds:
            self.add(arrivals)
            costs.append(self._round())
        return costs

    def _round(self) -> Round:
        steps, schedule, batch, settle = 0, 0.0, 0.0, 0.0
        step_type = StepType.PREFILL
        while step_type is StepType.PREFILL:
            began = time.perf_counter()
            step_type = self._step_type()
            self._scheduler.plan(step_type)
            planned = time.perf_counter()
            arrays = self._scheduler.batch()
            built = time.perf_counter()
            tokens = self._tokens.integers(*TOKEN_IDS, arrays.num_outputs)
            computed = time.perf_counter()
            self._scheduler.settle(tokens)
            settled = time.perf_counter()
            steps += 1
            schedule += planned - began
            batch += built - planned
            settle += settled - computed
        return Round(steps, len(arrays), 1e6 * schedule, 1e6 * batch, 1e6 * settle)

    def _step_type(self) -> StepType:
        """What a gang of this rank alone would choose."""
        facts = self._scheduler.facts()
        if not self._phased:
            return StepType.MIXED
        return StepType.PREFILL if facts.wants_prefill and self._scheduler.try_prefill() else StepType.DECODE

    def abort(self, request_ids: Sequence[int]) -> list[float]:
        return [elapsed(self._scheduler.abort, request_id) for request_id in request_ids]

    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished

    def bytes_each(self, requests: Sequence[Request]) -> float:
        """Add requests; the memory that each then holds."""
        tracemalloc.start()
        self.add(requests)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held / len(requests)

    def settle_down(self) -> None:
        """Take all that lives now out of the garbage collector's rounds, as vLLM's engine does when it is up."""
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        gc.unfreeze()


# ---- vLLM's, in a process of its own interpreter


class Peer:
    """Owns the process. Calls are answered in order; between calls it waits and costs nothing."""

    def __init__(self, process: subprocess.Popen[str], log: Any, python: str) -> None:
        self._process = process
        self._log = log
        self._handles = 0
        try:
            self.version = str(self._answer()["result"])
        except (RunFailed, ValueError, LookupError, TypeError):
            said = tail(log, 1).strip() or "it does not say why"
            raise WrongInput(f"{python} offers no vLLM scheduler that we know: {said}") from None

    def open(self, shape: Shape) -> "PeerScheduler":
        self._handles += 1
        self.call(self._handles, "open", asdict(shape))
        return PeerScheduler(self, self._handles)

    def call(self, handle: int, method: str, *arguments: Any) -> Any:
        """Raises RunFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([handle, method, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; reading its answer says how
        answer = self._answer()
        if "error" in answer:
            raise RunFailed(f"vLLM's scheduler failed in {method}: {answer['error']}")
        return answer["result"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RunFailed(f"vLLM's process ended with status {self._process.wait()}: {tail(self._log)}")
        return json.loads(line)


class PeerScheduler:
    """One scheduler in the peer's process."""

    def __init__(self, peer: Peer, handle: int) -> None:
        self._peer = peer
        self._handle = handle

    def add(self, requests: Sequence[Request]) -> list[float]:
        return self._peer.call(self._handle, "add", requests)

    def run(self, rounds: Sequence[Sequence[Request]]) -> list[Round]:
        return [Round(*cost) for cost in self._peer.call(self._handle, "run", rounds)]

    def abort(self, request_ids: Sequence[int]) -> list[float]:
        return self._peer.call(self._handle, "abort", request_ids)

    def num_unfinished(self) -> int:
        return self._peer.call(self._handle, "num_unfinished")

    def bytes_each(self, requests: Sequence[Request]) -> float:
        return self._peer.call(self._handle, "bytes_each", requests)

    def settle_down(self) -> None:
        self._peer.call(self._handle, "settle_down")

    def close(self) -> None:
        self._peer.call(self._handle, "close")


Scheduler: TypeAlias = OurScheduler | PeerScheduler
Make: TypeAlias = Callable[[Shape], Scheduler]


@contextmanager
def vllm(python: str) -> Iterator[Peer]:
    """The peer's process, stopped at the end. Raises WrongInput if it cannot be started."""
    env = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as model:
        try:
            process = subprocess.Popen(
                [python, "-I", str(PEER_SCRIPT), model],
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        except OSError as error:
            raise WrongInput(f"cannot run {python}: {error.strerror}") from None
        try:
            yield Peer(process, log, python)
        finally:
            process.kill()  # nothing of it wants saving
            process.communicate()
