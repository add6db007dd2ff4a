"""How many tokens of each sequence are guessed in a step, and by whom."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dp_engine.config import EngineConfig
from dp_engine.drafts import propose
from dp_engine.ledger import Ledgers, Step

# Guesses for rows of the ledgers: (ledgers, rows, most per row) -> number per row, written behind each row's tokens.
Proposer = Callable[[Ledgers, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class PromptLookup:
    """A proposer that looks up the last tokens in what was said before."""

    ngram_max: int
    ngram_min: int

    def __call__(self, ledgers: Ledgers, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
        return propose(ledgers.tokens, rows, ledgers.length[rows], limits, self.ngram_max, self.ngram_min)


def draft_limits(config: EngineConfig, ledgers: Ledgers, rows: np.ndarray, spare: int) -> np.ndarray:
    """Most drafts per row, int32: none beyond a sequence's end, and `spare` in all."""
    most = np.full(len(rows), config.num_draft_tokens, np.int32)
    if config.clip_drafts:
        np.minimum(most, ledgers.stop_len[rows] - ledgers.length[rows] - 1, out=most)
        np.maximum(most, 0, out=most)
        before = np.cumsum(most) - most
        np.minimum(most, np.maximum(spare - before, 0), out=most)
    return most


def fix_drafts(step: Step, ledgers: Ledgers, propose: Proposer, *, clip: bool) -> None:
    """Guess, now that all tokens are committed, within what was reserved."""
    step.drafts_due = False
    limits = most = step.num_drafts
    if clip:
        limits = np.clip(ledgers.stop_len[step.rows] - ledgers.length[step.rows] - 1, 0, most)
    step.num_drafts = propose(ledgers, step.rows, limits)
    step.seqlens_q = step.seqlens_q + step.num_drafts - most
