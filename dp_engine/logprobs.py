"""Log-probabilities of drawn tokens, and of the likeliest ones in their place."""

from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor

from dp_engine.messages import LEAST_LOGPROB, TokenLogprobs


def token_logprobs(logits: Tensor, tokens: np.ndarray, wanted: np.ndarray) -> dict[int, TokenLogprobs]:
    """Of each row that wants some, by row: log-softmax of the row as it is.

    logits: [N, V] of any float dtype; tokens: int64 [N], drawn there; wanted: int32 [N], how many of the likeliest
    tokens, -1 for no log-probabilities. Equal ones come in the order of their ids, so that a row's answer does not
    depend on what other rows want.
    """
    rows = np.flatnonzero(wanted >= 0)
    if not len(rows):
        return {}
    wide = logits.index_select(0, _tensor(rows, logits)).float()
    total = wide.logsumexp(-1, keepdim=True)
    chosen = wide.gather(1, _tensor(tokens[rows], logits).unsqueeze(1)) - total
    tops = _likeliest(wide, total, np.minimum(wanted[rows], logits.shape[1]))
    own = _finite(chosen.squeeze(1))
    return {row: TokenLogprobs(own[at], tops.get(at, [])) for at, row in enumerate(rows.tolist())}


def _likeliest(wide: Tensor, total: Tensor, counts: np.ndarray) -> dict[int, list[tuple[int, float]]]:
    """The counts[i] likeliest tokens of each row, falling; rows without any are left out."""
    if not counts.any():
        return {}
    best = wide.topk(int(counts.max()), dim=-1).values
    last = best.gather(1, _tensor(np.maximum(counts, 1).astype(np.int64) - 1, wide).unsqueeze(1))
    rows, ids = (wide >= last).nonzero(as_tuple=True)
    logprobs = (wide - total)[rows, ids]
    owner, token = rows.cpu().numpy(), ids.cpu().numpy()
    order = np.lexsort((token, -logprobs.cpu().numpy(), owner))
    found = zip(owner[order].tolist(), token[order].tolist(), np.array(_finite(logprobs))[order].tolist(), strict=True)
    return {
        row: [(token, logprob) for _, token, logprob in islice(entries, int(counts[row]))]
        for row, entries in groupby(found, key=lambda entry: entry[0])
    }


def _finite(logprobs: Tensor) -> list[float]:
    return torch.nan_to_num(logprobs, nan=LEAST_LOGPROB).clamp_min(LEAST_LOGPROB).tolist()


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
