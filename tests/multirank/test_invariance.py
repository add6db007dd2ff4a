"""`engine.batch_invariant`: a token's logits have the same bits alone and beside others, however prompts are cut,
computed again after a preemption, and on every rank of gangs of any size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dp_engine.config import EngineConfig
from dp_engine.model_config import ModelConfig
from dp_engine.runner import ModelRunner
from ep.dispatch import CPU, make_dispatcher
from ep.placement import Placements
from tests.by_hand import HandSequence, lay_out, make_batch
from tests.multirank.gang import run_gang

BLOCK, STEPS = 8, 24
LENGTHS = (40, 1, 17, 26)
FAMILIES = ("mixtral-window", "qwen2-moe", "deepseek-v2", "deepseek-v3", "gpt-oss", "qwen3")
DTYPES = ("float32", "bfloat16")

Logits = dict[tuple[str, str], list[Tensor]]  # by family and dtype, of each text: [length, vocab]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.families import KINDS, write_family

    base = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        write_family(base / name, KINDS[name])
    return {name: base / name for name in FAMILIES}


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 160, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], texts: list[list[int]]) -> Logits:
    """Of every text as one prompt, alone."""
    return compute(checkpoints, 0, 1, None, lambda runner: [alone(runner, text) for text in texts])


def compute(checkpoints: dict[str, Path], rank: int, world_size: int, group: Any, work: Any, **engine: Any) -> Logits:
    """`work` on every checkpoint in every dtype."""
    found: Logits = {}
    for name, directory in checkpoints.items():
        for dtype in DTYPES:
            settings = {"batch_invariant": True, "block_size": BLOCK, "num_blocks": 40, "max_model_len": 64, **engine}
            config = EngineConfig(dtype=dtype, **settings)
            model = ModelConfig.load(directory, config)
            layers = model.num_moe_layers
            placements = Placements.contiguous(layers, model.num_experts, world_size) if layers else Placements(())
            dispatcher = make_dispatcher("auto", placements, rank, world_size, group)
            found[name, dtype] = work(ModelRunner.load(directory, config, dispatcher, CPU, lambda line: None))
    return found


@torch.inference_mode()
def forward(runner: ModelRunner, scheduled: list[tuple[HandSequence, int]]) -> Tensor:
    """Logits of all rows."""
    batch = make_batch(scheduled, BLOCK)
    step = replace(runner._step(batch), output_rows=torch.arange(len(batch.input_ids)))
    return runner._model.forward(step, runner._cache)


def alone(runner: ModelRunner, text: list[int]) -> Tensor:
    return forward(runner, [(lay_out([text], 0, BLOCK)[0], len(text))])


def mixed(runner: ModelRunner, texts: list[list[int]], seed: int) -> list[Tensor]:
    """Chunks of random sizes of random texts in STEPS steps; now and then one loses all that is computed of it."""
    rng = np.random.default_rng(seed)
    sequences = lay_out(texts, 0, BLOCK)
    logits: list[list[Tensor]] = [[] for _ in texts]
    for step in range(STEPS):
        scheduled = []
        for sequence, known in zip(sequences, logits, strict=True):
            if known and rng.random() < 0.1 and step < STEPS / 2:
                known.clear()
                sequence.computed = 0
            left = len(sequence.prompt) - sequence.computed
            chunk = left if step == STEPS - 1 else min(left, int(rng.choice([0, 1, 1, 5, 20])))
            if chunk:
                scheduled.append((sequence, chunk))
        rows = forward(runner, scheduled).split([count for _, count in scheduled])
        for (sequence, count), some in zip(scheduled, rows, strict=True):
            sequence.computed += count
            logits[sequences.index(sequence)].append(some)
    return [torch.cat(known) for known in logits]


def on_a_rank(rank: int, group: Any, checkpoints: dict[str, Path], texts: list[list[int]], world_size: int) -> Logits:
    return compute(checkpoints, rank, world_size, group, lambda runner: mixed(runner, texts, 10 * world_size + rank))


def differing(found: Logits, expected: Logits) -> list[tuple[str, str]]:
    """Where not all bits are as expected."""
    pairs = {key: zip(found[key], expected[key], strict=True) for key in expected}
    return [key for key, both in pairs.items() if not all(torch.equal(ours, theirs) for ours, theirs in both)]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_logits_depend_on_the_text_alone(
    checkpoints: dict[str, Path], texts: list[list[int]], expected: Logits, world_size: int
) -> None:
    if world_size == 1:
        results = [on_a_rank(0, None, checkpoints, texts, 1)]
    else:
        results = run_gang(on_a_rank, world_size, checkpoints, texts, world_size)
    for found in results:
        assert differing(found, expected) == []


def test_without_the_option_they_do_not(checkpoints: dict[str, Path], texts: list[list[int]], expected: Logits) -> None:
    """Nor are they far off: the option changes bits, not what is computed."""
    found = compute(checkpoints, 0, 1, None, lambda runner: mixed(runner, texts, 10), batch_invariant=False)
    assert differing(found, expected) == list(expected)
    for name in FAMILIES:
        for ours, theirs in zip(found[name, "float32"], expected[name, "float32"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
