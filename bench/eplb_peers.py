"""DeepSeek's expert parallelism load balancer, written anew from its description (github.com/deepseek-ai/EPLB).

It looks at an expert's total load alone. Global: experts get copies one by one, each time the one whose copies carry
most; then copies go, heaviest first, to the rank that carries least and has a free slot. Hierarchical: routing groups
go to nodes in the same manner, and each node does the above with its experts. Nothing keeps two copies of an expert
off one rank.
"""

from collections.abc import Sequence

import numpy as np

Packing = list[list[int]]  # logical experts by rank


def hierarchical(totals: np.ndarray, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int) -> Packing:
    """totals: [E]. Raises ValueError when groups or slots cannot be dealt out evenly."""
    if num_groups % num_nodes or num_slots % num_ranks or num_ranks % num_nodes:
        raise ValueError("it deals out groups to nodes and slots to ranks evenly or not at all")
    members = np.arange(len(totals)).reshape(num_groups, -1)
    ranks: Packing = []
    for groups in _evenly_filled(totals[members].sum(1), num_nodes):
        experts = members[groups].reshape(-1)
        copied = _with_copies(totals[experts], num_slots // num_nodes)
        carried = totals[experts][copied] / np.bincount(copied)[copied]
        for slots in _evenly_filled(carried, num_ranks // num_nodes):
            ranks.append(experts[copied[slots]].tolist())
    return ranks


def flat(totals: np.ndarray, num_slots: int, num_ranks: int) -> Packing:
    """Its global policy: everything is one group on one node."""
    return hierarchical(totals, num_slots, num_ranks, 1, 1)


def _with_copies(totals: np.ndarray, num_slots: int) -> np.ndarray:
    """[num_slots] which expert each copy is one of."""
    copied = list(range(len(totals)))
    number = np.ones(len(totals))
    for _ in range(num_slots - len(totals)):
        most = int((totals / number).argmax())
        copied.append(most)
        number[most] += 1
    return np.array(copied)


def _evenly_filled(weights: np.ndarray, num_bins: int) -> list[list[int]]:
    """As many items in each bin, heaviest first, each to the lightest bin that is not full."""
    room = len(weights) // num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    filled = [0.0] * num_bins
    for item in np.argsort(-weights, kind="stable").tolist():
        lightest = min((at for at in range(num_bins) if len(bins[at]) < room), key=filled.__getitem__)
        bins[lightest].append(item)
        filled[lightest] += float(weights[item])
    return bins


def loads(counts: np.ndarray, packing: Sequence[Sequence[int]]) -> np.ndarray:
    """fp64 [T, R], copies sharing evenly, also on one rank. counts: [T, E]."""
    number = np.bincount([expert for rank in packing for expert in rank], minlength=counts.shape[1])
    share = counts / number
    return np.stack([share[:, list(rank)].sum(1) for rank in packing], 1)
