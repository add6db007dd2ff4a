"""Paged attention: queries of many sequences against keys and values that live in blocks.

    cache of a layer   [num_blocks, block_size, 2, kv_heads, head_dim]   (2: keys, values)
    slot               block * block_size + offset, one per token
    block table        the blocks of a sequence in order; unused entries are 0, the null block

A plan is made once per step and reused by every layer. It puts sequences of like lengths into groups, each one batched
operation, so that neither a Python loop over sequences nor one long sequence's padding is paid in every layer.

With a sliding window the query at position p sees keys p - window + 1 to p. Only blocks that hold such keys are read,
and prompts longer than the window are cut into pieces, so that the work grows with the window, not with the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import rows as row_kernels
from kernels.tiled_attention import Tiles, make_tiles, tiled_attention
from kernels.walk import KeysAndValues, Walk, make_walk, walk_attention

# A group of its own costs about as much as this many padded (query, key) pairs of all heads.
FREE_PADDING = 2048

# Queries of one piece of a prompt that is longer than its window: at least these, so that operations stay large.
MIN_PIECE = 64


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """G sequences, padded to Lq queries each.

    query_rows: int64 [G * Lq] rows of the batch, None when these are just all rows in order.
    blocks: int64 [G * W] blocks to read; None when all keys are rows of this very step (causal, nothing cached before).
    mask: additive [G, 1, Lq, W * block_size], with `blocks` only.
    """

    size: int
    max_q: int
    query_rows: Tensor | None
    blocks: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Groups of a step, and where each of the T rows lies in the outputs of the walk, if there is one, and theirs,
    padded (None: as it is). A batch invariant plan is a walk of all rows, or has tiles instead."""

    groups: tuple[AttentionGroup, ...]
    output_rows: Tensor | None
    walk: Walk | None = None
    tiles: Tiles | None = None
    invariant: bool = False


def group_by_length(lengths_q: Sequence[int], lengths_k: Sequence[int], free: int = FREE_PADDING) -> list[list[int]]:
    """Cut sequences, given in an order of falling lengths, into runs whose padded area stays within twice the real one
    plus `free`. Returns lists of indices into the arguments."""
    groups: list[list[int]] = []
    area = max_q = max_k = 0
    for index, (q, k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        grown_q, grown_k, grown = max(max_q, q), max(max_k, k), area + q * k
        if groups and grown_q * grown_k * (len(groups[-1]) + 1) <= 2 * grown + free:
            groups[-1].append(index)
            area, max_q, max_k = grown, grown_q, grown_k
        else:
            groups.append([index])
            area, max_q, max_k = q * k, q, k
    return groups


def group_decodes(lengths_k: np.ndarray, free: int = FREE_PADDING) -> list[slice]:
    """The same for one query each, lengths falling, in a number of Python steps that grows with log(longest) only."""
    groups = []
    start, total = 0, len(lengths_k)
    while start < total:
        longest = int(lengths_k[start])
        rest = lengths_k[start:]
        end = start + int(np.searchsorted(-rest, -(longest / 2), side="left"))  # more than half as long as the first
        if longest * len(rest) - int(rest.sum()) <= free:
            end = total
        groups.append(slice(start, max(end, start + 1)))
        start = groups[-1].stop
    return groups


class _Planner:
    """Collects groups and the place of each row in their joined outputs."""

    def __init__(
        self,
        seqlens_q: np.ndarray,
        seqlens_k: np.ndarray,
        tables: np.ndarray,
        block_size: int,
        window: int | None,
    ):
        self.seqlens_q, self.seqlens_k = seqlens_q.astype(np.int64), seqlens_k.astype(np.int64)
        self.tables, self.block_size, self.window = tables, block_size, window
        self.starts = np.cumsum(self.seqlens_q) - self.seqlens_q
        self.first_block = np.zeros_like(self.seqlens_k)
        if window is not None:
            self.first_block = np.maximum(self.seqlens_k - self.seqlens_q - window + 1, 0) // block_size
        self.reach = self.seqlens_k - self.first_block * block_size  # keys to read
        self.num_rows = int(self.seqlens_q.sum())
        self.output_rows = np.zeros(self.num_rows, np.int64)
        self.num_outputs = 0
        self.groups: list[AttentionGroup] = []
        self.walk: Walk | None = None

    def walk_all(self, members: np.ndarray) -> None:
        """The queries of the sequences `members` walk. Before any group."""
        if len(members):
            self.walk = make_walk(members, self.seqlens_q, self.seqlens_k, self.tables, self.window)
            self.num_outputs = len(self.walk.rows)
            self.output_rows[self.walk.rows] = np.arange(self.num_outputs)

    def add(self, members: np.ndarray, cached: bool, device: torch.device, dtype: torch.dtype) -> None:
        """One group of the sequences `members`; `cached`: read keys from blocks instead of from this step's rows."""
        lens_q = self.seqlens_q[members]
        size, max_q = len(members), int(lens_q.max())
        offsets = np.arange(max_q)
        real = offsets < lens_q[:, None]
        rows = np.where(real, self.starts[members][:, None] + offsets, 0)
        self.output_rows[rows[real]] = self.num_outputs + np.flatnonzero(real)
        self.num_outputs += size * max_q
        everything = real.all() and np.array_equal(rows.ravel(), np.arange(self.num_rows))
        blocks = mask = None
        if cached:
            width = -(-int(self.reach[members].max()) // self.block_size)
            blocks = torch.from_numpy(self._blocks(members, width).ravel()).to(device)
            hidden = self._hidden(members, offsets, width)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
            mask = mask.unsqueeze(1).to(device)
        query_rows = None if everything else torch.from_numpy(rows.ravel()).to(device)
        self.groups.append(AttentionGroup(size, max_q, query_rows, blocks, mask))

    def plan(self, device: torch.device) -> AttentionPlan:
        in_order = self.num_outputs == self.num_rows and np.array_equal(self.output_rows, np.arange(self.num_rows))
        rows = None if in_order else torch.from_numpy(self.output_rows).to(device)
        return AttentionPlan(tuple(self.groups), rows, self.walk)

    def _blocks(self, members: np.ndarray, width: int) -> np.ndarray:
        """The `width` blocks from each member's first on, int64 [G, width]; the null block behind the table's end."""
        if self.window is None:
            return self.tables[members, :width].astype(np.int64)
        at = self.first_block[members][:, None] + np.arange(width)
        inside = at < self.tables.shape[1]
        return np.where(inside, self.tables[members[:, None], np.where(inside, at, 0)], 0).astype(np.int64)

    def _hidden(self, members: np.ndarray, offsets: np.ndarray, width: int) -> np.ndarray:
        """Which of the keys in these blocks each query may not see, [G, Lq, width * block_size]."""
        context = self.seqlens_k[members] - self.seqlens_q[members] - self.first_block[members] * self.block_size
        own = (context[:, None] + offsets)[:, :, None]  # the key at the query's own position
        keys = np.arange(width * self.block_size)
        if self.window is None:
            return keys > own
        return (keys > own) | (keys <= own - self.window)


def _cut(
    seqlens_q: np.ndarray, seqlens_k: np.ndarray, tables: np.ndarray, piece: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same rows as sequences of at most `piece` queries."""
    pieces = -(-seqlens_q // piece)
    if not (pieces > 1).any():
        return seqlens_q, seqlens_k, tables
    source = np.repeat(np.arange(len(pieces)), pieces)
    number = np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    lens_q = np.minimum(seqlens_q[source] - number * piece, piece)
    lens_k = (seqlens_k - seqlens_q)[source] + number * piece + lens_q
    return lens_q, lens_k, tables[source]


def plan_attention(
    seqlens_q: np.ndarray,
    seqlens_k: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
    invariant: bool = False,
    walks: int = 0,
) -> AttentionPlan:
    """Group B sequences. seqlens_q, seqlens_k: int [B], 1 <= q <= k; block_tables: int [B, >= longest in blocks].

    window: how many keys a query sees at most, its own included (at least 1); None for all before it.
    invariant: each query's result has the same bits whatever the others are and however its prompt is cut.
    walks: sequences with at most so many queries walk (`kernels.walk.most_queries`); any number of invariant ones,
    unless it is 0.
    """
    if invariant:
        if walks:
            planner = _Planner(seqlens_q, seqlens_k, block_tables, block_size, window)
            planner.walk_all(np.arange(len(seqlens_q)))
            return replace(planner.plan(device), invariant=True)
        tiles = make_tiles(seqlens_q, seqlens_k, block_tables, block_size, device, window)
        return AttentionPlan((), None, tiles=tiles, invariant=True)
    if window is not None and (seqlens_q > walks).any():
        seqlens_q, seqlens_k, block_tables = _cut(seqlens_q, seqlens_k, block_tables, max(window, MIN_PIECE))
    planner = _Planner(seqlens_q, seqlens_k, block_tables, block_size, window)
    few = seqlens_q <= walks
    planner.walk_all(np.flatnonzero(few))
    own_rows = (seqlens_q == seqlens_k) & (True if window is None else seqlens_k <= window)
    decodes = np.flatnonzero((seqlens_q == 1) & ~own_rows & ~few)
    whole = np.flatnonzero(own_rows & ~few)
    chunks = np.flatnonzero((seqlens_q != 1) & ~own_rows & ~few)
    order = np.argsort(-planner.reach[decodes], kind="stable")
    runs = group_decodes(planner.reach[decodes][order])
    for run in runs:
        members = decodes if len(runs) == 1 else decodes[order[run]]
        planner.add(members, True, device, dtype)
    for kind, cached in ((whole, False), (chunks, True)):
        if len(kind):
            kind = kind[np.lexsort((-planner.reach[kind], -seqlens_q[kind]))]
            lens_q, lens_k = seqlens_q[kind].tolist(), planner.reach[kind].tolist()
            for members_at in group_by_length(lens_q, lens_k):
                planner.add(np.sort(kind[members_at]), cached, device, dtype)
    return planner.plan(device)


def write_kv(cache: Tensor, slots: Tensor, kv: Tensor) -> None:
    """Put the rows [T, W] of this step, keys and values or latents, into their slots (int64 [T]) of the cache."""
    if row_kernels.usable(kv, cache, step=1):
        row_kernels.put(cache, slots, kv)
    else:
        cache.view(-1, kv.shape[1]).index_copy_(0, slots, kv)


def paged_attention(
    qkv: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    num_heads: int,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of T rows, whose own keys and values are already written to the cache.

    qkv: [T, num_heads + 2 * kv_heads, head_dim], positions applied. Returns [T, num_heads * head_dim].
    Query head h reads key head h // (num_heads / kv_heads). scale: of the scores, head_dim ** -0.5 unless given.
    sinks: [num_heads], for each head the score of one more key whose value is zero.
    """
    heads, head_dim = qkv.shape[1:]
    kv_heads = (heads - num_heads) // 2
    if plan.tiles is not None and len(qkv):
        return _invariant(qkv, cache, plan.tiles, num_heads, scale or head_dim**-0.5, sinks)
    outputs = []
    if plan.walk is not None:
        where = KeysAndValues(kv_heads, head_dim, kv_heads * head_dim)
        walked = walk_attention(qkv[:, :num_heads], cache, plan.walk, where, scale or head_dim**-0.5, sinks)
        outputs.append(walked.flatten(1))
    for group in plan.groups:
        rows = qkv if group.query_rows is None else qkv.index_select(0, group.query_rows)
        rows = rows.view(group.size, group.max_q, heads, head_dim)
        if group.blocks is None:
            kv = rows[:, :, num_heads:].unflatten(2, (2, kv_heads))
        else:
            kv = cache.index_select(0, group.blocks).view(group.size, -1, 2, kv_heads, head_dim)
        keys, values = kv.permute(2, 0, 3, 1, 4).unbind(0)
        queries, mask = rows[:, :, :num_heads].transpose(1, 2), group.mask
        if group.max_q == 1 and mask is not None:  # the heads that share keys are the rows of one product
            queries = queries.reshape(group.size, kv_heads, -1, head_dim)
            mask = mask.expand(-1, -1, queries.shape[2], -1)
        out = attend(queries, keys, values, mask, scale, None if sinks is None else sinks.view(queries.shape[1], -1))
        by_head = out.reshape(group.size, num_heads, group.max_q, head_dim)
        outputs.append(by_head.transpose(1, 2).reshape(group.size * group.max_q, num_heads * head_dim))
    return join(outputs, plan, qkv.new_empty(0, num_heads * head_dim))


def _invariant(qkv: Tensor, cache: Tensor, tiles: Tiles, num_heads: int, scale: float, sinks: Tensor | None) -> Tensor:
    kv_heads, head_dim = cache.shape[3:]
    shape = (-1, tiles.keys_per_tile, *cache.shape[2:])

    def load(blocks: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = cache.index_select(0, blocks).view(shape).permute(2, 0, 3, 1, 4).float().unbind(0)
        return keys, values

    queries = qkv[:, :num_heads].unflatten(1, (kv_heads, -1))
    return tiled_attention(queries, load, tiles, head_dim, scale, sinks).flatten(1).to(qkv.dtype)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """queries [G, heads, Lq, D], keys and values [G, kv_heads, Lk, D] -> [G, heads, Lq, D].

    mask: additive, broadcast to [G, heads, Lq, Lk]; None: causal with Lq == Lk. sinks: [heads, Lq or 1].
    """
    if sinks is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    if queries.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        share = torch.sigmoid(logsumexp - sinks.float()).unsqueeze(-1)  # of all but the sink
        return (out * share).to(out.dtype)
    return attend_with_sinks(queries, keys, values, mask, scale, sinks)


def attend_with_sinks(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor
) -> Tensor:
    """`attend` written out, for devices whose fused attention does not tell the denominator."""
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = (queries @ keys.transpose(2, 3)).float() * (queries.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None:
        mask = scores.new_full(scores.shape[2:], -torch.inf).triu_(1)
    sink = sinks.float().unsqueeze(-1).expand(*scores.shape[:3], 1)
    shares = torch.softmax(torch.cat((scores + mask, sink), dim=-1), dim=-1)[..., :-1]
    return shares.to(values.dtype) @ values


def join(outputs: list[Tensor], plan: AttentionPlan, nothing: Tensor) -> Tensor:
    """The outputs of walk and groups, rows first, as rows of the batch."""
    if not outputs:
        return nothing
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if plan.output_rows is None else joined.index_select(0, plan.output_rows)
