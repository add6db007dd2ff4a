"""Guesses from a sequence's own text, and how many of them count as right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_engine import drafts
from dp_engine.drafts import accepted, propose

SCRATCH = -7


def guess(texts: list[list[int]], limits: list[int], ngram_max: int, ngram_min: int) -> list[list[int]]:
    """Through a ledger whose rows are out of order and full of rubbish; checks that nothing else was written."""
    width = max((len(text) + limit for text, limit in zip(texts, limits, strict=True)), default=0) + 1
    ledger = np.full((2 * len(texts) + 1, width), SCRATCH, np.int32)
    rows = np.arange(len(texts))[::-1] * 2 + 1
    for row, text in zip(rows, texts, strict=True):
        ledger[row, : len(text)] = text
    before = ledger.copy()
    lengths = np.array([len(text) for text in texts], np.int32)
    counts = propose(ledger, rows, lengths, np.array(limits, np.int32), ngram_max, ngram_min)
    assert counts.dtype == np.int32
    guesses = [ledger[row, len(text) :][:count] for row, text, count in zip(rows, texts, counts, strict=True)]
    result = [one.tolist() for one in guesses]
    for one in guesses:
        one[:] = SCRATCH
    assert np.array_equal(ledger, before)
    return result


def by_brute_force(text: list[int], limit: int, ngram_max: int, ngram_min: int) -> list[int]:
    for n in range(ngram_max, ngram_min - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return text[end : end + limit]
    return []


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        pytest.param([1, 2, 3, 4, 5, 1, 2, 3], 9, [4, 5, 1, 2, 3], id="repeat"),
        pytest.param([1, 2, 3, 4, 5, 6], 9, [], id="no repeat"),
        pytest.param([9, 2, 3, 4, 5, 1, 2, 3], 9, [4, 5, 1, 2, 3], id="shorter run"),
        pytest.param([9, 9, 3, 4, 5, 1, 2, 3], 9, [], id="one token is too short a run"),
        pytest.param([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5], id="limit"),
        pytest.param([1, 2, 3, 4, 5, 1, 2, 3], 0, [], id="none wanted"),
        pytest.param([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1, [5], id="latest"),
        pytest.param([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1, [4], id="longer run before later one"),
        pytest.param([7, 7, 7, 7], 9, [7], id="overlaps itself"),
        pytest.param([7, 8, 7, 8, 7], 9, [8, 7], id="overlaps itself with period two"),
        pytest.param([5, 5, 5], 9, [5], id="as long as the run"),
        pytest.param([5, 5], 9, [], id="nothing before"),
        pytest.param([5], 9, [], id="one token"),
    ],
)
def test_rules(text: list[int], limit: int, expected: list[int]) -> None:
    assert guess([text], [limit], 3, 2) == [expected]
    assert by_brute_force(text, limit, 3, 2) == expected


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), max_size=8)


@given(texts, st.lists(st.integers(0, 6), min_size=8, max_size=8), st.integers(1, 6), st.integers(1, 4))
def test_any_rows_as_by_brute_force(rows: list[list[int]], limits: list[int], longest: int, shortest: int) -> None:
    longest = max(longest, shortest)
    limits = limits[: len(rows)]
    expected = [by_brute_force(text, limit, longest, shortest) for text, limit in zip(rows, limits, strict=True)]
    assert guess(rows, limits, longest, shortest) == expected


def test_many_rows_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searched in several parts."""
    monkeypatch.setattr(drafts, "_CHUNK", 256)
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, 4, length).tolist() for length in rng.integers(1, 300, 100)]
    expected = [by_brute_force(text, 4, 3, 2) for text in rows]
    assert guess(rows, [4] * len(rows), 3, 2) == expected
    assert sum(map(bool, expected)) > 50


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5), max_size=8))
def test_accepted_is_the_run_before_the_first_wrong_draft(sequences: list[list[tuple[int, int]]]) -> None:
    """(drawn, draft) of each sequence; the token behind the last draft has none to be compared with."""
    tokens = np.array([token for pairs in sequences for token in [*(drawn for drawn, _ in pairs), 1]], np.int64)
    guesses = np.array([draft for pairs in sequences for _, draft in pairs], np.int32)
    expected = []
    for pairs in sequences:
        run = 0
        while run < len(pairs) and pairs[run][0] == pairs[run][1]:
            run += 1
        expected.append(run)
    result = accepted(tokens, guesses, np.array([len(pairs) for pairs in sequences], np.int32))
    assert result.dtype == np.int32
    assert result.tolist() == expected
