"""Kernels against plain torch written for the eye."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import linear, native
from kernels.attention import (
    attend,
    attend_with_sinks,
    group_by_length,
    group_decodes,
    paged_attention,
    plan_attention,
    write_kv,
)
from kernels.expert_weights import Activation, ExpertWeights, swiglu_oai
from kernels.experts import GroupedExperts, make_experts, make_mlp
from kernels.linear import PackedLinear, bucket
from kernels.mla import mla_attention
from kernels.norm import rms_norm
from kernels.rotary import Rope, RotaryTable, rotate_
from kernels.walk import ANY, MOST_ROWS
from tests.paged import Paged, attention_by_hand, lengths

CPU = torch.device("cpu")

# Sequences of how many queries walk, where something can.
some_walk = st.sampled_from([0, 1, MOST_ROWS, ANY] if native.kernels() is not None else [0])


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 65])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_linear_is_linear(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(48, 32).to(dtype), torch.randn(rows, 32).to(dtype)
    other, bias = torch.randn(rows, 48).to(dtype), torch.randn(48).to(dtype) if with_bias else None
    packed, expected = PackedLinear(weight, bias), F.linear(x, weight, bias)
    assert torch.equal(packed.plain(), weight)
    torch.testing.assert_close(packed(x), expected)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for ours, theirs in (
        (packed.silu(x), F.silu(expected)),
        (packed.add(x, other), expected + other),
        (packed.mul(x, other), expected * other),
    ):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_without_private_operators_linear_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packing_works", lambda: False)
    weight, x = torch.randn(8, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    packed = PackedLinear(weight)
    assert not packed.packed
    assert torch.equal(packed(x), F.linear(x, weight))


def test_buckets_are_few_and_close() -> None:
    assert [bucket(rows) for rows in (0, 1, 15, 16, 17, 33, 128, 129, 257, 2048)] == [
        0, 1, 15, 16, 32, 48, 128, 144, 288, 2048,
    ]  # fmt: skip
    assert all(rows <= bucket(rows) <= max(rows + 15, rows * 9 / 8) for rows in range(5000))
    assert len({bucket(rows) for rows in range(2049)}) < 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("in_c", [False, True])
def test_norm_and_rotary_round_as_transformers(
    dtype: torch.dtype, rows: int, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C too, but for the order of a norm's sum."""
    from transformers.models.mixtral import modeling_mixtral as theirs
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig

    if not in_c:
        monkeypatch.setattr(native, "kernels", lambda: None)
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 64).to(dtype) * 3, torch.rand(64).to(dtype) + 0.5
    norm = theirs.MixtralRMSNorm(64, eps=1e-5)
    norm.weight.data = weight
    if in_c:
        torch.testing.assert_close(
            rms_norm(x, weight, 1e-5), norm(x), rtol=1e-6 if dtype == torch.float32 else 0.01, atol=0
        )
    else:
        assert torch.equal(rms_norm(x, weight, 1e-5), norm(x))

    rope = {"rope_type": "default", "rope_theta": 777.0}
    config = MixtralConfig(hidden_size=128, num_attention_heads=4, head_dim=32, rope_parameters=rope)
    positions = torch.arange(rows) * 37
    cos, sin = theirs.MixtralRotaryEmbedding(config)(x, positions[None])
    q, k = torch.randn(1, 4, rows, 32).to(dtype), torch.randn(1, 2, rows, 32).to(dtype)
    expected = theirs.apply_rotary_pos_emb(q, k, cos, sin)
    table = RotaryTable(Rope(32, 777.0), 512, dtype, CPU)
    heads = torch.cat((q, k), dim=1)[0].transpose(0, 1).contiguous()
    padded = torch.cat((heads, heads), dim=1)
    rotate_(padded[:, :6], *table.at(positions))  # a view, as in the fused projection
    assert torch.equal(padded[:, :6].transpose(0, 1)[None], torch.cat(expected, dim=1))
    assert torch.equal(padded[:, 6:], heads)


def some_experts(count: int, dtype: torch.dtype, biases: bool) -> list[ExpertWeights]:
    shapes = ((24, 16), (24, 16), (16, 24), *(((24,), (24,), (16,)) if biases else ()))
    return [ExpertWeights(*(torch.randn(shape).to(dtype) / 4 for shape in shapes)) for _ in range(count)]


def by_hand(row: Tensor, weights: ExpertWeights, activation: str) -> Tensor:
    """In fp32, for experts with biases or without."""
    gate, up, down, *biases = (tensor.float() for tensor in weights.tensors())
    gate_bias, up_bias, down_bias = biases or (None, None, None)
    opened, gated = F.linear(row.float(), up, up_bias), F.linear(row.float(), gate, gate_bias)
    if activation == "silu":
        return F.linear(F.silu(gated) * opened, down, down_bias)
    gated, opened = gated.clamp(max=7), opened.clamp(-7, 7)
    return F.linear(gated * torch.sigmoid(1.702 * gated) * (opened + 1), down, down_bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 5, 0], [1, 0, 2], [4, 4, 4], [19, 0, 35]])
@pytest.mark.parametrize(("activation", "biases"), [("silu", False), ("silu", True), ("swiglu_oai", True)])
def test_experts_are_their_networks(
    counts: list[int], dtype: torch.dtype, activation: Activation, biases: bool
) -> None:
    torch.manual_seed(1)
    weights, rows = some_experts(len(counts), dtype, biases), 4 * torch.randn(sum(counts), 16).to(dtype)
    expected = torch.empty(rows.shape)
    for row, expert in enumerate(np.repeat(np.arange(3), counts)):
        expected[row] = by_hand(rows[row], weights[expert], activation)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    out, dense = make_experts(weights, activation)(rows, counts), make_mlp(weights[0], activation)(rows)
    assert out.dtype == dense.dtype == dtype and dense.shape == rows.shape
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dense[: counts[0]].float(), expected[: counts[0]], rtol=tolerance, atol=tolerance)


def test_clamped_activation_is_that_of_gpt_oss() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    theirs = GptOssExperts(GptOssConfig(num_local_experts=1))
    gate, up = torch.randn(2, 40, 24) * 9
    expected = theirs._apply_gate(torch.stack((gate, up), dim=-1).flatten(1))
    torch.testing.assert_close(swiglu_oai(gate, up), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biases", [False, True])
def test_experts_give_back_their_weights_and_move(dtype: torch.dtype, biases: bool) -> None:
    first, second, third = weights = some_experts(3, dtype, biases)
    experts = make_experts(weights[:2])
    for slot, original in enumerate(weights[:2]):
        pairs = zip(experts.weights(slot).tensors(), original.tensors(), strict=True)
        assert all(torch.equal(back, put) for back, put in pairs)
    rows, counts = torch.randn(12, 16).to(dtype), [3, 4, 5]
    moved = experts.rearranged([1, third, 0])
    assert torch.equal(moved(rows, counts), make_experts([second, third, first])(rows, counts))
    assert isinstance(moved, GroupedExperts) and isinstance(experts, GroupedExperts)
    assert moved.experts[0] is experts.experts[1], "not packed again"
    assert torch.equal(experts(rows, [6, 6]), make_experts(weights[:2])(rows, [6, 6])), "the old ones are as they were"
    fresh = make_experts([]).rearranged([third])
    assert torch.equal(fresh(rows, [12]), make_experts([third])(rows, [12]))
    assert experts.rearranged([])(rows[:0], []).shape == (0, 16)


@settings(max_examples=80, deadline=None)
@given(
    lengths,
    st.sampled_from([1, 4, 16]),
    st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    st.one_of(st.none(), st.integers(1, 50)),
    st.booleans(),
    st.sampled_from([None, 0.3]),
    st.sampled_from([8, 16, 80]),
    some_walk,
    st.integers(0, 2**31),
)
def test_paged_attention(
    sequences: list[tuple[int, int]],
    block_size: int,
    shape: tuple[int, int],
    window: int | None,
    with_sinks: bool,
    scale: float | None,
    dim: int,
    walks: int,
    seed: int,
) -> None:
    heads, kv_heads = shape
    paged = Paged(sequences, block_size, (2, kv_heads, dim), seed)
    queries, sinks = torch.randn(paged.num_rows, heads, dim), torch.randn(heads) if with_sinks else None
    kv = paged.new_rows()
    expected = attention_by_hand(queries, paged.rows, paged.seqlens_q, scale or dim**-0.5, window, sinks)
    qkv = torch.cat((queries, kv.flatten(1, 2)), dim=1)
    write_kv(paged.cache, paged.new_slots, kv.flatten(1))
    walks = walks if dim % 16 == 0 else 0
    plan = plan_attention(*paged.plan_arguments(), torch.float32, CPU, window=window, walks=walks)
    out = paged_attention(qkv, paged.cache, plan, heads, scale, sinks)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [63, 64, 65, 200])
def test_prompts_longer_than_their_window(length: int) -> None:
    """They are cut into pieces, each reading no more blocks than its window reaches."""
    paged = Paged([(0, length), (30, 1), (100, 70)], 4, (2, 1, 8), length)
    queries, kv = torch.randn(paged.num_rows, 2, 8), paged.new_rows()
    write_kv(paged.cache, paged.new_slots, kv.flatten(1))
    plan = plan_attention(*paged.plan_arguments(), torch.float32, CPU, window=5)
    for group in plan.groups:
        assert group.blocks is not None
        assert len(group.blocks) * 4 <= group.size * (group.max_q + 5 + 2 * 4)
    out = paged_attention(torch.cat((queries, kv.flatten(1, 2)), dim=1), paged.cache, plan, 2)
    torch.testing.assert_close(
        out, attention_by_hand(queries, paged.rows, paged.seqlens_q, 8**-0.5, 5), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("causal", [False, True])
def test_sinks_written_out(causal: bool) -> None:
    """What devices without the fused operator compute is the same."""
    queries, keys, values = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    sinks, mask = torch.randn(4, 1), torch.zeros(2, 1, 5, 5).masked_fill_(torch.rand(2, 1, 5, 5) < 0.3, -torch.inf)
    arguments = (queries, keys, values, None if causal else mask, 0.4, sinks)
    torch.testing.assert_close(attend_with_sinks(*arguments), attend(*arguments), rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    lengths,
    st.sampled_from([1, 4, 16]),
    st.integers(1, 3),
    st.one_of(st.none(), st.just(9)),
    some_walk,
    st.integers(0, 2**31),
)
def test_mla(
    sequences: list[tuple[int, int]], block_size: int, heads: int, window: int | None, walks: int, seed: int
) -> None:
    """Against keys and values expanded for every head."""
    rank, rope, nope, v_dim = 32, 16, 6, 5
    paged = Paged(sequences, block_size, (rank + rope,), seed)
    q_nope, q_rope = torch.randn(paged.num_rows, heads, nope), torch.randn(paged.num_rows, heads, rope)
    key_up, value_up = torch.randn(heads, nope, rank), torch.randn(heads, v_dim, rank)
    rows = paged.new_rows()
    expanded = []
    for latent, shared in (history.split((rank, rope), dim=1) for history in paged.rows):
        keys = torch.cat((torch.einsum("lr,hnr->lhn", latent, key_up), shared[:, None].expand(-1, heads, -1)), dim=2)
        values = F.pad(torch.einsum("lr,hvr->lhv", latent, value_up), (0, keys.shape[2] - v_dim))
        expanded.append(torch.stack((keys, values), dim=1))
    queries = torch.cat((q_nope, q_rope), dim=2)
    expected = attention_by_hand(queries, expanded, paged.seqlens_q, 0.2, window)
    expected = expected.view(*queries.shape)[:, :, :v_dim]
    write_kv(paged.cache, paged.new_slots, rows)
    plan = plan_attention(*paged.plan_arguments(), torch.float32, CPU, window=window, walks=walks)
    out = mla_attention(q_nope, q_rope, rows, paged.cache, plan, key_up, value_up, 0.2)
    torch.testing.assert_close(out, expected.flatten(1), rtol=1e-4, atol=1e-4)


@given(st.lists(st.integers(1, 5000), max_size=60), st.integers(0, 3000))
def test_decode_groups_bound_padding(lens: list[int], free: int) -> None:
    falling = np.sort(np.array(lens, np.int32))[::-1]
    groups = group_decodes(falling, free)
    assert [index for group in groups for index in range(len(lens))[group]] == list(range(len(lens)))
    for group in groups:
        members = falling[group]
        assert members[0] * len(members) <= 2 * members.sum() + free
    assert len(groups) <= 14  # log2(5000) and the last


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=30), st.integers(0, 3000))
def test_prefill_groups_bound_padding(pairs: list[tuple[int, int]], free: int) -> None:
    pairs.sort(reverse=True)
    lens_q, lens_k = [q for q, _ in pairs], [q + more for q, more in pairs]
    groups = group_by_length(lens_q, lens_k, free)
    assert [index for group in groups for index in group] == list(range(len(pairs)))
    for group in groups:
        padded = len(group) * max(lens_q[i] for i in group) * max(lens_k[i] for i in group)
        assert len(group) == 1 or padded <= 2 * sum(lens_q[i] * lens_k[i] for i in group) + free


def test_equal_decodes_need_no_index_operations() -> None:
    """The common case stays lean: one group, rows as they come."""
    tables = np.arange(1, 33, dtype=np.int32).reshape(8, 4)
    plan = plan_attention(np.ones(8, np.int32), np.arange(50, 58, dtype=np.int32), tables, 16, torch.float32, CPU)
    assert len(plan.groups) == 1
    assert plan.groups[0].query_rows is None
    assert plan.output_rows is None
