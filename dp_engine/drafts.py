"""Drafts: the next tokens of a sequence guessed from its own text, and how many of them were right.

Why the text stays what it would have been without drafts. A step with drafts draws a token at every position, each from
the model's distribution p there, and accepts a draft if the draw equals it; what was drawn in the place of the first
wrong one is committed too. For a guess that is certain of itself this is rejection sampling: draft x is accepted with
probability p(x), else the token follows p restricted to the rest. And since a draw depends on seed and position alone
(`dp_engine.sampler`), not only the distribution is the same but every token.
"""

import numpy as np

_CHUNK = 1 << 17  # tokens that are searched together, so that temporaries stay in the cache


def propose(
    tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray, limits: np.ndarray, ngram_max: int, ngram_min: int
) -> np.ndarray:
    """Prompt lookup: what followed when a sequence's last tokens occurred before is the guess for what follows now.

    tokens: int32 [N, W], of which the rows `rows` (int [R], distinct) hold lengths[i] >= 1 committed tokens each and
    room for limits[i] >= 0 more (both int32 [R]). The last n tokens are looked up, n from ngram_max down to ngram_min,
    until they are found; the latest earlier occurrence counts. At most limits[i] of the committed tokens behind it are
    written to tokens[rows[i], lengths[i]:]. Returns how many, int32 [R].
    """
    follow = lengths.astype(np.int32)
    order = np.flatnonzero((limits > 0) & (lengths > ngram_min))
    order = order[np.argsort(-lengths[order], kind="stable")]  # rows of like lengths are searched together
    start = 0
    while start < len(order):
        width = int(lengths[order[start]])
        chunk = order[start : start + max(_CHUNK // width, 1)]
        follow[chunk] = _follow(tokens[rows[chunk], :width], follow[chunk], ngram_max, ngram_min)
        start += len(chunk)
    counts = np.minimum(limits, lengths - follow).astype(np.int32)
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    owners = np.repeat(rows, counts)
    tokens[owners, np.repeat(lengths, counts) + offsets] = tokens[owners, np.repeat(follow, counts) + offsets]
    return counts


def _follow(tokens: np.ndarray, lengths: np.ndarray, ngram_max: int, ngram_min: int) -> np.ndarray:
    """Where the guess for each row begins in it; the row's length if nothing was found. int32 [R, W], [R] -> [R]."""
    width = tokens.shape[1]
    row = np.arange(len(tokens))
    follow = lengths
    found = np.arange(width, dtype=np.int32) < (lengths - 1)[:, None]  # [r, e]: the last n tokens end at e < last, too
    for n in range(1, min(ngram_max, width - 1) + 1):
        found[:, : n - 1] = False
        found[:, n - 1 :] &= tokens[:, : width - n + 1] == tokens[row, lengths - n][:, None]
        if n >= ngram_min:
            latest = width - 1 - found[:, ::-1].argmax(1)
            follow = np.where(found[row, latest], latest + 1, follow)
    return follow


def accepted(tokens: np.ndarray, drafts: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    """How many drafts of each sequence come before its first wrong one: int32 [B].

    tokens: int64 [sum(1 + num_drafts)], a step's result; drafts: int [sum(num_drafts)]; num_drafts: int32 [B].
    """
    starts = np.cumsum(num_drafts) - num_drafts
    owners = np.repeat(np.arange(len(num_drafts)), num_drafts)
    drawn = tokens[np.arange(len(drafts)) + owners]  # every sequence before has one token more than it has drafts
    wrong = np.append(np.flatnonzero(drawn != drafts), len(drafts))
    first_wrong = wrong[np.searchsorted(wrong, starts)]
    return np.minimum(first_wrong - starts, num_drafts).astype(np.int32)
