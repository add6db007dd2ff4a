"""Attention of single queries over paged keys in C (kernels/walk.c): bf16 and fp32 on the CPU.

A query's bits depend on its own keys alone, not on the number of threads: all of this is batch invariant. Keys and
values are read where they lie.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kernels import native

MOST_ROWS = 8  # neighbours of a sequence that walk together; as in walk.c
ANY = 1 << 30
_MOST_HEADS = 1024
_DIM_STEP = {torch.bfloat16: 32, torch.float32: 16}
_POINTERS = ("queries", "cache", "rows", "sequences", "positions", "tables", "sinks", "out")
_NUMBERS = (
    *("n", "row_stride", "slot_stride", "value_offset", "block_size", "table_width"),
    *("heads", "kv_heads", "key_dim", "value_dim", "window"),
)


class _Attention(ctypes.Structure):
    """`struct attention` of walk.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_long) for name in _NUMBERS),
        ("scale", ctypes.c_float),
    ]


class Walk:
    """Queries of a step, neighbours of a sequence in order."""

    def __init__(
        self, rows: np.ndarray, sequences: np.ndarray, positions: np.ndarray, tables: np.ndarray, window: int = 0
    ) -> None:
        """Rows [n] of the batch, whose they are [n], the positions [n] of their own keys; block tables [sequences, W].
        window: 0 for none."""
        self.rows, self.sequences, self.positions, self.tables = (
            np.ascontiguousarray(array, np.int32) for array in (rows, sequences, positions, tables)
        )
        self.arguments = _Attention(
            rows=self.rows.ctypes.data,
            sequences=self.sequences.ctypes.data,
            positions=self.positions.ctypes.data,
            tables=self.tables.ctypes.data,
            n=len(self.rows),
            table_width=self.tables.shape[1],
            window=window,
        )  # of all layers: what belongs to one is set when it walks

    @cached_property
    def in_order(self) -> "Walk":
        """The same queries where rows 0, 1, ... are theirs."""
        return Walk(np.arange(len(self.rows)), self.sequences, self.positions, self.tables, self.arguments.window)


@dataclass(frozen=True, slots=True)
class KeysAndValues:
    """How a slot of the cache has them: `kv_heads` keys, each as long as a query, from its beginning on, and as many
    values of `value_dim` from `value_offset` on."""

    kv_heads: int
    value_dim: int
    value_offset: int


def most_queries(dtype: torch.dtype, device: torch.device, heads: int, key_dim: int, value_dim: int) -> int:
    """With how many queries of a sequence attention of this shape is best done by walking, here; 0: it cannot be.

    In bf16 that is any number: up to three times as fast as torch's fused attention. In fp32 a few, where that has good
    products of its own; and where a value is part of its key, as whole prompts are cheaper with both expanded.
    """
    step = _DIM_STEP.get(dtype)
    if step is None or device.type != "cpu" or key_dim % step or value_dim % 16 or heads > _MOST_HEADS:
        return 0
    if native.kernels() is None:
        return 0
    return ANY if dtype == torch.bfloat16 and key_dim == value_dim else MOST_ROWS


def make_walk(
    members: np.ndarray, seqlens_q: np.ndarray, seqlens_k: np.ndarray, tables: np.ndarray, window: int | None
) -> Walk:
    """All queries of the sequences `members` (int64 [m], ascending); the others are those of `plan_attention`."""
    lens_q = seqlens_q[members]
    sequences = np.repeat(members, lens_q)
    offsets = np.arange(len(sequences)) - np.repeat(np.cumsum(lens_q) - lens_q, lens_q)
    rows = (np.cumsum(seqlens_q) - seqlens_q)[sequences] + offsets
    positions = (seqlens_k - seqlens_q)[sequences] + offsets
    return Walk(rows, sequences, positions, tables, window or 0)


def walk_attention(
    queries: Tensor, cache: Tensor, walk: Walk, where: KeysAndValues, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """queries [T, heads, D], those of a row side by side -> [n, heads, value_dim] for the n of the walk.

    cache: [blocks, block_size, ...] of the same dtype, contiguous. sinks: as in `paged_attention`.
    """
    heads, key_dim = queries.shape[1:]
    out = queries.new_empty(len(walk.rows), heads, where.value_dim)
    wide_sinks = None if sinks is None else sinks.float()
    arguments = walk.arguments
    arguments.queries, arguments.row_stride = queries.data_ptr(), queries.stride(0)
    arguments.cache, arguments.slot_stride, arguments.block_size = cache.data_ptr(), cache.stride(1), cache.shape[1]
    arguments.heads, arguments.key_dim = heads, key_dim
    arguments.kv_heads, arguments.value_dim, arguments.value_offset = (
        where.kv_heads,
        where.value_dim,
        where.value_offset,
    )
    arguments.sinks = None if wide_sinks is None else wide_sinks.data_ptr()
    arguments.out, arguments.scale = out.data_ptr(), scale
    library = native.loaded()
    run = library.phalanx_attend_bf16 if queries.dtype == torch.bfloat16 else library.phalanx_attend_fp32
    run(ctypes.byref(arguments))
    return out
