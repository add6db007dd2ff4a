"""Multi-head latent attention over a paged cache of compressed rows.

    cache of a layer   [num_blocks, block_size, rank + rope]
    row                the normed latent [rank], then the rotated key part [rope] that all heads share

Slots, blocks and plans are those of kernels/attention.py. Where keys come from the cache, nothing is expanded: queries
go into the latent space (`q_nope @ key_up`), where the row itself is key and value of every head, and come back
through `value_up`. Whole prompts, whose every row is new, are cheaper with keys and values expanded once.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import invariance
from kernels.attention import AttentionGroup, AttentionPlan, attend, join
from kernels.invariance import FixedRows
from kernels.tiled_attention import Tiles, tiled_attention
from kernels.walk import KeysAndValues, Walk, walk_attention


def mla_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    key_up: Tensor,
    value_up: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of T rows that are already written to the cache.

    q_nope [T, heads, nope], q_rope [T, heads, rope] with positions applied; rows [T, rank + rope];
    key_up [heads, nope, rank] and value_up [heads, v, rank] from the latent to each head. Returns [T, heads * v].
    """
    num_heads, v_dim = value_up.shape[:2]
    if plan.invariant and len(rows):
        return _invariant(q_nope, q_rope, cache, plan, key_up, value_up, scale).flatten(1)
    outputs = []
    if plan.walk is not None:
        outputs.append(_walked(q_nope, q_rope, cache, plan.walk, key_up, value_up, scale).flatten(1))
    for group in plan.groups:
        queries = _of_group(q_nope, group), _of_group(q_rope, group)
        if group.blocks is None:
            out = _expanded(*queries, _of_group(rows, group), key_up, value_up, scale)
        else:
            keys = cache.index_select(0, group.blocks).view(group.size, -1, cache.shape[-1])
            out = _absorbed(*queries, keys, group, key_up, value_up, scale)
        outputs.append(out.reshape(group.size * group.max_q, num_heads * v_dim))
    return join(outputs, plan, q_nope.new_empty(0, num_heads * v_dim))


def _of_group(x: Tensor, group: AttentionGroup) -> Tensor:
    """Rows x [T, ...] of a group, [G, Lq, ...]"""
    chosen = x if group.query_rows is None else x.index_select(0, group.query_rows)
    return chosen.view(group.size, group.max_q, *x.shape[1:])


def _absorbed(
    q_nope: Tensor,
    q_rope: Tensor,
    keys: Tensor,
    group: AttentionGroup,
    key_up: Tensor,
    value_up: Tensor,
    scale: float,
) -> Tensor:
    """q_nope [G, Lq, heads, nope], q_rope [G, Lq, heads, rope], keys [G, Lk, rank + rope] -> [G, Lq, heads, v]"""
    rank = key_up.shape[2]
    queries = torch.cat((_into_latent(q_nope, key_up), q_rope), dim=-1)
    shared = keys.unsqueeze(1)
    assert group.mask is not None
    if group.max_q == 1:  # heads are the rows of one product
        mask = group.mask.expand(-1, -1, queries.shape[2], -1)
        latent = attend(queries.transpose(1, 2).flatten(1, 2).unsqueeze(1), shared, shared, mask, scale)
    else:
        latent = attend(queries.transpose(1, 2), shared, shared, group.mask, scale).transpose(1, 2)
    latent = latent.reshape(*queries.shape)[..., :rank]
    return _out_of_latent(latent, value_up)


def _expanded(q_nope: Tensor, q_rope: Tensor, rows: Tensor, key_up: Tensor, value_up: Tensor, scale: float) -> Tensor:
    """q_nope [G, L, heads, nope], q_rope [G, L, heads, rope], rows [G, L, rank + rope] -> [G, L, heads, v]"""
    num_heads, v_dim, rank = value_up.shape
    latent, rope = rows.split((rank, rows.shape[-1] - rank), dim=-1)
    keys = torch.cat(
        (torch.einsum("glr,hnr->ghln", latent, key_up), rope.unsqueeze(1).expand(-1, num_heads, -1, -1)), dim=-1
    )
    values = torch.einsum("glr,hvr->ghlv", latent, value_up)
    queries = torch.cat((q_nope, q_rope), dim=-1).transpose(1, 2)
    width = max(keys.shape[-1], v_dim)  # fused attention wants keys and values equally wide; zeros change nothing
    queries, keys, values = (F.pad(x, (0, width - x.shape[-1])) for x in (queries, keys, values))
    return attend(queries, keys, values, None, scale)[..., :v_dim].transpose(1, 2)


def _walked(
    q_nope: Tensor, q_rope: Tensor, cache: Tensor, walk: Walk, key_up: Tensor, value_up: Tensor, scale: float
) -> Tensor:
    """q_nope [T, heads, nope], q_rope [T, heads, rope] -> [n, heads, v] for the n of the walk"""
    if len(walk.rows) < len(q_nope):
        rows = torch.from_numpy(walk.rows)
        q_nope, q_rope = q_nope.index_select(0, rows), q_rope.index_select(0, rows)
        walk = walk.in_order
    queries = torch.cat((_into_latent(q_nope, key_up), q_rope), dim=-1)
    return _out_of_latent(walk_attention(queries, cache, walk, _latents(key_up), scale), value_up)


def _latents(key_up: Tensor) -> KeysAndValues:
    return KeysAndValues(1, key_up.shape[2], 0)


def _invariant(
    q_nope: Tensor, q_rope: Tensor, cache: Tensor, plan: AttentionPlan, key_up: Tensor, value_up: Tensor, scale: float
) -> Tensor:
    """q_nope [T, heads, nope], q_rope [T, heads, rope] -> [T, heads, v]"""
    absorb, restore = _proved(key_up.shape, value_up.shape, key_up.dtype, key_up.device, torch.get_num_threads())
    queries = torch.cat((absorb(lambda x: _into_latent(x, key_up), q_nope), q_rope), dim=-1)
    if plan.walk is not None:
        latent = walk_attention(queries, cache, plan.walk, _latents(key_up), scale)
    else:
        assert plan.tiles is not None
        latent = _tiled(queries, cache, plan.tiles, key_up.shape[2], scale)
    return restore(lambda x: _out_of_latent(x, value_up), latent)


def _tiled(queries: Tensor, cache: Tensor, tiles: Tiles, rank: int, scale: float) -> Tensor:
    """queries [T, heads, rank + rope] -> [T, heads, rank]"""

    def load(blocks: Tensor) -> tuple[Tensor, Tensor]:
        keys = cache.index_select(0, blocks).view(-1, 1, tiles.keys_per_tile, cache.shape[-1]).float()
        return keys, keys[..., :rank].contiguous()

    return tiled_attention(queries.unsqueeze(1), load, tiles, rank, scale).squeeze(1).to(queries.dtype)


def _into_latent(q_nope: Tensor, key_up: Tensor) -> Tensor:
    """[..., heads, nope] -> [..., heads, rank]"""
    return torch.einsum("...hn,hnr->...hr", q_nope, key_up)


def _out_of_latent(latent: Tensor, value_up: Tensor) -> Tensor:
    """[..., heads, rank] -> [..., heads, v]"""
    return torch.einsum("...hr,hvr->...hv", latent, value_up)


@cache
def _proved(
    key_up: torch.Size, value_up: torch.Size, dtype: torch.dtype, device: torch.device, threads: int
) -> tuple[FixedRows, FixedRows]:
    """Rows in which to go into the latent space and out of it; `threads` is only part of the key."""
    heads, nope, rank = key_up
    v_dim = value_up[1]
    most = invariance.MOST_WORK // (heads * rank * max(nope, v_dim))
    q_nope, up = invariance.cancelling(nope, rank, dtype, device)
    latent, down = invariance.cancelling(rank, v_dim, dtype, device)
    every_head = up.T.expand(heads, -1, -1).contiguous(), down.expand(heads, -1, -1).contiguous()
    return (
        invariance.prove(lambda x: _into_latent(x, every_head[0]), _for_heads(q_nope, heads), most=most),
        invariance.prove(lambda x: _out_of_latent(x, every_head[1]), _for_heads(latent, heads), most=most),
    )


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """x [N, D] for every head, [N, heads, D]"""
    return x.unsqueeze(1).expand(-1, heads, -1).contiguous()
