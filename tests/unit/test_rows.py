"""The short operations in C against torch: each row by itself, of any stride, and what does not go there."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.dispatch import weighted_sum
from ep.routing import Router, Routing, route
from kernels import native, rows
from kernels.attention import write_kv
from kernels.linear import PackedLinear
from kernels.norm import rms_norm
from kernels.rotary import rotate_
from kernels.rows import MOST_EXPERTS, Scores, Scoring

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.kernels() is None, reason="no fitting CPU or no C compiler on this machine"),
]

dtypes = st.sampled_from([torch.float32, torch.bfloat16])
counts = st.integers(0, 9)
seeds = st.integers(0, 2**31)


def without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: None)


@settings(deadline=None)
@given(counts, st.sampled_from([32, 96, 576]), dtypes, seeds)
def test_norm(count: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    wide, weight = (5 * torch.randn(count, width + 16)).to(dtype), torch.rand(width).to(dtype)
    x = wide[:, 16:]
    assert rows.usable(x, weight, step=32)
    found, exact = rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(found.double(), exact, rtol=2e-6 if dtype == torch.float32 else 0.02, atol=0)
    assert torch.equal(found[1:], rms_norm(x[1:], weight, 1e-5))


@settings(deadline=None)
@given(counts, st.integers(1, 5), st.sampled_from([32, 64, 128]), dtypes, seeds)
def test_rotation(count: int, heads: int, width: int, dtype: torch.dtype, seed: int) -> None:
    """Bit for bit torch's, in a part of wider heads, and nothing beside it."""
    torch.manual_seed(seed)
    wide = torch.randn(count, heads + 2, width + 8).to(dtype)
    cos, sin = torch.randn(2, count, 1, width).to(dtype)
    before, x = wide.clone(), wide[:, 1 : 1 + heads, :width]
    expected = x * cos + x.roll(width // 2, -1) * sin
    assert rows.usable(x, cos, sin, step=32)
    rotate_(x, cos, sin)
    assert torch.equal(x, expected)
    x.copy_(before[:, 1 : 1 + heads, :width])
    assert torch.equal(wide, before)


@settings(deadline=None)
@given(counts, st.integers(1, 9), st.sampled_from([16, 48, 576]), dtypes, seeds)
def test_weighted_sum(count: int, top_k: int, width: int, dtype: torch.dtype, seed: int) -> None:
    """Bit for bit the sum in k order."""
    torch.manual_seed(seed)
    pairs, weights = torch.randn(count, top_k, width).to(dtype), torch.rand(count, top_k)
    expected = torch.zeros(count, width)
    for k in range(top_k):
        expected += pairs[:, k].float() * weights[:, k : k + 1]
    assert torch.equal(weighted_sum(pairs, weights), expected.to(dtype))


@settings(deadline=None)
@given(st.integers(1, 40), st.sampled_from([1, 15, 16, 17, 60]), st.booleans(), dtypes, seeds)
def test_scores(count: int, experts: int, with_bias: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    wide, weight = torch.randn(count, 640).to(dtype), torch.randn(experts, 624)
    bias, x = torch.randn(experts) if with_bias else None, wide[:, 8:632]
    scores = Scores(weight, bias)
    assert torch.equal(scores.weight, weight)
    found = scores(x)
    torch.testing.assert_close(found, F.linear(x.float(), weight, bias), rtol=1e-5, atol=3e-4)
    assert torch.equal(found[-1:], scores(x[-1:])) and torch.equal(found[1:], scores(x[1:]))


@settings(deadline=None)
@given(
    st.integers(0, 20),
    st.sampled_from([(2, 2), (8, 2), (15, 4), (64, 8), (160, 6), (MOST_EXPERTS, 10)]),
    st.sampled_from(["softmax", "topk_softmax", "sigmoid"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 2.5]),
    seeds,
)
def test_route(
    count: int,
    shape: tuple[int, int],
    scoring: Scoring,
    normalize: bool,
    corrected: bool,
    scale: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    experts, top_k = shape
    logits = 4 * torch.randn(count, experts)
    correction = torch.randn(experts) if corrected and scoring == "sigmoid" else None
    rule = Routing(top_k, scoring, normalize, scale)
    expected, ids = route(logits, rule, correction)
    found, found_ids = rows.route(logits.clone(), top_k, scoring, correction, normalize, scale)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    scores = logits if scoring != "sigmoid" else torch.sigmoid(logits) + (0 if correction is None else correction)
    torch.testing.assert_close(scores.gather(1, found_ids), scores.gather(1, ids), rtol=1e-6, atol=1e-6)
    assert all(len(set(chosen)) == top_k for chosen in found_ids.tolist())


def test_equals_come_in_order() -> None:
    weights, ids = rows.route(torch.zeros(2, 20), 3, "softmax", None, True, 1.0)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


@settings(deadline=None)
@given(counts, st.integers(1, 70), dtypes, seeds)
def test_rows_into_the_cache(count: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    cache, wide = torch.randn(5, 4, width).to(dtype), torch.randn(count, width + 3).to(dtype)
    slots, expected = torch.randperm(20)[:count], cache.clone()
    expected.view(20, width)[slots] = wide[:, 3:]
    write_kv(cache, slots, wide[:, 3:])
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_share_rows(threads: int) -> None:
    """Of a long prefill. Bits stay."""
    torch.manual_seed(threads)
    x, weight, shares = torch.randn(700, 256).bfloat16(), torch.rand(256).bfloat16(), torch.rand(350, 2)
    cos, sin = torch.randn(2, 700, 1, 64).bfloat16()
    scores = Scores(torch.randn(20, 256), None)

    def everything() -> list[torch.Tensor]:
        heads = x.view(700, 4, 64).clone()
        rotate_(heads, cos, sin)
        cache = torch.zeros_like(x)
        write_kv(cache, torch.arange(700).flip(0), x)
        sums = weighted_sum(x.view(350, 2, 256), shares)
        return [rms_norm(x, weight, 1e-5), heads, sums, cache, *rows.route(scores(x), 3, "softmax", None, True, 1.0)]

    expected = everything()
    torch.set_num_threads(threads)
    for _ in range(5):
        assert all(torch.equal(*pair) for pair in zip(everything(), expected, strict=True))


def test_routers_with_and_without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups, and more experts than C takes, stay with torch."""
    torch.manual_seed(0)
    x = torch.randn(7, 64).bfloat16()
    for rule, experts in ((Routing(2), 8), (Routing(2, "sigmoid", True, 2.0, 4, 2), 8), (Routing(3), 4096)):
        weight = torch.randn(experts, 64)
        found = Router(rule, weight)(x)
        with monkeypatch.context() as patch:
            without_c(patch)
            router = Router(rule, weight)
            assert isinstance(router.scores, PackedLinear)
            expected = router(x)
        assert torch.equal(found[1], expected[1])
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-7)


def test_what_does_not_go_to_c(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 64)
    assert rows.usable(x, x[0], step=32)
    assert not rows.usable(x, x[0].bfloat16(), step=32)
    assert not rows.usable(x[:, :40], step=32)
    assert not rows.usable(x.T, step=4)
    assert not rows.usable(x.half(), step=32)
    assert not rows.usable(x.to("meta"), step=32)
    without_c(monkeypatch)
    assert not rows.usable(x, step=32)
