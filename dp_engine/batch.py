"""The contract between scheduler and model runner: what one rank computes in one step."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dp_engine.messages import TokenLogprobs
from vote.decision import StepType


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of the B sequences of a batch, one entry each.

    temperature, top_p: float32; top_k: int32 (0: off); seed: uint64; position: int64, the index that the first new
    token will have in its sequence (prompt included).
    """

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    seed: np.ndarray
    position: np.ndarray


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What grammars allow.

    rows: int64 [M], rising, the outputs that are bound (of the sum(1 + num_drafts) of a `Batch`); allowed: int32
    [M, W], a bit per token, the least significant first.
    """

    rows: np.ndarray
    allowed: np.ndarray


class Drawn(NamedTuple):
    """What a step gave: the tokens of a `Batch`, int64 [sum(1 + num_drafts)], and log-probabilities by place in it;
    None if nobody wanted any."""

    tokens: np.ndarray
    logprobs: dict[int, TokenLogprobs] | None = None


class StepStats(NamedTuple):
    """Size of one rank's part of a step. sum_qk: query times key length over the sequences, what attention costs."""

    num_batched_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that were found in the prefix cache instead of being computed
    sum_qk: int = 0
    max_seqlen_k: int = 0
    min_seqlen_k: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences with T query tokens in all, grouped by sequence in order. B and T may be 0 (placeholder step).

    input_ids, positions, slots: int64 [T]; a slot is block * block_size + offset, where the token's KV goes.
    seqlens_q: int32 [B], sums to T. seqlens_k: int32 [B], KV length of the sequence after this step (>= seqlens_q).
    num_drafts: int32 [B]; the last num_drafts[i] query tokens of sequence i are guesses.
    block_tables: int32 [B, W], W = most blocks of any sequence here; unused entries are 0, the null block.
    block_copies: int64 [C, 2], blocks to copy (source, destination) before anything is written.
    num_cached_tokens: prompt tokens of sequences that start here whose KV was found in the prefix cache.
    state_slots: int32 [B], state area of each sequence, 0 without; state_copies: int64 [S, 2], like block_copies.
    logprobs: int32 [B], likeliest tokens wanted of each sequence beside its own, -1: no log-probabilities; None: nobody
    wants any. masks: None: no grammar binds anybody.

    Every sequence yields 1 + num_drafts[i] tokens, drawn at its last 1 + num_drafts[i] query positions, whatever they
    are good for; a result is these tokens of all sequences in order, int64 [sum(1 + num_drafts)].
    """

    step_type: StepType
    input_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    seqlens_q: np.ndarray
    seqlens_k: np.ndarray
    num_drafts: np.ndarray
    block_tables: np.ndarray
    block_copies: np.ndarray
    state_slots: np.ndarray
    state_copies: np.ndarray
    sampling: SamplingBatch
    num_cached_tokens: int = 0
    logprobs: np.ndarray | None = None
    masks: TokenMasks | None = None

    def __len__(self) -> int:
        return len(self.seqlens_q)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.seqlens_q) + int(self.num_drafts.sum())

    def stats(self) -> StepStats:
        if not len(self):
            return StepStats(num_cached_tokens=self.num_cached_tokens)
        return StepStats(
            self.num_tokens,
            self.num_cached_tokens,
            int(self.seqlens_q.astype(np.int64) @ self.seqlens_k),
            int(self.seqlens_k.max()),
            int(self.seqlens_k.min()),
        )
