"""Paged attention: queries of many sequences against keys and values that live in blocks.

    cache of a layer   [num_blocks, block_size, 2, kv_heads, head_dim]   (2: keys, values)
    slot               block * block_size + offset, one per token
    block table        the blocks of a sequence in order; unused entries are 0, the null block

A plan is made once per step and reused by every layer. It puts sequences of like lengths into groups, each one batched
operation, so that neither a Python loop over sequences nor one long sequence's padding is paid in every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# A group of its own costs about as much as this many padded (query, key) pairs of all heads.
FREE_PADDING = 2048


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
    """Groups of a step, and where each of the T rows lies in their joined padded outputs (None: as it is)."""

    groups: tuple[AttentionGroup, ...]
    output_rows: Tensor | None


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

    def __init__(self, seqlens_q: np.ndarray, seqlens_k: np.ndarray, tables: np.ndarray, block_size: int):
        self.seqlens_q, self.seqlens_k = seqlens_q.astype(np.int64), seqlens_k.astype(np.int64)
        self.tables, self.block_size = tables, block_size
        self.starts = np.cumsum(self.seqlens_q) - self.seqlens_q
        self.num_rows = int(self.seqlens_q.sum())
        self.output_rows = np.zeros(self.num_rows, np.int64)
        self.num_outputs = 0
        self.groups: list[AttentionGroup] = []

    def add(self, members: np.ndarray, cached: bool, device: torch.device, dtype: torch.dtype) -> None:
        """One group of the sequences `members`; `cached`: read keys from blocks instead of from this step's rows."""
        lens_q, lens_k = self.seqlens_q[members], self.seqlens_k[members]
        size, max_q = len(members), int(lens_q.max())
        offsets = np.arange(max_q)
        real = offsets < lens_q[:, None]
        rows = np.where(real, self.starts[members][:, None] + offsets, 0)
        self.output_rows[rows[real]] = self.num_outputs + np.flatnonzero(real)
        self.num_outputs += size * max_q
        everything = real.all() and np.array_equal(rows.ravel(), np.arange(self.num_rows))
        blocks = mask = None
        if cached:
            width = -(-int(lens_k.max()) // self.block_size)
            blocks = torch.from_numpy(self.tables[members, :width].astype(np.int64).ravel()).to(device)
            last_key = (lens_k - lens_q)[:, None] + offsets  # the key at the query's own position
            hidden = np.arange(width * self.block_size) > last_key[:, :, None]
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
            mask = mask.unsqueeze(1).to(device)
        query_rows = None if everything else torch.from_numpy(rows.ravel()).to(device)
        self.groups.append(AttentionGroup(size, max_q, query_rows, blocks, mask))

    def plan(self, device: torch.device) -> AttentionPlan:
        in_order = self.num_outputs == self.num_rows and np.array_equal(self.output_rows, np.arange(self.num_rows))
        rows = None if in_order else torch.from_numpy(self.output_rows).to(device)
        return AttentionPlan(tuple(self.groups), rows)


def plan_attention(
    seqlens_q: np.ndarray,
    seqlens_k: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Group B sequences. seqlens_q, seqlens_k: int [B], 1 <= q <= k; block_tables: int [B, >= longest in blocks]."""
    planner = _Planner(seqlens_q, seqlens_k, block_tables, block_size)
    decodes = np.flatnonzero((seqlens_q == 1) & (seqlens_k > 1))
    whole = np.flatnonzero(seqlens_q == seqlens_k)
    chunks = np.flatnonzero((seqlens_q != 1) & (seqlens_q != seqlens_k))
    order = np.argsort(-seqlens_k[decodes], kind="stable")
    runs = group_decodes(seqlens_k[decodes][order])
    for run in runs:
        members = decodes if len(runs) == 1 else decodes[order[run]]
        planner.add(members, True, device, dtype)
    for kind, cached in ((whole, False), (chunks, True)):
        if len(kind):
            kind = kind[np.lexsort((-seqlens_k[kind], -seqlens_q[kind]))]
            lens_q, lens_k = seqlens_q[kind].tolist(), seqlens_k[kind].tolist()
            for members_at in group_by_length(lens_q, lens_k):
                planner.add(np.sort(kind[members_at]), cached, device, dtype)
    return planner.plan(device)


def write_kv(cache: Tensor, slots: Tensor, kv: Tensor) -> None:
    """Put keys and values kv [T, 2 * kv_heads * head_dim] of this step into their slots (int64 [T])."""
    cache.view(-1, kv.shape[1]).index_copy_(0, slots, kv)


def paged_attention(qkv: Tensor, cache: Tensor, plan: AttentionPlan, num_heads: int) -> Tensor:
    """Causal attention of T rows, whose own keys and values are already written to the cache.

    qkv: [T, num_heads + 2 * kv_heads, head_dim], positions applied. Returns [T, num_heads * head_dim].
    Query head h reads key head h // (num_heads / kv_heads); scores are scaled by head_dim ** -0.5.
    """
    heads, head_dim = qkv.shape[1:]
    kv_heads = (heads - num_heads) // 2
    outputs = []
    for group in plan.groups:
        rows = qkv if group.query_rows is None else qkv.index_select(0, group.query_rows)
        rows = rows.view(group.size, group.max_q, heads, head_dim)
        if group.blocks is None:
            kv = rows[:, :, num_heads:].unflatten(2, (2, kv_heads))
        else:
            kv = cache.index_select(0, group.blocks).view(group.size, -1, 2, kv_heads, head_dim)
        keys, values = kv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(
            rows[:, :, :num_heads].transpose(1, 2),
            keys,
            values,
            attn_mask=group.mask,
            is_causal=group.mask is None,
            enable_gqa=True,
        )
        outputs.append(out.transpose(1, 2).reshape(group.size * group.max_q, num_heads * head_dim))
    if not outputs:
        return qkv.new_empty(0, num_heads * head_dim)
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if plan.output_rows is None else joined.index_select(0, plan.output_rows)
