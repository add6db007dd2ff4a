"""Batch-invariant attention: a query's result depends on its own keys alone, bit for bit.

Keys are taken in tiles of whole blocks, counted from the sequence's first, and tiles are added up in order by an online
softmax in fp32. Neither the other queries nor how a prompt was cut into chunks changes what is added to what: a tile
that a query may not see adds zeros. Queries are computed in items of a fixed number of rows of one sequence, and the
products of an item in numbers of rows that were proved to give the same bits (kernels/invariance.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import invariance
from kernels.invariance import FixedRows

# Keys of a tile, at least: whole blocks.
TILE_KEYS = 128

# Queries of an item. A prompt is cut into the largest; one query alone is an item too.
ITEM_ROWS = (64, 16, 1)


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Items of `rows` queries each, those that see most tiles first.

    query_rows: int64 [n * rows] rows of the batch, any row where an item has fewer.
    own: int32 [n, rows] the key at the query's own position, counted from the item's first tile; -1 without a query.
    blocks: for each step, the next tile of the items that have one (always the first so many): int64 [items * blocks].
    """

    rows: int
    query_rows: Tensor
    own: Tensor
    blocks: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """What all layers of a step share. output_rows: where each of the T rows lies in the groups' joined items."""

    groups: tuple[TileGroup, ...]
    output_rows: Tensor
    keys_per_tile: int
    window: int | None


@dataclass(frozen=True, slots=True)
class _Items:
    """Runs of queries: whose, from which row and position on, how many; and the tiles they see."""

    sequence: np.ndarray
    row: np.ndarray
    position: np.ndarray
    count: np.ndarray
    first_tile: np.ndarray
    num_tiles: np.ndarray

    def sorted(self) -> "_Items":
        """Those with most tiles first."""
        order = np.argsort(-self.num_tiles, kind="stable")
        return _Items(*(getattr(self, name)[order] for name in self.__slots__))


class _Planner:
    """Cuts queries into items and collects the groups."""

    def __init__(self, seqlens_q: np.ndarray, seqlens_k: np.ndarray, block_tables: np.ndarray, block_size: int):
        self.seqlens_q, self.context = seqlens_q.astype(np.int64), (seqlens_k - seqlens_q).astype(np.int64)
        self.first_row = np.cumsum(self.seqlens_q) - self.seqlens_q
        self.tables = block_tables
        self.blocks_per_tile = -(-TILE_KEYS // block_size)
        self.keys_per_tile = self.blocks_per_tile * block_size
        self.output_rows = np.zeros(int(self.seqlens_q.sum()), np.int64)
        self.num_outputs = 0

    def items(self, rows: int, done: np.ndarray, window: int | None) -> _Items:
        """The items of `rows` queries, after the first `done` of each sequence, which is raised."""
        rest = self.seqlens_q - done
        number = rest // rows if rows != ITEM_ROWS[1] else -(-np.where(rest == 1, 0, rest) // rows)
        sequence = np.repeat(np.arange(len(rest)), number)
        start = done[sequence] + rows * (np.arange(len(sequence)) - np.repeat(np.cumsum(number) - number, number))
        count = np.minimum(self.seqlens_q[sequence] - start, rows)
        done += np.minimum(number * rows, rest)
        position = self.context[sequence] + start
        first_key = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
        first_tile = first_key // self.keys_per_tile
        num_tiles = (position + count - 1) // self.keys_per_tile + 1 - first_tile
        return _Items(sequence, self.first_row[sequence] + start, position, count, first_tile, num_tiles).sorted()

    def group(self, rows: int, items: _Items, device: torch.device) -> TileGroup:
        offsets = np.arange(rows)
        real = offsets < items.count[:, None]
        row = np.where(real, items.row[:, None] + offsets, 0)
        own = np.where(real, (items.position - items.first_tile * self.keys_per_tile)[:, None] + offsets, -1)
        self.output_rows[row[real]] = self.num_outputs + np.flatnonzero(real)
        self.num_outputs += row.size
        blocks = tuple(
            torch.from_numpy(self._blocks(items, step)).to(device) for step in range(int(items.num_tiles[0]))
        )
        own_keys = torch.from_numpy(own.astype(np.int32)).to(device)
        return TileGroup(rows, torch.from_numpy(row.ravel()).to(device), own_keys, blocks)

    def _blocks(self, items: _Items, step: int) -> np.ndarray:
        """Of the items with more than `step` tiles; the null block behind a table's end."""
        active = int(np.count_nonzero(items.num_tiles > step))
        first = (items.first_tile[:active] + step) * self.blocks_per_tile
        at = first[:, None] + np.arange(self.blocks_per_tile)
        inside = at < self.tables.shape[1]
        found = self.tables[items.sequence[:active, None], np.where(inside, at, 0)]
        return np.where(inside, found, 0).astype(np.int64).ravel()


def make_tiles(
    seqlens_q: np.ndarray,
    seqlens_k: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    device: torch.device,
    window: int | None,
) -> Tiles:
    """The arguments are those of `plan_attention`."""
    planner = _Planner(seqlens_q, seqlens_k, block_tables, block_size)
    done = np.zeros_like(planner.seqlens_q)
    groups = []
    for rows in ITEM_ROWS:
        items = planner.items(rows, done, window)
        if len(items.row):
            groups.append(planner.group(rows, items, device))
    output_rows = torch.from_numpy(planner.output_rows).to(device)
    return Tiles(tuple(groups), output_rows, planner.keys_per_tile, window)


def tiled_attention(
    queries: Tensor,
    load: Callable[[Tensor], tuple[Tensor, Tensor]],
    tiles: Tiles,
    value_dim: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """queries [T, kv_heads, g, D], g of them for each key head -> fp32 [T, kv_heads, g, value_dim]; T is at least 1.

    load(blocks) gives the keys [n, kv_heads, keys, D] and values [n, kv_heads, keys, value_dim] of the n tiles in these
    blocks, in fp32. sinks: [kv_heads * g], as in `paged_attention`.
    """
    fixed = _proved(tiles.keys_per_tile, queries.shape[-1], value_dim, queries.device, torch.get_num_threads())
    outputs = [_attend(queries, load, group, tiles, value_dim, scale, sinks, fixed) for group in tiles.groups]
    return torch.cat(outputs).index_select(0, tiles.output_rows)


def _attend(
    queries: Tensor,
    load: Callable[[Tensor], tuple[Tensor, Tensor]],
    group: TileGroup,
    tiles: Tiles,
    value_dim: int,
    scale: float,
    sinks: Tensor | None,
    fixed: FixedRows,
) -> Tensor:
    """The padded outputs of a group's items, [n * rows, kv_heads, g, value_dim]"""
    kv_heads, per_key, dim = queries.shape[1:]
    num_items, item_rows = len(group.own), group.rows * per_key
    queries = queries.index_select(0, group.query_rows).float().mul_(scale)
    queries = queries.view(num_items, group.rows, kv_heads, per_key, dim).transpose(1, 2)
    queries = _padded(queries.reshape(-1, item_rows, dim), fixed)
    if sinks is None:
        top = queries.new_full((*queries.shape[:2], 1), -torch.inf)
        total = torch.zeros_like(top)
    else:
        per_row = sinks.float().view(1, kv_heads, 1, per_key).expand(num_items, -1, group.rows, -1)
        top = _padded(per_row.reshape(-1, item_rows, 1), fixed)
        total = torch.ones_like(top)
    out = queries.new_zeros(*queries.shape[:2], value_dim)
    for step, blocks in enumerate(group.blocks):
        keys, values = (x.flatten(0, 1) for x in load(blocks))
        items = slice(len(keys))  # of all key heads
        scores = _product(queries[items], keys.transpose(1, 2), fixed)
        hidden = _hidden(group.own[: len(keys) // kv_heads], step * tiles.keys_per_tile, tiles)
        scores[:, :item_rows].view(-1, kv_heads, group.rows, per_key, tiles.keys_per_tile).masked_fill_(
            hidden[:, None, :, None], -torch.inf
        )
        raised = torch.maximum(top[items], scores.amax(-1, keepdim=True))
        finite = raised.masked_fill(raised == -torch.inf, 0)
        shares, kept = scores.sub_(finite).exp_(), (top[items] - finite).exp_()
        total[items] = total[items].mul_(kept).add_(shares.sum(-1, keepdim=True))
        out[items] = out[items].mul_(kept).add_(_product(shares, values, fixed))
        top[items] = raised
    out = out.div_(total)[:, :item_rows].reshape(num_items, kv_heads, group.rows, per_key, value_dim)
    return out.transpose(1, 2).flatten(0, 1)


def _hidden(own: Tensor, first_key: int, tiles: Tiles) -> Tensor:
    """Which keys of the tile that begins at `first_key` each query may not see, bool [n, rows, keys]."""
    keys = torch.arange(first_key, first_key + tiles.keys_per_tile, dtype=own.dtype, device=own.device)
    hidden = keys > own.unsqueeze(-1)
    return hidden if tiles.window is None else hidden.logical_or_(keys <= own.unsqueeze(-1) - tiles.window)


def _padded(x: Tensor, fixed: FixedRows) -> Tensor:
    """x [B, M, K] with zeros up to a number of rows that `_product` takes."""
    return F.pad(x, (0, 0, 0, sum(fixed.pieces(x.shape[1])) - x.shape[1]))


def _product(x: Tensor, y: Tensor, fixed: FixedRows) -> Tensor:
    """x [B, M, K] @ y [B, K, N], M padded, in the numbers of rows that were proved."""
    pieces = x.split(fixed.pieces(x.shape[1]), 1)
    products = [torch.bmm(piece.contiguous(), y) for piece in pieces]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


@cache
def _proved(keys: int, dim: int, value_dim: int, device: torch.device, threads: int) -> FixedRows:
    """Numbers of rows for both products of tiles of this shape; `threads` is only part of the key."""
    queries, some_keys = invariance.cancelling(dim, keys, torch.float32, device)
    shares, some_values = invariance.cancelling(keys, value_dim, torch.float32, device)
    scores = invariance.prove(lambda x: _in_batches(x, some_keys.T), queries)
    outputs = invariance.prove(lambda x: _in_batches(x, some_values.T.contiguous()), shares)
    return FixedRows(tuple(sorted({*scores.counts} & {*outputs.counts})))


def _in_batches(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, alone and among several: [rows, ...]. All of these must have the same bits."""
    found = torch.cat([torch.bmm(x.expand(size, -1, -1).contiguous(), y.expand(size, -1, -1)) for size in (1, 3, 32)])
    if not torch.equal(found, found[:1].expand_as(found)):
        return torch.full_like(found[0], torch.nan)  # equal to nothing
    return found[0]
