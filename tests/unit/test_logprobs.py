"""Log-probabilities against torch's own log_softmax."""

import json

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_engine.logprobs import token_logprobs
from dp_engine.messages import LEAST_LOGPROB, TokenLogprobs


def some_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def reference(row: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """By definition: everything sorted, equal ones by id."""
    logprobs = torch.log_softmax(row.float(), -1).clamp_min(LEAST_LOGPROB).tolist()
    order = sorted(range(len(logprobs)), key=lambda other: (-row[other].item(), other))
    return TokenLogprobs(logprobs[token], [(other, logprobs[other]) for other in order[:count]])


def assert_equal(found: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
    assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
    assert [logprob for _, logprob in found.top] == pytest.approx([logprob for _, logprob in wanted.top], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 320, 5000])
def test_values_are_those_of_log_softmax(dtype: torch.dtype, vocab: int) -> None:
    """In bfloat16 many logits are equal."""
    logits = some_logits(6, vocab, dtype)
    tokens, wanted = np.array([0, 1, 2, 3, 4, 5]), np.array([5, -1, 0, 20, 1, -1], np.int32)
    found = token_logprobs(logits, tokens, wanted)
    assert set(found) == {0, 2, 3, 4}
    for row, values in found.items():
        assert_equal(values, reference(logits[row], int(tokens[row]), int(wanted[row])))


def test_nobody_wants_any() -> None:
    assert token_logprobs(some_logits(2, 9), np.zeros(2, np.int64), np.full(2, -1, np.int32)) == {}
    assert token_logprobs(torch.empty(0, 9), np.zeros(0, np.int64), np.zeros(0, np.int32)) == {}


def test_the_impossible_is_a_number() -> None:
    """JSON has no infinity, and a client that cannot parse one answer loses all of it."""
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf] * 3, [torch.nan, 0.0, 1.0]])
    found = token_logprobs(logits, np.array([1, 0, 1]), np.array([3, 2, 2], np.int32))
    assert found[0].logprob == LEAST_LOGPROB and found[0].top[2] == (1, LEAST_LOGPROB)
    for values in found.values():
        numbers = [values.logprob, *(logprob for _, logprob in values.top)]
        assert all(LEAST_LOGPROB <= number <= 0 for number in numbers)
        assert json.loads(msgspec.json.encode(numbers)) == numbers


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-1, 6), min_size=1, max_size=5),
    st.lists(st.integers(-1, 6), min_size=1, max_size=5),
    st.integers(0, 1000),
)
def test_a_row_does_not_depend_on_the_others(wanted: list[int], others: list[int], seed: int) -> None:
    """Few different values: equal ones are the rule."""
    logits = torch.from_numpy(np.random.default_rng(seed).integers(0, 4, (len(wanted) + len(others), 12))).float()
    tokens = np.random.default_rng(seed).integers(0, 12, len(logits))
    together = token_logprobs(logits, tokens, np.array(wanted + others, np.int32))
    for row, count in enumerate(wanted):
        alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], np.array([count], np.int32))
        assert alone.get(0) == together.get(row)
        if count >= 0:
            assert_equal(alone[0], reference(logits[row], int(tokens[row]), count))
