"""Ledgers of the sequences that hold blocks: one row each, one array per field.

Arrays, because the step's path must not loop over all running sequences in Python: a decode step reads and writes these
by row index, and only sequences that change (grow by a block, end, are preempted) cost Python.
"""

from dataclasses import dataclass

import numpy as np

from dp_engine.batch import Batch, SamplingBatch, TokenMasks
from dp_engine.blocks import NULL_BLOCK
from dp_engine.grammar import Matcher
from dp_engine.sequence import Sequence
from vote.decision import StepType


@dataclass(slots=True)
class Step:
    """Who runs in a step, decided but not yet computed; arrays of B entries, rows all different.

    outputs: whether the sequence's tokens count; False for a chunk that leaves its prompt unfinished.
    drafts_due: num_drafts and seqlens_q of decoding rows are upper bounds until the step before has been settled.
    """

    step_type: StepType
    rows: np.ndarray  # int32
    seqlens_q: np.ndarray  # int32
    num_drafts: np.ndarray  # int32
    outputs: np.ndarray  # bool
    drafts_due: bool = False

    def without(self, rows: np.ndarray) -> "Step":
        """The same step without these rows."""
        keep = ~np.isin(self.rows, rows)
        arrays = (self.rows[keep], self.seqlens_q[keep], self.num_drafts[keep], self.outputs[keep])
        return Step(self.step_type, *arrays, self.drafts_due)


def blocks_for(length: np.ndarray | int, block_size: int) -> np.ndarray | int:
    """ceil(length / block_size), length the optimistic number of tokens."""
    return -(-length // block_size)


class Ledgers:
    """Rows are handed out by `open` and given back by `close`; `Resources` and the scheduler are the only writers.

    The four accounts of a sequence: tokens (`tokens`, `length`, `output_len`), KV (`num_tokens`, `block_table`,
    `num_blocks`, `num_named`, `state_slot`), drafts (tokens[length:], scratch until the step is settled) and schedule
    (`inflight`; status and the like are in `Sequence`). The row itself is the sequence's slot for draft state.
    """

    def __init__(self, rows: int, max_len: int, block_size: int) -> None:
        """`max_len`: longest committed length plus drafts."""
        self._block_size = block_size
        self.max_blocks = int(blocks_for(max_len, block_size))
        self._columns: dict[str, tuple[type, tuple[int, ...]]] = {
            "request_id": (np.int64, ()),
            "length": (np.int32, ()),  # committed tokens
            "num_tokens": (np.int32, ()),  # tokens whose KV is computed, counting the step in flight in full
            "inflight": (np.int32, ()),  # most tokens that the step in flight may commit
            "output_len": (np.int32, ()),  # committed tokens that were generated
            "stop_len": (np.int32, ()),
            "num_blocks": (np.int32, ()),
            "num_named": (np.int32, ()),  # leading blocks that need no name any more
            "state_slot": (np.int32, ()),
            "temperature": (np.float32, ()),
            "top_p": (np.float32, ()),
            "top_k": (np.int32, ()),
            "seed": (np.uint64, ()),
            "ignore_eos": (np.bool_, ()),
            "has_stop_ids": (np.bool_, ()),
            "logprobs": (np.int32, ()),  # as in `Batch`
            "bound": (np.bool_, ()),  # to a grammar
            "tokens": (np.int32, (max_len + 1,)),  # untouched pages cost nothing
            "block_table": (np.int32, (self.max_blocks,)),
        }
        self.request_id: np.ndarray
        self.length: np.ndarray
        self.num_tokens: np.ndarray
        self.inflight: np.ndarray
        self.output_len: np.ndarray
        self.stop_len: np.ndarray
        self.num_blocks: np.ndarray
        self.num_named: np.ndarray
        self.state_slot: np.ndarray
        self.temperature: np.ndarray
        self.top_p: np.ndarray
        self.top_k: np.ndarray
        self.seed: np.ndarray
        self.ignore_eos: np.ndarray
        self.has_stop_ids: np.ndarray
        self.logprobs: np.ndarray
        self.bound: np.ndarray
        self.tokens: np.ndarray
        self.block_table: np.ndarray
        for name, (dtype, shape) in self._columns.items():
            setattr(self, name, np.zeros((rows, *shape), dtype))
        self.num_bound = 0  # rows that are
        self.num_logprobs = 0  # rows that want some
        self.owner: list[Sequence | None] = [None] * rows
        self._free = list(range(rows - 1, -1, -1))

    def open(self, seq: Sequence) -> int:
        """Give `seq` a row and fill in everything but its blocks."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        length = len(seq.tokens)
        self.owner[row] = seq
        self.request_id[row] = seq.request_id
        self.length[row] = length
        self.num_tokens[row] = 0
        self.inflight[row] = 0
        self.output_len[row] = length - seq.prompt_len
        self.stop_len[row] = seq.stop_len
        self.num_blocks[row] = 0
        self.num_named[row] = 0
        self.state_slot[row] = NULL_BLOCK
        self.temperature[row] = seq.sampling.temperature
        self.top_p[row] = seq.sampling.top_p
        self.top_k[row] = seq.sampling.top_k
        self.seed[row] = seq.sampling.seed
        self.ignore_eos[row] = seq.sampling.ignore_eos
        self.has_stop_ids[row] = bool(seq.stop_token_ids)
        self.logprobs[row] = -1 if seq.sampling.logprobs is None else seq.sampling.logprobs
        self.bound[row] = seq.matcher is not None
        self._count(seq, 1)
        self.tokens[row, :length] = seq.tokens
        seq.row = row
        return row

    def close(self, seq: Sequence) -> None:
        """Take the row back; the sequence keeps its committed tokens. Its blocks are the caller's to free."""
        row = seq.row
        seq.tokens = self.tokens[row, : self.length[row]].copy()
        seq.row = -1
        self.owner[row] = None
        self._count(seq, -1)
        self.cut_blocks(row, 0)
        self._free.append(row)

    def _count(self, seq: Sequence, change: int) -> None:
        self.num_bound += change * (seq.matcher is not None)
        self.num_logprobs += change * (seq.sampling.logprobs is not None)

    def blocks_of(self, row: int) -> np.ndarray:
        return self.block_table[row, : self.num_blocks[row]]

    def cut_blocks(self, row: int, count: int) -> np.ndarray:
        """Shorten a block table to `count` blocks; returns the others. Behind its end a table is NULL_BLOCK."""
        others = self.block_table[row, count : self.num_blocks[row]].copy()
        self.block_table[row, count : self.num_blocks[row]] = NULL_BLOCK
        self.num_blocks[row] = count
        return others

    def append_blocks(self, row: int, blocks: np.ndarray) -> None:
        have = int(self.num_blocks[row])
        self.block_table[row, have : have + len(blocks)] = blocks
        self.num_blocks[row] = have + len(blocks)

    def seq_of(self, row: int) -> Sequence:
        seq = self.owner[row]
        assert seq is not None
        return seq

    def matcher_of(self, row: int) -> Matcher:
        matcher = self.seq_of(row).matcher
        assert matcher is not None
        return matcher

    def batch(
        self,
        step: Step,
        block_copies: np.ndarray,
        state_copies: np.ndarray,
        num_cached_tokens: int,
        masks: TokenMasks | None = None,
    ) -> Batch:
        """The next `seqlens_q[i]` tokens of each row of the step; their KV blocks are there already."""
        rows, seqlens_q, size = step.rows, step.seqlens_q, self._block_size
        computed = self.num_tokens[rows]
        if step.step_type is StepType.DECODE and not step.num_drafts.any():  # one token each
            owner, positions = rows, computed.astype(np.int64)
        else:
            owner = np.repeat(rows, seqlens_q)
            starts = np.cumsum(seqlens_q) - seqlens_q
            positions = np.arange(len(owner)) + np.repeat(computed - starts, seqlens_q)
        index = positions // size
        width = int(self.num_blocks[rows].max(initial=0))
        seqlens_k = computed + seqlens_q
        return Batch(
            step_type=step.step_type,
            input_ids=self.tokens[owner, positions].astype(np.int64),
            positions=positions,
            slots=self.block_table[owner, index] * np.int64(size) + (positions - index * size),
            seqlens_q=seqlens_q,
            seqlens_k=seqlens_k,
            num_drafts=step.num_drafts,
            block_tables=self.block_table[rows, :width],  # a copy
            block_copies=block_copies,
            state_slots=self.state_slot[rows],
            state_copies=state_copies,
            sampling=SamplingBatch(
                temperature=self.temperature[rows],
                top_p=self.top_p[rows],
                top_k=self.top_k[rows],
                seed=self.seed[rows],
                position=(seqlens_k - step.num_drafts).astype(np.int64),
            ),
            num_cached_tokens=num_cached_tokens,
            logprobs=np.where(step.outputs, self.logprobs[rows], -1) if self.num_logprobs else None,
            masks=masks,
        )

    def _grow(self) -> None:
        rows = len(self.owner)
        for name in self._columns:
            column = getattr(self, name)
            larger = np.zeros((2 * rows, *column.shape[1:]), column.dtype)
            larger[:rows] = column
            setattr(self, name, larger)
        self.owner.extend([None] * rows)
        self._free.extend(range(2 * rows - 1, rows - 1, -1))
