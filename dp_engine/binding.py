"""Sequences that a grammar binds, in a step: what may be drawn, and what was drawn."""

from itertools import chain

import numpy as np

from dp_engine.batch import TokenMasks
from dp_engine.ledger import Ledgers, Step
from dp_engine.settlement import Committed


def constrain(ledgers: Ledgers, step: Step) -> TokenMasks | None:
    """What the bound sequences of a step may say, behind all that is committed; None if the step has none of them.

    Drafts that a grammar forbids are taken out of the step, with those behind them: a draft stands for what would be
    drawn, and that cannot be. So the tokens are the same with drafts and without.
    """
    bound = np.flatnonzero(ledgers.bound[step.rows] & step.outputs).tolist()
    if not bound:
        return None
    matchers = [ledgers.matcher_of(int(step.rows[index])) for index in bound]
    drafts = [_drafts(ledgers, step, index) for index in bound]
    if any(drafts):
        drafts = [guess[: matcher.fitting(guess)] for matcher, guess in zip(matchers, drafts, strict=True)]
        num_drafts = step.num_drafts.copy()
        num_drafts[bound] = list(map(len, drafts))
        step.seqlens_q = step.seqlens_q + num_drafts - step.num_drafts
        step.num_drafts = num_drafts
    counts = 1 + step.num_drafts
    starts = np.cumsum(counts) - counts
    rows = list(chain.from_iterable(range(starts[index], starts[index] + counts[index]) for index in bound))
    allowed = np.empty((len(rows), matchers[0].width), np.int32)
    at = 0
    for matcher, guess in zip(matchers, drafts, strict=True):
        matcher.fill(allowed, at, guess)
        at += 1 + len(guess)
    return TokenMasks(np.array(rows, np.int64), allowed)


def advance(ledgers: Ledgers, done: Committed) -> None:
    """Take the bound sequences' tokens into their matchers. Where one is refused, it and what follows is taken out of
    `done`, and its sequence ends."""
    refused: list[int] = []
    starts = np.cumsum(done.counts) - done.counts
    for index in np.flatnonzero(ledgers.bound[done.rows]).tolist():
        start, count = int(starts[index]), int(done.counts[index])
        taken = ledgers.matcher_of(int(done.rows[index])).take(done.tokens[start : start + count])
        if taken < count:
            done.stopped[index], done.ended[index] = False, True
            done.first[index] &= taken > 0
            done.counts[index] = taken
            refused += range(start + taken, start + count)
    if refused:
        done.drop(refused)


def _drafts(ledgers: Ledgers, step: Step, index: int) -> list[int]:
    """Drafts of one sequence of the step; they lie behind its committed tokens."""
    row = step.rows[index]
    length = int(ledgers.length[row])
    return ledgers.tokens[row, length : length + int(step.num_drafts[index])].tolist()
