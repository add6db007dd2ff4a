"""Kernels against plain torch written for the eye."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import linear
from kernels.attention import group_by_length, group_decodes, paged_attention, plan_attention, write_kv
from kernels.experts import Expert, GroupedExperts
from kernels.linear import PackedLinear, bucket
from kernels.norm import rms_norm
from kernels.rotary import RotaryTable, rotate_

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 65])
def test_packed_linear_is_linear(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(48, 32).to(dtype), torch.randn(rows, 32).to(dtype)
    other = torch.randn(rows, 48).to(dtype)
    packed, expected = PackedLinear(weight), F.linear(x, weight)
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
def test_norm_and_rotary_round_as_transformers(dtype: torch.dtype, rows: int) -> None:
    from transformers.models.mixtral import modeling_mixtral as theirs
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig

    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 64).to(dtype) * 3, torch.rand(64).to(dtype) + 0.5
    norm = theirs.MixtralRMSNorm(64, eps=1e-5)
    norm.weight.data = weight
    assert torch.equal(rms_norm(x, weight, 1e-5), norm(x))

    rope = {"rope_type": "default", "rope_theta": 777.0}
    config = MixtralConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rope)
    positions = torch.arange(rows) * 37
    cos, sin = theirs.MixtralRotaryEmbedding(config)(x, positions[None])
    q, k = torch.randn(1, 4, rows, 16).to(dtype), torch.randn(1, 2, rows, 16).to(dtype)
    expected = theirs.apply_rotary_pos_emb(q, k, cos, sin)
    table = RotaryTable(16, 777.0, 512, dtype, CPU)
    heads = torch.cat((q, k), dim=1)[0].transpose(0, 1).contiguous()
    padded = torch.cat((heads, heads), dim=1)
    rotate_(padded[:, :6], *table.at(positions))  # a view, as in the fused projection
    assert torch.equal(padded[:, :6].transpose(0, 1)[None], torch.cat(expected, dim=1))
    assert torch.equal(padded[:, 6:], heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 5, 0], [1, 0, 2], [4, 4, 4], [19, 0, 35]])
def test_experts_are_their_networks(counts: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    shapes = ((24, 16), (24, 16), (16, 24))
    weights = [[torch.randn(shape).to(dtype) / 4 for shape in shapes] for _ in counts]
    rows = torch.randn(sum(counts), 16).to(dtype)
    experts = GroupedExperts([Expert(*map(PackedLinear, three)) for three in weights])
    expected = torch.empty_like(rows)
    for row, expert in enumerate(np.repeat(np.arange(3), counts)):
        gate, up, down = weights[expert]
        expected[row] = F.linear(F.silu(F.linear(rows[row], gate)) * F.linear(rows[row], up), down)
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(experts(rows, counts), expected, rtol=tolerance, atol=tolerance)


def attention_by_hand(qkv: Tensor, history: list[Tensor], seqlens_q: list[int], heads: int) -> Tensor:
    """history[s]: [context, 2 * kv_heads, D] of sequence s before this step."""
    kv_heads = (qkv.shape[1] - heads) // 2
    outputs, start = [], 0
    for old, count in zip(history, seqlens_q, strict=True):
        own = qkv[start : start + count]
        kv = torch.cat((old, own[:, heads:]))
        for row in range(count):
            seen = len(old) + row + 1
            for head in range(heads):
                key, value = kv[:seen, head * kv_heads // heads], kv[:seen, kv_heads + head * kv_heads // heads]
                scores = key @ own[row, head] / math.sqrt(qkv.shape[2])
                outputs.append(torch.softmax(scores, 0) @ value)
        start += count
    return torch.stack(outputs).view(len(qkv), -1) if outputs else qkv.new_empty(0, heads * qkv.shape[2])


lengths = st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), max_size=9)


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([1, 4, 16]), st.sampled_from([(4, 2), (3, 1), (2, 2)]), st.integers(0, 2**31))
def test_paged_attention(sequences: list[tuple[int, int]], block_size: int, shape: tuple[int, int], seed: int) -> None:
    """(context, new tokens) of each sequence; blocks in random order, every unowned slot full of rubbish."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    heads, kv_heads = shape
    seqlens_q = np.array([new for _, new in sequences], np.int32)
    seqlens_k = np.array([context + new for context, new in sequences], np.int32)
    widths = -(-seqlens_k // block_size)
    order = rng.permutation(int(widths.sum())) + 1
    cache = torch.randn(len(order) + 1, block_size, 2, kv_heads, 8) * 50
    tables = np.zeros((len(sequences), int(widths.max(initial=0))), np.int32)
    history, slots = [], []
    for row, (context, new) in enumerate(sequences):
        tables[row, : widths[row]], order = np.split(order, [widths[row]])
        at = np.arange(context + new)
        own = torch.from_numpy(tables[row, at // block_size] * np.int64(block_size) + at % block_size)
        history.append(torch.randn(context, 2 * kv_heads, 8))
        write_kv(cache, own[:context], history[-1].view(context, 2 * kv_heads * 8))
        slots.append(own[context:])
    qkv = torch.randn(int(seqlens_q.sum()), heads + 2 * kv_heads, 8)
    new_slots = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
    write_kv(cache, new_slots, qkv[:, heads:].reshape(-1, 2 * kv_heads * 8))
    plan = plan_attention(seqlens_q, seqlens_k, tables, block_size, torch.float32, CPU)
    expected = attention_by_hand(qkv, history, seqlens_q.tolist(), heads)
    torch.testing.assert_close(paged_attention(qkv, cache, plan, heads), expected, rtol=1e-4, atol=1e-4)


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
