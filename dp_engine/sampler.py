"""Drawing tokens. A token depends on its row of logits, its parameters, its seed and its position, and on nothing else:
not on the other rows of the batch, not on earlier draws, so a preempted or resubmitted request repeats itself.
"""

import numpy as np
import torch
from torch import Tensor

from dp_engine.batch import SamplingBatch, TokenMasks

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CANDIDATES = 256  # a row whose top_k or top_p is not settled among so many best tokens is sorted whole
_ARGMAX_RUN = 256


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, position): uint64 [N], int64 [N] -> float64 [N]."""
    with np.errstate(over="ignore"):
        stream = _mix(seed.astype(np.uint64) + _GOLDEN)
        mixed = _mix(stream + position.astype(np.uint64) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def greedy(logits: Tensor) -> Tensor:
    """First index of each row's maximum: [B, V] -> int64 [B]. Two passes on the CPU, where `argmax` alone is slow."""
    rows, width = logits.shape
    if logits.device.type != "cpu" or width % _ARGMAX_RUN or not rows:
        return logits.argmax(-1)
    runs = logits.view(rows, -1, _ARGMAX_RUN)
    best_run = runs.amax(-1).argmax(-1)
    return best_run * _ARGMAX_RUN + runs[torch.arange(rows), best_run].argmax(-1)


def constrain(logits: Tensor, masks: TokenMasks) -> Tensor:
    """A copy of the logits [N, V] with minus infinity for what the masks do not allow."""
    width = logits.shape[1]
    bits = np.unpackbits(masks.allowed.view(np.uint8), axis=1, count=width, bitorder="little")
    forbidden = torch.from_numpy(bits).to(logits.device) == 0
    rows = torch.from_numpy(masks.rows).to(logits.device)
    return logits.index_copy(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))


def sample(logits: Tensor, sampling: SamplingBatch) -> np.ndarray:
    """A token for each row: logits [B, V] of any float dtype -> int64 [B]. Temperature 0 is greedy.

    Others: temperature first, then top_k, then top_p over what is left, as transformers and vLLM do; tokens as good as
    the last one kept are kept too. The token is where the cumulative distribution, in the order of token ids, passes
    `uniform(seed, position)`.
    """
    drawn = np.flatnonzero(sampling.temperature > 0)
    if not len(drawn):
        return greedy(logits).cpu().numpy()
    tokens = np.empty(len(logits), np.int64)
    if len(drawn) < len(logits):
        tokens[:] = greedy(logits).cpu().numpy()
    chosen = logits if len(drawn) == len(logits) else logits[torch.from_numpy(drawn).to(logits.device)]
    numbers = uniform(sampling.seed[drawn], sampling.position[drawn])
    weights = _weights(chosen, sampling.temperature[drawn], sampling.top_k[drawn], sampling.top_p[drawn])
    tokens[drawn] = _draw(weights, torch.from_numpy(numbers).to(logits.device)).cpu().numpy()
    return tokens


def per_output(sampling: SamplingBatch, num_drafts: np.ndarray) -> SamplingBatch:
    """One entry for each of the 1 + num_drafts[i] tokens that sequence i yields, at rising positions."""
    if not num_drafts.any():
        return sampling
    counts = num_drafts + 1
    starts = np.cumsum(counts) - counts
    return SamplingBatch(
        temperature=np.repeat(sampling.temperature, counts),
        top_p=np.repeat(sampling.top_p, counts),
        top_k=np.repeat(sampling.top_k, counts),
        seed=np.repeat(sampling.seed, counts),
        position=np.arange(int(counts.sum())) + np.repeat(sampling.position - starts, counts),
    )


def _weights(logits: Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """Unnormalised probabilities fp32 [B, V], 0 for what top_k and top_p exclude; each row's largest is 1."""
    heat = torch.from_numpy(temperature.astype(np.float32)).to(logits.device).unsqueeze(1)
    wide = logits.float()
    weights = wide.sub(wide.amax(-1, keepdim=True)).div_(heat).exp_()
    limited = np.flatnonzero(((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1))
    if len(limited):
        rows = torch.from_numpy(limited).to(logits.device)
        kept = weights if len(limited) == len(weights) else weights.index_select(0, rows)
        least = _least_kept(kept, top_k[limited], top_p[limited])
        weights = weights.index_copy(0, rows, kept.masked_fill(kept < least, 0))
    return weights


def _least_kept(weights: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """The smallest weight that top_k and top_p leave in each row, [B, 1]."""
    vocab = weights.shape[1]
    limit_k = np.where((top_k > 0) & (top_k < vocab), top_k, vocab).astype(np.int64)
    ks = torch.from_numpy(limit_k).to(weights.device).unsqueeze(1)
    ps = torch.from_numpy(top_p.astype(np.float64)).to(weights.device).unsqueeze(1)
    totals = weights.double().sum(-1, keepdim=True)
    best = torch.topk(weights, min(_CANDIDATES, vocab), dim=-1).values
    least, settled = _cut(best, ks, ps, totals, vocab)
    open_rows = torch.nonzero(~settled.squeeze(1)).squeeze(1)
    if len(open_rows):
        ordered = weights.index_select(0, open_rows).sort(-1, descending=True).values
        rest, _ = _cut(ordered, ks[open_rows], ps[open_rows], totals[open_rows], vocab)
        least.index_copy_(0, open_rows, rest)
    return least


def _cut(best: Tensor, ks: Tensor, ps: Tensor, totals: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Smallest weight kept among the best N of each row (falling), and whether the rows' rest cannot change it."""
    count = best.shape[1]
    ranks = torch.arange(count, device=best.device)
    sums = best.double().cumsum(-1)
    # What top_p is a share of: what top_k left, or the whole row.
    base = torch.where(ks <= count, sums.gather(1, (ks - 1).clamp_max(count - 1)), totals)
    before = sums - best
    kept = (ranks < ks) & ((before < ps * base) | (ranks == 0))
    number = kept.sum(-1, keepdim=True)
    # Settled when top_k's edge was seen, or, without top_k, when top_p cut before the end.
    settled = (ks <= count) | ((ks == vocab) & (number < count))
    return best.gather(1, number - 1), settled


def _draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """Index where the running sum passes numbers[b] of the row's total: never one of weight 0. [B, V], [B] -> [B]."""
    sums = weights.double().cumsum(-1)
    totals = sums[:, -1:]
    targets = torch.minimum(numbers.unsqueeze(1) * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    return torch.searchsorted(sums, targets, right=True).squeeze(1).clamp_max(weights.shape[1] - 1)
