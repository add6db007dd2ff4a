"""Sequences in a paged cache, and attention over them in plain torch written for the eye."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

# (tokens before this step, tokens of this step) of each sequence
lengths = st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), max_size=9)


class Paged:
    """`sequences` of (context, new) tokens, a row of `shape` each; blocks in random order, every unowned slot full of
    rubbish. The contexts are in the cache; the new rows are the test's to write."""

    def __init__(self, sequences: list[tuple[int, int]], block_size: int, shape: tuple[int, ...], seed: int):
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.sequences, self.block_size = sequences, block_size
        self.seqlens_q = np.array([new for _, new in sequences], np.int32)
        self.seqlens_k = np.array([context + new for context, new in sequences], np.int32)
        self.num_rows = int(self.seqlens_q.sum())
        widths = -(-self.seqlens_k // block_size)
        order = rng.permutation(int(widths.sum())) + 1
        self.cache = torch.randn(len(order) + 1, block_size, *shape) * 50
        self.tables = np.zeros((len(sequences), int(widths.max(initial=0))), np.int32)
        self.rows = [torch.randn(context + new, *shape) for context, new in sequences]
        new_slots = []
        for row, (context, new) in enumerate(sequences):
            self.tables[row, : widths[row]], order = np.split(order, [widths[row]])
            at = np.arange(context + new)
            slots = torch.from_numpy(self.tables[row, at // block_size] * np.int64(block_size) + at % block_size)
            self.cache.view(-1, *shape)[slots[:context]] = self.rows[row][:context]
            new_slots.append(slots[context:])
        self.new_slots = torch.cat(new_slots) if new_slots else torch.empty(0, dtype=torch.int64)

    def new_rows(self) -> Tensor:
        """The rows of this step, [num_rows, *shape]"""
        new = [rows[context:] for rows, (context, _) in zip(self.rows, self.sequences, strict=True)]
        return torch.cat(new) if new else self.cache.view(-1, *self.cache.shape[2:])[:0]

    def plan_arguments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        return self.seqlens_q, self.seqlens_k, self.tables, self.block_size


def attention_by_hand(
    queries: Tensor,
    rows: list[Tensor],
    seqlens_q: np.ndarray,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """queries [T, heads, D] of the last seqlens_q[s] tokens of each sequence, whose keys and values are rows[s]
    [length, 2, kv_heads, D] -> [T, heads * D]"""
    outputs, start = [], 0
    for kv, count in zip(rows, seqlens_q.tolist(), strict=True):
        for row in range(count):
            seen = len(kv) - count + row + 1
            first = max(0, seen - window) if window else 0
            for head, query in enumerate(queries[start + row]):
                keys, values = kv[first:seen, :, head * kv.shape[2] // queries.shape[1]].unbind(1)
                scores = keys @ query * scale
                if sinks is not None:
                    scores, values = torch.cat((scores, sinks[head : head + 1])), torch.cat((values, values[:1] * 0))
                outputs.append(torch.softmax(scores, 0) @ values)
        start += count
    return torch.stack(outputs).view(len(queries), -1) if outputs else queries.flatten(1)
