"""What `engine.batch_invariant` costs: forwards of one rank with it and without, in turn, on one thread.

    python -m bench.invariance [--model DIR] [--rounds 7] [--json FILE]

The figures are processor time; the ratio is the median of the rounds' ratios. Every sequence has 256 tokens of context
before a decode step.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dp_engine.batch import Batch, SamplingBatch
from dp_engine.config import EngineConfig
from dp_engine.model_config import ModelConfig
from dp_engine.runner import ModelRunner
from ep.dispatch import CPU, make_dispatcher
from ep.placement import Placements
from vote.decision import StepType

BLOCK, CONTEXT, PROMPT = 16, 256, 512
DECODES = (1, 8, 32)
AT_LEAST_S = 0.3


def load(directory: Path, invariant: bool) -> ModelRunner:
    """The whole model as one rank, warmed up."""
    config = EngineConfig(
        batch_invariant=invariant, block_size=BLOCK, num_blocks=1 + max(DECODES) * (CONTEXT // BLOCK + 1)
    )
    model = ModelConfig.load(directory, config)
    placements = Placements.contiguous(model.num_moe_layers, model.num_experts, 1)
    runner = ModelRunner.load(
        directory, config, make_dispatcher("local", placements, 0, 1, None), CPU, lambda line: None
    )
    runner.warm_up()
    return runner


def step(sequences: int, seqlen_q: int, seqlen_k: int, vocab: int, kind: StepType) -> Batch:
    """Equal sequences, random tokens, blocks in order."""
    rng = np.random.default_rng(sequences)
    width = -(-seqlen_k // BLOCK)
    tables = 1 + np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
    positions = np.tile(np.arange(seqlen_k - seqlen_q, seqlen_k), (sequences, 1))
    slots = np.take_along_axis(tables, positions // BLOCK, 1) * np.int64(BLOCK) + positions % BLOCK
    ones, zeros = np.ones(sequences, np.int32), np.zeros(sequences, np.int32)
    sampling = SamplingBatch(
        zeros.astype(np.float32), ones.astype(np.float32), zeros, zeros.astype(np.uint64), ones.astype(np.int64)
    )
    return Batch(
        step_type=kind,
        input_ids=rng.integers(0, vocab, sequences * seqlen_q),
        positions=positions.ravel(),
        slots=slots.ravel(),
        seqlens_q=ones * seqlen_q,
        seqlens_k=ones * seqlen_k,
        num_drafts=zeros,
        block_tables=tables,
        block_copies=np.zeros((0, 2), np.int64),
        state_slots=zeros,
        state_copies=np.zeros((0, 2), np.int64),
        sampling=sampling,
    )


def seconds(runner: ModelRunner, batch: Batch) -> float:
    """Of this process's one thread, the fewest of some runs: what else the machine does counts little."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < AT_LEAST_S:
        began = time.process_time()
        runner.run(batch)
        times.append(time.process_time() - began)
    return min(times)


def measure(plain: ModelRunner, invariant: ModelRunner, rounds: int) -> dict[str, dict[str, float]]:
    """By kind of step: milliseconds of both, and the ratio."""
    vocab = plain.model_config.vocab_size
    steps = {f"decode {n}": step(n, 1, CONTEXT + 1, vocab, StepType.DECODE) for n in DECODES}
    steps[f"prefill {PROMPT}"] = step(1, PROMPT, PROMPT, vocab, StepType.PREFILL)
    report = {}
    for name, batch in steps.items():
        pairs = [(seconds(plain, batch), seconds(invariant, batch)) for _ in range(rounds)]
        normal, fixed = (1e3 * statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
        report[name] = {"normal_ms": normal, "invariant_ms": fixed, "ratio": ratio}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint directory; default: the demo model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    directory = arguments.model or _demo_model()
    report = measure(load(directory, False), load(directory, True), arguments.rounds)
    table = Table("step", "normal ms", "invariant ms", "ratio")
    for name, figures in report.items():
        table.add_row(name, *(f"{figures[key]:.2f}" for key in ("normal_ms", "invariant_ms", "ratio")))
    Console(stderr=True).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def _demo_model() -> Path:
    from launcher.demo_model import ensure_demo_model

    return ensure_demo_model()


if __name__ == "__main__":
    main()
