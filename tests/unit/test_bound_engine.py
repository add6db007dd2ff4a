"""A real model behind a real engine: log-probabilities against transformers, JSON from random weights, and every
request cut at every token and resumed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import MixtralForCausalLM

from dp_engine.messages import Grammar, Sampling, TokenLogprobs
from tests.checkpoints import write_mixtral
from tests.multirank.engine_rank import RankResult, Run, run_alone
from tests.scripted_link import Answer, Script

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "tags": {"enum": ["a", "bc"]}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
PROMPT = [40, 41, 42, 7, 40, 41, 42, 9, 40, 41, 42]
KINDS = {
    "greedy": Sampling(16, temperature=0.0, ignore_eos=True, logprobs=3),
    "seeded": Sampling(16, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True, logprobs=0),
    "json": Sampling(90, temperature=0.9, seed=6, logprobs=2, grammar=JSON),
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"num_draft_tokens": 3},
    "overlap": {"overlap": True, "num_draft_tokens": 2, "max_num_batched_tokens": 16},
    "unified": {"policy": "unified", "overlap": True, "max_num_batched_tokens": 16},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield write_mixtral(tmp_path_factory.mktemp("model"), with_tokenizer=True, layers=1, max_position_embeddings=128)
    torch.set_num_threads(threads)


def run(checkpoint: Path, requests: list[tuple[list[int], Sampling, int]], **engine: Any) -> RankResult:
    """Requests 1, 2, ... with prompt, sampling and number of emitted tokens, all at once."""
    script = Script()
    for request_id, (prompt, sampling, emitted) in enumerate(requests, 1):
        script.add(0, request_id, prompt, sampling, num_emitted=emitted)
    return run_alone(checkpoint, Run(script, {"num_blocks": 600, "max_num_seqs": 128} | engine))


@pytest.fixture(scope="module")
def answers(checkpoint: Path) -> dict[str, Answer]:
    """Of an undisturbed run, one request after the other."""
    return {kind: run(checkpoint, [(PROMPT, sampling, 0)]).answers[1] for kind, sampling in KINDS.items()}


def assert_alike(found: list[TokenLogprobs], wanted: list[TokenLogprobs]) -> None:
    assert [values.logprob for values in found] == pytest.approx([values.logprob for values in wanted], abs=1e-3)
    assert [[token for token, _ in values.top] for values in found] == [
        [token for token, _ in values.top] for values in wanted
    ]


def test_values_are_those_of_transformers(checkpoint: Path, answers: dict[str, Answer]) -> None:
    """Before temperature, top_p and grammar."""
    model = MixtralForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for kind, answer in answers.items():
        tokens = torch.tensor([PROMPT + answer.tokens])
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(tokens).logits[0, len(PROMPT) - 1 : -1].float(), -1)
        assert len(answer.logprobs) == len(answer.tokens)
        for row, token, values in zip(logprobs, answer.tokens, answer.logprobs, strict=True):
            assert values.logprob == pytest.approx(row[token].item(), abs=1e-3)
            best = row.topk(KINDS[kind].logprobs or 0)
            assert [logprob for _, logprob in values.top] == pytest.approx(best.values.tolist(), abs=1e-3)
            if kind == "greedy":
                assert values.top[0] == (token, values.logprob)


def test_a_random_model_says_json(checkpoint: Path, answers: dict[str, Answer]) -> None:
    text = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).decode(answers["json"].tokens[:-1])
    assert answers["json"].reason == "stop"
    assert list(json.loads(text)) == ["name", "tags"] and json.loads(text)["tags"] in ("a", "bc")


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_every_engine_gives_the_same_from_every_cut(
    checkpoint: Path, answers: dict[str, Answer], engine: dict[str, Any]
) -> None:
    """As a request goes on whose gang has died: prompt and tokens so far, at any token, among all the others."""
    cuts = [(kind, cut) for kind, answer in answers.items() for cut in range(len(answer.tokens))]
    requests = [(PROMPT + answers[kind].tokens[:cut], KINDS[kind], cut) for kind, cut in cuts]
    result = run(checkpoint, requests, **engine)
    assert not result.rejected
    for request_id, (kind, cut) in enumerate(cuts, 1):
        found, whole = result.answers[request_id], answers[kind]
        assert (found.tokens, found.reason) == (whole.tokens[cut:], whole.reason), (kind, cut)
        assert_alike(found.logprobs, whole.logprobs[cut:])
    if engine.get("num_draft_tokens"):
        assert result.report.accepted_draft_tokens > 0


def test_what_cannot_be_compiled_is_rejected_and_the_rest_goes_on(checkpoint: Path, answers: dict[str, Answer]) -> None:
    wrong = Sampling(5, grammar=Grammar("regex", "[a"))
    forever = Sampling(5, grammar=JSON, ignore_eos=True)
    result = run(checkpoint, [(PROMPT, wrong, 0), (PROMPT, KINDS["greedy"], 0), (PROMPT, forever, 0)])
    assert set(result.rejected) == {1, 3}
    assert "unclosed" in result.rejected[1] and "ignore_eos" in result.rejected[3]
    assert result.answers[2].tokens == answers["greedy"].tokens


def test_an_abort_while_a_grammar_is_compiled(checkpoint: Path) -> None:
    """It comes with the request; the gang falls asleep all the same."""
    script = Script()
    script.add(0, 1, PROMPT, KINDS["json"])
    script.abort(0, [1])
    script.add(500, 2, PROMPT, KINDS["greedy"])
    result = run_alone(checkpoint, Run(script, {}))
    assert set(result.answers) == {2}


def test_a_checkpoint_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    directory = write_mixtral(tmp_path, layers=1)
    result = run(directory, [(PROMPT, KINDS["json"], 0), (PROMPT, KINDS["greedy"], 0)])
    assert "no tokenizer.json" in result.rejected[1]
    assert len(result.answers[2].tokens) == 16 and np.isfinite([v.logprob for v in result.answers[2].logprobs]).all()
