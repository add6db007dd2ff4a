"""The sampler: what it may choose, how often, and that nothing else matters."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dp_engine.batch import SamplingBatch
from dp_engine.drafts import accepted
from dp_engine.sampler import greedy, per_output, sample, uniform


def params(
    count: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0, position: int | None = None
) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(count, temperature, np.float32),
        top_p=np.full(count, top_p, np.float32),
        top_k=np.full(count, top_k, np.int32),
        seed=np.full(count, seed, np.uint64),
        position=np.arange(count) if position is None else np.full(count, position, np.int64),
    )


def join(parts: list[SamplingBatch]) -> SamplingBatch:
    names = SamplingBatch.__slots__
    return SamplingBatch(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Of the tokens with a probability, with one degree of freedom less."""
    possible = expected > 0
    assert not set(tokens) - set(np.flatnonzero(possible)), "an excluded token was drawn"
    counts = np.bincount(tokens, minlength=len(expected))[possible]
    wanted = expected[possible] * len(tokens)
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(0, 512), (1, 1), (3, 300), (5, 512), (2, 1024)])
def test_greedy_is_the_first_maximum(dtype: torch.dtype, rows: int, vocab: int) -> None:
    logits = torch.randint(-4, 4, (rows, vocab)).to(dtype)  # full of ties
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert greedy(logits).tolist() == expected
    assert sample(logits, params(rows, temperature=0)).tolist() == expected


def reference(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Probabilities by sorting, for rows without ties."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0
    share = weights / weights.sum()
    before = np.cumsum(share[order]) - share[order]
    share[order[before >= top_p]] = 0
    return share / share.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.5, 1.0, 0), (2.0, 0.7, 0), (1.0, 1.0, 3), (1.5, 0.8, 6), (1.0, 0.01, 0), (1.0, 1.0, 1000)],
)
def test_distribution(temperature: float, top_p: float, top_k: int) -> None:
    logits = np.random.default_rng(3).normal(size=12).astype(np.float32)
    draws = 20_000
    tokens = sample(torch.from_numpy(logits).expand(draws, 12), params(draws, temperature, top_p, top_k, seed=7))
    expected = reference(logits.astype(np.float64), temperature, top_p, top_k)
    assert chi_square(tokens, expected) < 31.3  # 0.1 % of samples with 11 degrees of freedom are beyond


@pytest.mark.parametrize("top_k", [0, 255, 256, 257, 900])
@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999, 1.0])
def test_wide_rows_keep_the_right_set(top_k: int, top_p: float) -> None:
    """Rows that are settled among the best candidates and rows that need a full sort: the same rule."""
    rng = np.random.default_rng(top_k)
    logits = rng.normal(size=(2, 2000)).astype(np.float32) * np.array([[0.3], [4.0]], np.float32)
    draws = 300
    for row in logits:
        allowed = reference(row.astype(np.float64), 1.0, top_p, top_k) > 0
        tokens = sample(torch.from_numpy(row).expand(draws, 2000), params(draws, 1.0, top_p, top_k))
        assert allowed[tokens].all()
        assert len(set(tokens)) > min(allowed.sum(), 30) / 2


def test_tokens_as_good_as_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0]).expand(2000, 5)
    assert set(sample(logits, params(2000, top_k=2))) == {0, 1, 2, 3}


def test_token_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1, 1000)
    first = sample(logits, params(1, seed=5, position=9))
    assert first == sample(logits, params(1, seed=5, position=9))
    others = [sample(logits, params(1, seed=s, position=p)) for s, p in ((5, 10), (6, 9), (9, 5), (2**64 - 1, 9))]
    assert all(other != first for other in others)


kinds = st.tuples(
    st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0]),
    st.sampled_from([1.0, 0.9, 0.3]),
    st.sampled_from([0, 1, 5, 400]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 10**6),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(kinds, min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_do_not_see_each_other(
    rows: list[tuple[float, float, int, int, int]], seed: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(len(rows), 768) * 2).to(dtype)
    parts = [params(1, *row) for row in rows]
    alone = [int(sample(logits[index : index + 1], part)[0]) for index, part in enumerate(parts)]
    assert sample(logits, join(parts)).tolist() == alone
    for token, (temperature, _, top_k, _, _), row in zip(alone, rows, logits.float(), strict=True):
        if temperature < 1e-20 or top_k == 1:
            assert row[token] == row.max()


@pytest.mark.parametrize("counts", [[], [0, 0, 0], [2, 0, 1]])
def test_every_output_has_the_parameters_of_its_sequence(counts: list[int]) -> None:
    parts = [params(1, 0.1 * row, 1 - 0.1 * row, row, seed=row, position=10 * row) for row in range(1, len(counts) + 1)]
    sampling = join(parts) if parts else params(0)
    result = per_output(sampling, np.array(counts, np.int32))
    owners = np.repeat(np.arange(len(counts)), np.array(counts, np.int32) + 1)
    for name in ("temperature", "top_p", "top_k", "seed"):
        column, wanted = getattr(result, name), getattr(sampling, name)[owners]
        assert np.array_equal(column, wanted)
        assert column.dtype == wanted.dtype
    expected = [10 * row + at for row, count in enumerate(counts, 1) for at in range(count + 1)]
    assert result.position.tolist() == expected
    assert result.position.dtype == np.int64


def generate(table: Tensor, start: int, drafts: list[int], draws: int) -> np.ndarray:
    """Three tokens for each of `draws` seeds, int64 [draws, 3], from a model to which only the last token matters.
    In the first step, all sequences carry `drafts`; rejected ones are drawn again until they have three tokens."""
    text = np.full((draws, 4), start)
    done = np.zeros(draws, np.int64)
    guesses = np.array(drafts, np.int64)
    while (open_rows := np.flatnonzero(done < 3)).size:
        count = len(open_rows)
        num_drafts = np.full(count, len(guesses), np.int32)
        inputs = np.column_stack((text[open_rows, done[open_rows]], np.tile(guesses, (count, 1))))
        parameters = SamplingBatch(
            temperature=np.full(count, 0.8, np.float32),
            top_p=np.full(count, 0.95, np.float32),
            top_k=np.full(count, 4, np.int32),
            seed=open_rows.astype(np.uint64),
            position=done[open_rows] + 1,
        )
        tokens = sample(table[inputs.ravel()], per_output(parameters, num_drafts))
        right = accepted(tokens, np.tile(guesses, count), num_drafts)
        drawn = tokens.reshape(inputs.shape)
        for at in range(inputs.shape[1]):
            rows = np.flatnonzero(at <= right)
            text[open_rows[rows], done[open_rows[rows]] + 1 + at] = drawn[rows, at]
        done[open_rows] += right + 1
        guesses = guesses[:0]
    return text[:, 1:]


@pytest.mark.parametrize(
    ("drafts", "chance"),  # that all of them are right
    [([2], 0.616), ([2, 3], 0.310), ([0, 0], 0.022), ([2, 4], 0), ([3, 1], 0)],
    ids=str,
)
def test_drafts_change_neither_distribution_nor_tokens(drafts: list[int], chance: float) -> None:
    draws, vocab, start = 20_000, 5, 3
    logits = np.random.default_rng(8).normal(size=(vocab, vocab)).astype(np.float32)
    table = torch.from_numpy(logits)
    tokens = generate(table, start, drafts, draws)
    assert np.array_equal(tokens, generate(table, start, [], draws))
    chain = np.array([reference(row.astype(np.float64), 0.8, 0.95, 4) for row in logits])
    expected = chain[start][:, None, None] * chain[:, :, None] * chain[None, :, :]
    assert expected[tuple(drafts)].sum() == pytest.approx(chance, abs=1e-3)
    texts = np.ravel_multi_index(tuple(tokens.T), expected.shape)
    assert chi_square(texts, expected.ravel()) < 103.5  # 0.1 %, 63 degrees


def test_uniform_is_uniform_in_seeds_and_in_positions() -> None:
    counts = np.arange(40_000)
    for numbers in (
        uniform(np.zeros(40_000, np.uint64), counts),
        uniform(counts.astype(np.uint64), np.zeros(40_000, np.int64)),
        uniform((counts // 200).astype(np.uint64), counts % 200),
        uniform(np.full(40_000, 2**64 - 1, np.uint64), counts),
    ):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert chi_square((numbers * 64).astype(np.int64), np.full(64, 1 / 64)) < 103.5  # 0.1 %, 63 degrees
        pairs = (numbers[:-1] * 8).astype(np.int64) * 8 + (numbers[1:] * 8).astype(np.int64)
        assert chi_square(pairs, np.full(64, 1 / 64)) < 103.5


def test_uniform_stays_the_same_across_versions() -> None:
    """Texts sampled with a seed must not change with a release."""
    numbers = uniform(np.array([0, 1, 2**63], np.uint64), np.array([0, 1, 12345]))
    assert numbers.tolist() == [0.28176129772258496, 0.36818951565166946, 0.9465047717527333]
