"""Walking attention in C: long contexts, bf16, many heads; where it is used, and where not."""

import numpy as np
import pytest
import torch

from kernels import native, walk
from kernels.attention import AttentionPlan, paged_attention, plan_attention, write_kv
from kernels.walk import ANY, MOST_ROWS, KeysAndValues, make_walk, walk_attention
from tests.paged import Paged, attention_by_hand

CPU = torch.device("cpu")
TILE = 64

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(native.kernels() is None, reason="no fitting CPU or no C compiler on this machine")


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, TILE, TILE + 1, 100])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 96), (8, 1, 128), (200, 2, 32)])
def test_long_contexts(dtype: torch.dtype, window: int | None, shape: tuple[int, int, int]) -> None:
    """Ends on, before and behind the borders of tiles; few and many queries, more heads than walk together."""
    heads, kv_heads, dim = shape
    sequences = [(TILE - 1, 1), (TILE, 1), (3 * TILE, TILE + 9), (0, 2 * TILE), (200, 1), (5, MOST_ROWS + 1)]
    paged = Paged(sequences, 16, (2, kv_heads, dim), dim)
    paged.cache, paged.rows = paged.cache.to(dtype), [rows.to(dtype) for rows in paged.rows]
    kv = paged.new_rows()
    qkv = torch.cat((torch.randn(paged.num_rows, heads, dim).to(dtype), kv.flatten(1, 2)), dim=1)
    write_kv(paged.cache, paged.new_slots, kv.flatten(1))
    sinks = torch.randn(heads)
    plan = plan_attention(*paged.plan_arguments(), dtype, CPU, window=window, walks=ANY)
    assert plan.walk is not None and not plan.groups
    out = paged_attention(qkv, paged.cache, plan, heads, sinks=sinks)
    wide = qkv[:, :heads].float(), [rows.float() for rows in paged.rows]
    expected = attention_by_hand(*wide, paged.seqlens_q, dim**-0.5, window, sinks)
    assert out.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(out, expected.bfloat16(), rtol=0.01, atol=2e-3)


@needs_kernels
@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("where", [KeysAndValues(3, 32, 96), KeysAndValues(1, 16, 0)])
@pytest.mark.parametrize("counts", [[1], [1, 1], [30, 1], [9, 9, 9, 9, 9, 9, 9, 9]])
def test_threads_share_walks_or_heads(threads: int, where: KeysAndValues, counts: list[int]) -> None:
    """Values beside keys, and as parts of them. Bits stay."""
    torch.manual_seed(threads)
    lens_q = np.array(counts)
    lens_k, tables = lens_q + 100, np.arange(9 * len(counts), dtype=np.int32).reshape(-1, 9)
    cache = torch.randn(tables.size, 16, 2 if where.value_offset else 1, where.kv_heads, 32)
    queries = torch.randn(sum(counts), 9, 32)
    some = make_walk(np.arange(len(counts)), lens_q, lens_k, tables, None)
    expected = walk_attention(queries, cache, some, where, 0.2)
    torch.set_num_threads(threads)
    for _ in range(20):
        assert torch.equal(walk_attention(queries, cache, some, where, 0.2), expected)


@needs_kernels
def test_scores_far_apart() -> None:
    """A key that outweighs all others by e^600, first and last; no key that is not there counts."""
    keys = torch.zeros(100, 1, 2, 1, 16)
    keys[:, 0, 1] = torch.arange(100.0).view(-1, 1, 1)
    table = np.arange(100, dtype=np.int32)[None]
    where = KeysAndValues(1, 16, 16)
    for best in (0, 63, 64, 98):
        keys[:, 0, 0] = -300 / 16
        keys[best, 0, 0] = 300 / 16
        one = make_walk(np.array([0]), np.array([1]), np.array([99]), table, None)
        found = walk_attention(torch.ones(1, 1, 16), keys, one, where, 1.0)
        torch.testing.assert_close(found, torch.full_like(found, best), rtol=0, atol=1e-30)


def plan_of(walks: int, invariant: bool = False) -> AttentionPlan:
    """Of a decode step's sequence, one with some drafts, and a prompt."""
    seqlens_q, seqlens_k = np.array([1, 5, 40], np.int32), np.array([30, 20, 40], np.int32)
    tables = 1 + np.arange(9, dtype=np.int32).reshape(3, 3)
    return plan_attention(seqlens_q, seqlens_k, tables, 16, torch.float32, CPU, None, invariant, walks)


def test_who_walks() -> None:
    assert plan_of(0).walk is None
    few, everyone = plan_of(MOST_ROWS), plan_of(ANY)
    assert few.walk is not None and few.walk.rows.tolist() == list(range(6)) and len(few.groups) == 1
    assert few.walk.sequences.tolist() == [0, 1, 1, 1, 1, 1]
    assert few.walk.positions.tolist() == [29, 15, 16, 17, 18, 19]
    assert everyone.walk is not None and not everyone.groups and everyone.output_rows is None
    for walks in (1, ANY):
        fixed = plan_of(walks, invariant=True)
        assert fixed.walk is not None and len(fixed.walk.rows) == 46 and fixed.invariant
    assert plan_of(0, invariant=True).tiles is not None


@needs_kernels
def test_where_it_walks() -> None:
    assert walk.most_queries(torch.bfloat16, CPU, 9, 64, 64) == ANY
    assert walk.most_queries(torch.float32, CPU, 9, 64, 64) == MOST_ROWS
    assert walk.most_queries(torch.bfloat16, CPU, 16, 576, 512) == MOST_ROWS, "values are parts of keys"
    assert walk.most_queries(torch.bfloat16, CPU, 9, 80, 80) == 0
    assert walk.most_queries(torch.float32, CPU, 9, 80, 80) == MOST_ROWS
    assert walk.most_queries(torch.float16, CPU, 9, 64, 64) == 0
    assert walk.most_queries(torch.bfloat16, torch.device("meta"), 9, 64, 64) == 0


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: None)
    assert walk.most_queries(torch.bfloat16, CPU, 9, 64, 64) == 0
