"""Every family against `transformers`: greedy tokens, and logits of prompts, on one to four ranks."""

from dataclasses import dataclass
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
from tests.by_hand import lay_out, make_batch, run_sequences, steps_needed
from tests.multirank.gang import run_gang

BLOCK, CHUNK, MAX_NEW, KEPT = 8, 8, 8, 3
LENGTHS = (26, 1, 17, 8, 13)
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A checkpoint and what transformers makes of prompts: tokens, and logits [prompts, vocab] of the first of them."""

    directory: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    logits: Tensor


@dataclass(frozen=True)
class Answers:
    """What a rank makes of its prompts: all beside each other and in chunks; again after all but KEPT tokens were lost;
    the very first prompt alone in the gang."""

    logits: Tensor
    batched: list[list[int]]
    resumed: list[list[int]]
    alone: list[list[int]]
    num_collectives: int


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    from tests.families import KINDS, VOCAB, write_family

    rng = np.random.default_rng(5)
    base = tmp_path_factory.mktemp("families")
    cases = {}
    for name, kind in KINDS.items():
        prompts = [rng.integers(3, VOCAB, min(length, kind.longest)).tolist() for length in LENGTHS]
        model = write_family(base / name, kind)
        ids = [torch.tensor([prompt]) for prompt in prompts]
        settings = {"max_new_tokens": MAX_NEW, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            logits = torch.cat([model(one).logits[:, -1] for one in ids])
            texts = [model.generate(one, attention_mask=torch.ones_like(one), **settings)[0].tolist() for one in ids]
        answers = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
        cases[name] = Case(base / name, prompts, answers, logits)
    return cases


def load(directory: Path, rank: int, world_size: int, group: Any, dtype: Any = "auto") -> ModelRunner:
    engine = EngineConfig(block_size=BLOCK, num_blocks=40, max_model_len=64, dtype=dtype)
    config = ModelConfig.load(directory, engine)
    layers = config.num_moe_layers
    placements = Placements.contiguous(layers, config.num_experts, world_size) if layers else Placements(())
    dispatcher = make_dispatcher("auto", placements, rank, world_size, group)
    return ModelRunner.load(directory, engine, dispatcher, CPU, lambda line: None)


@torch.inference_mode()
def logits_of(runner: ModelRunner, prompts: list[list[int]]) -> Tensor:
    """[prompts, vocab], of the last token of each."""
    batch = make_batch([(one, len(one.prompt)) for one in lay_out(prompts, 1, BLOCK)], BLOCK)
    return runner._model.forward(runner._step(batch), runner._cache)


def generate(runner: ModelRunner, prompts: list[list[int]], max_new: int, chunk: int, steps: int) -> list[list[int]]:
    sequences = lay_out(prompts, max_new, BLOCK)
    run_sequences(runner, sequences, chunk, BLOCK, steps)
    return [sequence.output for sequence in sequences]


def answer(rank: int, group: Any, cases: dict[str, Case], world_size: int) -> dict[str, Answers]:
    """The rank takes every `world_size`-th prompt. All ranks run as many forwards as the busiest needs."""
    results = {}
    for name, case in cases.items():
        runner = load(case.directory, rank, world_size, group)
        runner.warm_up()
        prompts, kept = case.prompts[rank::world_size], [text[:KEPT] for text in case.answers[rank::world_size]]
        known = [prompt + text for prompt, text in zip(prompts, kept, strict=True)]
        results[name] = Answers(
            logits_of(runner, prompts),
            generate(runner, prompts, MAX_NEW, CHUNK, steps_needed(case.prompts, MAX_NEW, CHUNK)),
            generate(runner, known, MAX_NEW - KEPT, 1000, MAX_NEW - KEPT),
            generate(runner, case.prompts[: rank == 0], MAX_NEW, 1000, MAX_NEW),
            runner.num_collectives,
        )
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_family_is_as_in_transformers(cases: dict[str, Case], world_size: int) -> None:
    results = [answer(0, None, cases, 1)] if world_size == 1 else run_gang(answer, world_size, cases, world_size)
    for name, case in cases.items():
        for rank, result in enumerate(results):
            where, ours = f"{name} on rank {rank} of {world_size}", result[name]
            theirs = case.answers[rank::world_size]
            assert ours.batched == theirs, where
            assert ours.resumed == [text[KEPT:] for text in theirs], where
            assert ours.alone == case.answers[: rank == 0], where
            assert (ours.logits - case.logits[rank::world_size]).abs().max() < TOLERANCE, where
        assert len({result[name].num_collectives for result in results}) == 1
    assert all(result[name].num_collectives == 0 for result in results for name in ("llama", "qwen3"))


def test_every_family_in_bf16_is_close(cases: dict[str, Case]) -> None:
    """Through packed weights, which in fp32 nothing goes through."""
    for name, case in cases.items():
        ours = logits_of(load(case.directory, 0, 1, None, "bfloat16"), case.prompts)
        assert ours.dtype == torch.bfloat16
        assert torch.cosine_similarity(ours.float(), case.logits).min() > 0.97, name
