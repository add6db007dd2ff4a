"""Settlement: what the result of a step is worth, committed to the ledgers."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import compress

import numpy as np

from dp_engine.drafts import accepted
from dp_engine.ledger import Ledgers, Step


@dataclass(slots=True)
class Committed:
    """What was committed, one entry per row whose output counts.

    counts: its tokens. origins: of each token, its place in the step's result; None if nobody asked.
    stopped: the last token ends the sequence; ended: that, or the sequence has its full length; first: these tokens are
    the sequence's first ones.
    """

    rows: np.ndarray
    request_ids: list[int]  # of each token
    tokens: list[int]
    counts: np.ndarray
    origins: np.ndarray | None
    stopped: np.ndarray
    ended: np.ndarray
    first: np.ndarray
    num_drafts: int = 0
    num_accepted: int = 0

    def drop(self, places: list[int]) -> None:
        """Leave out some of the tokens, of sequences that end; the ledgers keep them."""
        keep = np.ones(len(self.tokens), np.bool_)
        keep[places] = False
        self.request_ids = list(compress(self.request_ids, keep))
        self.tokens = list(compress(self.tokens, keep))
        self.origins = self.origins[keep] if self.origins is not None else None


def commit(
    ledgers: Ledgers, step: Step, tokens: np.ndarray, kept: np.ndarray, eos: Seq[int], *, traced: bool = False
) -> Committed:
    """Append to each row with `kept` what it gets of a step's flat result `tokens` (see `Batch`): the token drawn, and
    with drafts the run of right ones before it. Nothing is appended behind a token that ends the sequence. `traced`:
    with the tokens' origins.
    """
    everyone = kept.all()
    rows = step.rows if everyone else step.rows[kept]
    if not step.num_drafts.any():
        done = _commit_one(ledgers, rows, tokens if everyone else tokens[kept], eos)
        done.origins = np.flatnonzero(kept) if traced else None
        return done
    right = _right_drafts(ledgers, step, tokens)
    committed = _commit_run(ledgers, rows, _as_table(tokens, step.num_drafts)[kept], right[kept] + 1, eos)
    if traced:
        places = _as_table(np.arange(len(tokens)), step.num_drafts)[kept]
        committed.origins = places[np.arange(places.shape[1]) < committed.counts[:, None]]
    committed.num_drafts, committed.num_accepted = int(step.num_drafts.sum()), int(right.sum())
    return committed


def _commit_one(ledgers: Ledgers, rows: np.ndarray, tokens: np.ndarray, eos: Seq[int]) -> Committed:
    lengths = ledgers.length[rows]
    outputs = ledgers.output_len[rows] + 1
    ledgers.tokens[rows, lengths] = tokens
    lengths = lengths + 1
    ledgers.length[rows] = lengths
    ledgers.output_len[rows] = outputs
    stopped = _stops(ledgers, rows, tokens[:, None], eos)[:, 0]
    ended = stopped | (lengths >= ledgers.stop_len[rows])
    counts = np.ones(len(rows), np.int32)
    request_ids = ledgers.request_id[rows].tolist()
    return Committed(rows, request_ids, tokens.tolist(), counts, None, stopped, ended, outputs == 1)


def _commit_run(ledgers: Ledgers, rows: np.ndarray, table: np.ndarray, counts: np.ndarray, eos: Seq[int]) -> Committed:
    """`counts[i]` tokens of table[i] for row i, unless one of them ends it."""
    lengths = ledgers.length[rows]
    issued = ledgers.num_tokens[rows] - lengths + 1  # query tokens of this step, from the last committed one on
    width = np.arange(table.shape[1])
    stops = _stops(ledgers, rows, table, eos)
    ends = stops | (lengths[:, None] + 1 + width >= ledgers.stop_len[rows][:, None])
    first_end = np.where(ends.any(1), ends.argmax(1), table.shape[1])
    counts = np.minimum(counts, first_end + 1).astype(np.int32)
    valid = width < counts[:, None]
    ledgers.tokens[np.repeat(rows, counts), (lengths[:, None] + width)[valid]] = table[valid]
    ledgers.length[rows] = lengths + counts
    outputs = ledgers.output_len[rows] + counts
    ledgers.output_len[rows] = outputs
    ledgers.num_tokens[rows] += counts - issued
    last = np.arange(len(rows)), counts - 1
    request_ids = np.repeat(ledgers.request_id[rows], counts).tolist()
    first = outputs == counts
    return Committed(rows, request_ids, table[valid].tolist(), counts, None, stops[last], ends[last], first)


def _stops(ledgers: Ledgers, rows: np.ndarray, table: np.ndarray, eos: Seq[int]) -> np.ndarray:
    """Which tokens of [R, W] end their sequence, bool."""
    stops = np.zeros(table.shape, np.bool_)
    for token in eos:
        stops |= table == token
    stops &= ~ledgers.ignore_eos[rows][:, None]
    for index in ledgers.has_stop_ids[rows].nonzero()[0].tolist():
        wanted = ledgers.seq_of(int(rows[index])).stop_token_ids
        stops[index] |= [token in wanted for token in table[index].tolist()]
    return stops


def _right_drafts(ledgers: Ledgers, step: Step, tokens: np.ndarray) -> np.ndarray:
    """Drafts of each row before its first wrong one; they still lie behind its committed tokens."""
    num_drafts = step.num_drafts
    owners = np.repeat(step.rows, num_drafts)
    offsets = np.arange(len(owners)) - np.repeat(np.cumsum(num_drafts) - num_drafts, num_drafts)
    return accepted(tokens, ledgers.tokens[owners, ledgers.length[owners] + offsets], num_drafts)


def _as_table(tokens: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    """A flat result as one row per sequence, [B, 1 + most drafts]; -1 where a row is shorter."""
    widths = 1 + num_drafts
    table = np.full((len(widths), int(widths.max(initial=1))), -1, np.int64)
    table[np.arange(table.shape[1]) < widths[:, None]] = tokens
    return table
