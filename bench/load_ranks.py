"""Processes side by side that read, or load, what a rank owns."""

import multiprocessing as mp
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from dp_engine.checkpoint import Checkpoint
from dp_engine.config import EngineConfig
from dp_engine.model_config import ModelConfig
from dp_engine.runner import ModelRunner
from ep.dispatch import CPU, Dispatched, Dispatcher
from ep.placement import Placements

READ_BYTES = 8 << 20
SAMPLE_S = 0.01
TIMEOUT_S = 600.0
BLOCKS = 4  # of KV, so that weights are what counts


@dataclass(frozen=True)
class Outcome:
    """A rank's times (time.monotonic, the same clock for all; and its processor's), and its peak of anonymous memory
    above the start's."""

    began: float
    ended: float
    cpu_s: float
    owned_bytes: int
    peak_bytes: int


class Nowhere(Dispatcher):
    """Knows the placement and carries nothing."""

    def begin_step(self, num_tokens: int) -> NoReturn:
        raise AssertionError("nothing is computed here")

    def dispatch(self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        raise AssertionError("nothing is computed here")

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        raise AssertionError("nothing is computed here")


def run_ranks(what: str, model_dir: Path, size: int, threads: int) -> list[Outcome]:
    """`what`: read or load. All begin together, when each has imported what it needs."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    barrier, queue = context.Barrier(size), context.Queue()
    ranks = [
        context.Process(target=_rank, args=(what, model_dir, rank, size, threads, barrier, queue))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        return [queue.get(timeout=TIMEOUT_S) for _ in ranks]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


def _rank(what: str, model_dir: Path, rank: int, size: int, threads: int, barrier: Any, queue: Any) -> None:
    torch.set_num_threads(threads)
    engine = EngineConfig(num_blocks=BLOCKS, max_model_len=32)
    config = ModelConfig.load(model_dir, engine)
    placements = Placements.contiguous(config.num_moe_layers, config.num_experts, size)
    checkpoint = Checkpoint(model_dir)
    spans = [
        (checkpoint.path(name), *checkpoint.stored(name).span(part))
        for name, parts in checkpoint.owned(placements, rank).items()
        for part in parts
    ]
    barrier.wait(TIMEOUT_S)
    with Peak() as peak:
        began, cpu = time.monotonic(), time.process_time()
        if what == "read":
            held: Any = _read(sorted(spans))
        else:
            held = ModelRunner.load(model_dir, engine, Nowhere(placements, rank, CPU), CPU, lambda line: None)
        ended, cpu_s = time.monotonic(), time.process_time() - cpu
    queue.put(Outcome(began, ended, cpu_s, sum(end - begin for _, begin, end in spans), peak.bytes))
    del held


def _read(spans: list[tuple[Path, int, int]]) -> list[np.ndarray]:
    """Into new memory, which is kept: whoever loads needs as much."""
    kept = []
    files = {path: os.open(path, os.O_RDONLY) for path, _, _ in spans}
    for path, begin, end in spans:
        kept.append(np.empty(end - begin, np.uint8))
        rest = memoryview(kept[-1].data)
        while rest:
            rest = rest[os.preadv(files[path], [rest[:READ_BYTES]], end - len(rest)) :]
    for file in files.values():
        os.close(file)
    return kept


class Peak:
    """Context manager that watches this process' anonymous memory. Pages of mapped files are the page cache's: they
    go when memory is wanted, and ranks of a host share them."""

    def __enter__(self) -> "Peak":
        self.bytes, self._start, self._over = 0, anonymous_bytes(), threading.Event()
        self._watch = threading.Thread(target=self._look_on, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()
        self.look()

    def look(self) -> None:
        self.bytes = max(self.bytes, anonymous_bytes() - self._start)

    def _look_on(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.look()


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])
