"""The same bits for a row whatever is computed with it: products, experts, attention, and what torch gives as it is."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep.dispatch import weighted_sum
from kernels import invariance, native, walk
from kernels.attention import paged_attention, plan_attention, write_kv
from kernels.expert_weights import Activation
from kernels.experts import ExpertWeights, make_experts, make_mlp
from kernels.invariance import COUNTS, REFERENCE, SAMPLES, FixedRows, NotInvariant, prove
from kernels.linear import InvariantLinear, make_linear
from kernels.mla import mla_attention
from kernels.norm import rms_norm

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
HEADS, KV_HEADS, DIM = 6, 2, 32
RANK, ROPE, NOPE, VALUE = 48, 16, 12, 10

seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(DTYPES)


pytestmark = pytest.mark.usefixtures("one_thread")


def assert_rows_are_their_own(function: Callable[..., Tensor], *inputs: Tensor, picks: int = 4) -> None:
    """Rows alone, and a part of the rows, give the bits that all of them give."""
    together, rows = function(*inputs), len(inputs[0])
    for pick in np.random.default_rng(rows).integers(0, rows, min(picks, rows)):
        assert torch.equal(function(*(x[pick : pick + 1] for x in inputs)), together[pick : pick + 1])
        assert torch.equal(function(*(x[pick:] for x in inputs)), together[pick:])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(48, 32), (40, 24), (7, 96), (96, 64)]), dtypes, st.booleans(), st.integers(1, 600), seeds)
def test_linear(shape: tuple[int, int], dtype: torch.dtype, with_bias: bool, rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype) if with_bias else None
    x, other = torch.randn(rows, shape[1]).to(dtype), torch.randn(rows, shape[0]).to(dtype)
    layer = make_linear(weight, bias, invariant=True)
    exact = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(layer(x), exact)
    assert_rows_are_their_own(layer, x)
    assert_rows_are_their_own(layer.add, x, other)
    if isinstance(layer, InvariantLinear):
        assert_rows_are_their_own(layer.silu, x)
        assert_rows_are_their_own(layer.mul, x, other)
    assert layer(x[:0]).shape == (0, shape[0])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    dtypes,
    st.sampled_from(["silu", "swiglu_oai"]),
    st.booleans(),
    st.sampled_from([(40, 24), (64, 32)]),
    seeds,
)
def test_experts(
    counts: list[int], dtype: torch.dtype, activation: Activation, biases: bool, dims: tuple[int, int], seed: int
) -> None:
    """Alone at its expert, a row has the bits it has among others, and those of a dense network."""
    torch.manual_seed(seed)
    inner, hidden = dims
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner), *(((inner,), (inner,), (hidden,)) if biases else ()))
    weights = [ExpertWeights(*(torch.randn(shape).to(dtype) / 4 for shape in shapes)) for _ in counts]
    experts = make_experts(weights, activation, invariant=True)
    rows = 3 * torch.randn(sum(counts), hidden).to(dtype)
    together = experts(rows, counts)
    for row, slot in list(enumerate(np.repeat(np.arange(len(counts)), counts)))[::7]:
        alone = [int(number == slot) for number in range(len(counts))]
        assert torch.equal(experts(rows[row : row + 1], alone), together[row : row + 1])
        dense = make_mlp(weights[slot], activation, invariant=True)
        assert torch.equal(dense(rows[row:]), dense(rows)[row:])
        assert torch.equal(dense(rows[row : row + 1]), together[row : row + 1])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 700), st.integers(1, 160), dtypes, seeds)
def test_what_needs_no_care(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    """Torch's own row-wise operations that a forward uses."""
    torch.manual_seed(seed)
    x, weight = 3 * torch.randn(rows, width).to(dtype), torch.rand(width).to(dtype)
    assert_rows_are_their_own(lambda x: rms_norm(x, weight, 1e-5), x)
    assert_rows_are_their_own(lambda x: torch.softmax(x.float(), -1), x)
    assert_rows_are_their_own(lambda x: x.float().sum(-1), x)
    top_k = min(width, 4)
    assert_rows_are_their_own(lambda x: torch.topk(x, top_k)[0], x)
    assert_rows_are_their_own(lambda x: torch.topk(x, top_k)[1], x.round())
    pairs, shares = torch.randn(rows, top_k, width).to(dtype), torch.rand(rows, top_k)
    assert_rows_are_their_own(weighted_sum, pairs, shares)
    assert_rows_are_their_own(invariance.silu, x)
    assert_rows_are_their_own(invariance.sigmoid, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise_functions_are_right(dtype: torch.dtype) -> None:
    x = torch.linspace(-200, 200, 999).to(dtype)
    torch.testing.assert_close(invariance.sigmoid(x), torch.sigmoid(x.float()))
    torch.testing.assert_close(invariance.silu(x), torch.nn.functional.silu(x))


def test_rows_in_proved_numbers() -> None:
    fixed = FixedRows((4, 16))
    seen = []

    def double(x: Tensor) -> Tensor:
        seen.append(len(x))
        assert x.is_contiguous() and x.data_ptr() % 64 == 0
        return 2 * x

    x = torch.randn(41, 6)[:, 1:]
    for rows, pieces in ((1, [4]), (4, [4]), (5, [16]), (16, [16]), (17, [16, 4]), (41, [16, 16, 16])):
        seen.clear()
        assert torch.equal(fixed(double, x[:rows]), 2 * x[:rows])
        assert seen == pieces == fixed.pieces(rows)


def test_a_number_of_rows_with_other_bits_is_not_used() -> None:
    """And a machine on which a row's place matters is refused."""
    x = torch.randn(SAMPLES, 8)
    assert prove(lambda x: 2 * x, x).counts == COUNTS
    assert prove(lambda x: 2 * x, x, most=30).counts == tuple(count for count in COUNTS if count <= 30)
    assert prove(lambda x: 2 * x, x, most=1).counts == tuple(count for count in COUNTS if count <= REFERENCE)
    odd = prove(lambda x: 2 * x + (1e-6 if len(x) in (1, 32) else 0), x)
    assert odd.counts == tuple(count for count in COUNTS if count not in (1, 32))
    with pytest.raises(NotInvariant, match="batch_invariant"):
        prove(lambda x: x + torch.arange(len(x))[:, None], x)


def test_proofs_notice_another_order() -> None:
    """Sums of halves, as a library may split them, show in bf16 too."""
    for dtype in DTYPES:
        x, weight = invariance.cancelling(96, 7, dtype, CPU)

        def product(x: Tensor, weight: Tensor = weight) -> Tensor:
            wide, other = x.float(), weight.float().T
            if len(x) == 8:
                return (wide[:, :48] @ other[:48] + wide[:, 48:] @ other[48:]).to(x.dtype)
            return torch.stack([row @ other for row in wide]).to(x.dtype)

        counts = prove(product, x).counts
        assert 8 not in counts and 4 in counts


# ---- attention: the same tokens, cut and batched in other ways


class Requests:
    """Sequences whose tokens are all known; `outputs` computes them in some order of steps."""

    def __init__(self, lengths: list[int], dtype: torch.dtype, window: int | None, block_size: int):
        self.lengths, self.dtype, self.window, self.block_size = lengths, dtype, window, block_size
        self.qkv = [torch.randn(length, HEADS + 2 * KV_HEADS, DIM).to(dtype) for length in lengths]
        self.sinks = torch.randn(HEADS).to(dtype) if window else None
        self.rows = [torch.randn(length, RANK + ROPE).to(dtype) for length in lengths]
        self.q_nope = [torch.randn(length, HEADS, NOPE).to(dtype) for length in lengths]
        self.q_rope = [torch.randn(length, HEADS, ROPE).to(dtype) for length in lengths]
        self.key_up, self.value_up = torch.randn(HEADS, NOPE, RANK).to(dtype), torch.randn(HEADS, VALUE, RANK).to(dtype)

    def outputs(self, seed: int, latent: bool, invariant: bool = True, walks: int = 0) -> list[Tensor]:
        """In chunks of random sizes, random sequences in a step, blocks in random order."""
        rng = np.random.default_rng(seed)
        widths = [-(-length // self.block_size) for length in self.lengths]
        blocks = rng.permutation(sum(widths)) + 1
        tables = np.zeros((len(widths), max(widths)), np.int32)
        for row, width in enumerate(widths):
            tables[row, :width], blocks = np.split(blocks, [width])
        shape = (RANK + ROPE,) if latent else (2, KV_HEADS, DIM)
        cache = torch.randn(sum(widths) + 1, self.block_size, *shape).to(self.dtype)
        done, results = np.zeros(len(widths), np.int64), [[] for _ in widths]
        while (done < self.lengths).any():
            left = np.array(self.lengths) - done
            members = np.flatnonzero(left * (rng.random(len(left)) < 0.8))
            if not len(members):
                continue
            most = rng.choice([1, 1, 5, 40, 400], len(members))
            counts = np.minimum(left[members], rng.integers(1, most + 1))
            spans = [(who, slice(done[who], done[who] + n)) for who, n in zip(members, counts, strict=True)]
            at = [np.arange(span.start, span.stop) for _, span in spans]
            slots = [
                tables[who, places // self.block_size] * self.block_size + places % self.block_size
                for (who, _), places in zip(spans, at, strict=True)
            ]
            plan = plan_attention(
                counts,
                done[members] + counts,
                tables[members],
                self.block_size,
                self.dtype,
                CPU,
                self.window,
                invariant,
                walks,
            )
            step = self._latent if latent else self._grouped
            out = step(spans, cache, torch.from_numpy(np.concatenate(slots)), plan)
            for (who, _), some in zip(spans, out.split(counts.tolist()), strict=True):
                results[who].append(some)
            done[members] += counts
        return [torch.cat(some) for some in results]

    def _grouped(self, spans, cache, slots, plan) -> Tensor:
        qkv = torch.cat([self.qkv[who][span] for who, span in spans])
        write_kv(cache, slots, qkv[:, HEADS:].flatten(1))
        return paged_attention(qkv, cache, plan, HEADS, sinks=self.sinks)

    def _latent(self, spans, cache, slots, plan) -> Tensor:
        q_nope, q_rope, rows = (
            torch.cat([kind[who][span] for who, span in spans]) for kind in (self.q_nope, self.q_rope, self.rows)
        )
        write_kv(cache, slots, rows)
        return mla_attention(q_nope, q_rope, rows, cache, plan, self.key_up, self.value_up, 0.2)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 30), st.integers(1, 400)), min_size=1, max_size=4),
    dtypes,
    st.sampled_from([None, 1, 9, 150]),
    st.sampled_from([1, 16, 24]),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_attention(
    lengths: list[int], dtype: torch.dtype, window: int | None, block_size: int, latent: bool, walks: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    requests = Requests(lengths, dtype, window, block_size)
    most = walk.ANY if walks and native.kernels() is not None else 0
    first, second = (requests.outputs(order, latent, walks=most) for order in (seed, seed + 1))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    if dtype == torch.float32:
        fast = requests.outputs(seed, latent, invariant=False)
        torch.testing.assert_close(torch.cat(first), torch.cat(fast), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_not_invariant_by_itself(dtype: torch.dtype, latent: bool) -> None:
    """What the tests above look for is there without the option."""
    torch.manual_seed(0)
    requests = Requests([900, 700], dtype, None, 16)
    first, second = (requests.outputs(order, latent, invariant=False) for order in (1, 2))
    assert not torch.equal(torch.cat(first), torch.cat(second))
