"""Greedy tokens of the runner against `transformers`, token for token, on one, two and three ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dp_engine.config import EngineConfig
from dp_engine.model_config import ModelConfig, ModelConfigError
from dp_engine.runner import ModelRunner
from ep.dispatch import CPU, make_dispatcher
from ep.placement import Placements
from tests.by_hand import HandSequence, lay_out, make_batch, run_sequences, settle, steps_needed
from tests.checkpoints import write_mixtral
from tests.multirank.gang import run_gang

MAX_NEW, CHUNK, BLOCK = 12, 24, 8
LENGTHS = (1, 7, 8, 9, 23, 24, 25, 60, 72)
KINDS: dict[str, dict[str, Any]] = {
    "gqa": {"seed": 1},
    "fused-tied": {"seed": 2, "layout": "fused", "tie": True, "heads": 3, "kv_heads": 3, "head_dim": 24},
    "sharded-top1": {"seed": 3, "topk": 1, "max_shard_size": "150KB", "layers": 3},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 320, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {kind: write_mixtral(base / kind, **arguments) for kind, arguments in KINDS.items()}


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    return {kind: greedy_text(directory, prompts) for kind, directory in checkpoints.items()}


def greedy_text(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' own greedy generation gives, one prompt at a time, ends of sequence not obeyed."""
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": MAX_NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        answers.append(model.generate(ids, **settings)[0, len(prompt) :].tolist())
    return answers


def load(directory: Path, rank: int, world_size: int, group: Any, **engine: Any) -> ModelRunner:
    config = EngineConfig(block_size=BLOCK, num_blocks=80, **engine)
    layers = ModelConfig.load(directory, config).num_layers
    dispatcher = make_dispatcher("auto", Placements.contiguous(layers, 8, world_size), rank, world_size, group)
    return ModelRunner.load(directory, config, dispatcher, CPU, lambda line: None)


def generate(
    rank: int, group: Any, directories: dict[str, Path], shares: list[list[list[int]]], chunk: int
) -> tuple[dict[str, list[list[int]]], list[int]]:
    """Each rank its share of the prompts, on every checkpoint. All ranks run as many forwards as the busiest needs."""
    steps = max(steps_needed(share, MAX_NEW, chunk) for share in shares)
    outputs, collectives = {}, []
    for kind, directory in directories.items():
        runner = load(directory, rank, len(shares), group)
        runner.warm_up()
        sequences = lay_out(shares[rank], MAX_NEW, BLOCK)
        run_sequences(runner, sequences, chunk, BLOCK, steps)
        outputs[kind] = [sequence.output for sequence in sequences]
        collectives.append(runner.num_collectives)
    return outputs, collectives


@pytest.mark.parametrize("chunk", [CHUNK, 1000], ids=["chunked", "whole"])
def test_one_rank(
    checkpoints: dict[str, Path], prompts: list[list[int]], expected: dict[str, list[list[int]]], chunk: int
) -> None:
    outputs, _ = generate(0, None, checkpoints, [prompts], chunk)
    assert outputs == expected


@pytest.mark.parametrize("idle", [False, True], ids=["busy", "idle-rank"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks(
    checkpoints: dict[str, Path],
    prompts: list[list[int]],
    expected: dict[str, list[list[int]]],
    world_size: int,
    idle: bool,
) -> None:
    """The last rank may have nothing to do at all; the others end at different times."""
    workers = world_size - idle
    shares = [prompts[rank::workers] if rank < workers else [] for rank in range(world_size)]
    results = run_gang(generate, world_size, checkpoints, shares, CHUNK)
    assert len({tuple(collectives) for _, collectives in results}) == 1
    for kind, answers in expected.items():
        for rank in range(workers):
            assert results[rank][0][kind] == answers[rank::workers], (kind, rank)


class Guess:
    """Drafts of `width` tokens: the known answers, but every fourth token of a text is guessed wrong."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]], width: int):
        self.width = width
        self.answers = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}

    def __call__(self, sequence: HandSequence) -> list[int]:
        done, answer = len(sequence.output), self.answers[tuple(sequence.prompt)]
        known = enumerate(answer[done : done + self.width], len(sequence.tokens))
        return [(token + (at % 4 == 0)) % 320 for at, token in known]


def verify(
    rank: int, group: Any, directory: Path, shares: list[list[list[int]]], answers: list[list[list[int]]]
) -> tuple[list[list[int]], int, int, int]:
    """Rank r guesses r + 2 tokens at a time. All ranks run as many forwards as are needed without drafts."""
    steps = max(steps_needed(share, MAX_NEW, CHUNK) for share in shares)
    runner = load(directory, rank, len(shares), group)
    sequences = lay_out(shares[rank], MAX_NEW, BLOCK)
    guess = Guess(shares[rank], answers[rank], rank + 2)
    run_sequences(runner, sequences, CHUNK, BLOCK, steps, guess)
    right, wrong = (sum(getattr(one, name) for one in sequences) for name in ("accepted", "rejected"))
    return [sequence.output for sequence in sequences], right, wrong, runner.num_collectives


@pytest.mark.parametrize("world_size", [1, 2])
def test_drafts_do_not_change_the_text(
    checkpoints: dict[str, Path], prompts: list[list[int]], expected: dict[str, list[list[int]]], world_size: int
) -> None:
    shares, answers = ([texts[rank::world_size] for rank in range(world_size)] for texts in (prompts, expected["gqa"]))
    arguments = checkpoints["gqa"], shares, answers
    results = [verify(0, None, *arguments)] if world_size == 1 else run_gang(verify, world_size, *arguments)
    assert len({collectives for *_, collectives in results}) == 1
    for (outputs, right, wrong, _), answer in zip(results, answers, strict=True):
        assert outputs == answer
        assert right >= 3 * len(outputs)
        assert wrong >= len(outputs)


def test_drafts_do_not_change_sampled_text(checkpoints: dict[str, Path], prompts: list[list[int]]) -> None:
    def run(**arguments: Any) -> list[HandSequence]:
        runner = load(checkpoints["gqa"], 0, 1, None)
        sequences = lay_out(prompts, MAX_NEW, BLOCK, temperature=0.9, top_p=0.95, seed=11)
        run_sequences(runner, sequences, CHUNK, BLOCK, steps_needed(prompts, MAX_NEW, CHUNK), **arguments)
        return sequences

    answers = [sequence.output for sequence in run()]
    with_drafts = run(guess=Guess(prompts, answers, 3))
    assert [sequence.output for sequence in with_drafts] == answers
    assert sum(sequence.accepted for sequence in with_drafts) >= 3 * len(prompts)


def test_fork_copies_the_half_filled_block(
    checkpoints: dict[str, Path], prompts: list[list[int]], expected: dict[str, list[list[int]]]
) -> None:
    """Both share the full blocks of a prompt of 23 tokens and go on in their own copies of the last one, the copy made
    in the very step in which both write to theirs."""
    prompt, answer = prompts[4], expected["gqa"][4]
    full = len(prompt) // BLOCK
    branched = [*prompt, (answer[0] + 1) % 320]
    runner = load(checkpoints["gqa"], 0, 1, None)
    parent, fork = lay_out([prompt, branched], MAX_NEW, BLOCK)
    run_prompt = [(parent, len(prompt))]
    settle(run_prompt, runner.run(make_batch(run_prompt, BLOCK)).tokens)
    fork.blocks[:full] = parent.blocks[:full]
    fork.computed = len(prompt)
    both = [(parent, 1), (fork, 1)]
    settle(both, runner.run(make_batch(both, BLOCK, copies=[(parent.blocks[full], fork.blocks[full])])).tokens)
    run_sequences(runner, [parent, fork], 1, BLOCK, MAX_NEW - 1)
    assert [parent.output, fork.output] == [answer, *greedy_text(checkpoints["gqa"], [branched])]


def test_placeholder_step_copies_blocks(checkpoints: dict[str, Path], prompts: list[list[int]]) -> None:
    runner = load(checkpoints["gqa"], 0, 1, None)
    run_sequences(runner, lay_out(prompts[:1], 1, BLOCK), CHUNK, BLOCK, 1)
    assert runner.run(make_batch([], BLOCK, copies=[(1, 5)])).tokens.tolist() == []
    for layer in runner._cache.layers:
        assert layer[1].any()
        assert torch.equal(layer[1], layer[5])


def test_state_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ModelConfigError, match=r"num_state_slots is 8, but mixtral keeps no state per sequence"):
        load(checkpoints["gqa"], 0, 1, None, num_state_slots=8, prefix_cache=False)
    batch = replace(make_batch([], BLOCK), state_copies=np.array([[1, 2]]))
    with pytest.raises(ValueError, match="mixtral keeps no state per sequence"):
        load(checkpoints["gqa"], 0, 1, None).run(batch)


def test_drafts_beyond_the_last_position_are_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ModelConfigError, match="drafts would run past the model's last position"):
        load(checkpoints["gqa"], 0, 1, None, num_draft_tokens=2, clip_drafts=False)


def test_sampled_tokens_repeat_whatever_runs_beside(checkpoints: dict[str, Path], prompts: list[list[int]]) -> None:
    """A sequence alone, among others, and continued after its first tokens were lost: the same text."""

    def run(chosen: list[list[int]], max_new: int) -> list[list[int]]:
        runner = load(checkpoints["gqa"], 0, 1, None)
        sequences = lay_out(chosen, max_new, BLOCK, temperature=0.9, top_p=0.95, seed=11)
        run_sequences(runner, sequences, CHUNK, BLOCK, steps_needed(chosen, max_new, CHUNK))
        return [sequence.output for sequence in sequences]

    alone = run(prompts[3:4], MAX_NEW)[0]
    assert run(prompts, MAX_NEW)[3] == alone
    assert run([prompts[3] + alone[:5]], MAX_NEW - 5)[0] == alone[5:]


def test_warm_up_leaves_no_trace(checkpoints: dict[str, Path]) -> None:
    runner = load(checkpoints["gqa"], 0, 1, None)
    runner.warm_up()
    assert all(not layer.any() for layer in runner._cache.layers)
    assert all(layer.num_rows == 0 for layer in runner.moe_layers)


def test_bf16_is_close_to_fp32(checkpoints: dict[str, Path], prompts: list[list[int]]) -> None:
    """Through packed weights and the whole model: the first token of most prompts stays the same."""
    firsts = {}
    for dtype in ("float32", "bfloat16"):
        runner = load(checkpoints["gqa"], 0, 1, None, dtype=dtype)
        sequences = lay_out(prompts, 1, BLOCK)
        run_sequences(runner, sequences, 1000, BLOCK, 1)
        firsts[dtype] = [sequence.output[0] for sequence in sequences]
    same = sum(a == b for a, b in zip(firsts["float32"], firsts["bfloat16"], strict=True))
    assert same >= 7


def test_parts_that_do_not_belong_together_are_refused(checkpoints: dict[str, Path]) -> None:
    dispatcher = make_dispatcher("auto", Placements.contiguous(2, 4, 1), 0, 1, None)
    with pytest.raises(ValueError, match=r"the model has 8 experts in 2 layers, the dispatcher \[4, 4\]"):
        ModelRunner.load(checkpoints["gqa"], EngineConfig(), dispatcher, CPU, lambda line: None)
