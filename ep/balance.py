"""Where experts should be: pure functions of how many tokens went to each of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ep.descent import UNIT_BITS, Descent
from ep.placement import ExpertPlacement

# Of a search, in loads computed: some 20 milliseconds on one core.
BUDGET = 4_000_000
KICKS = 8

# The packing made from scratch has to be this much better than the one that stays close to what is there.
MOVING_PAYS = 1 / 64


@dataclass(frozen=True)
class Gang:
    """The ranks that experts are packed on. slots: experts that each rank holds, equal to within one.

    ranks_per_node: ranks in a row that share a host, 0 when it does not matter. Then experts of one routing group
    (num_groups of equal size, in a row) stay on one node, as many groups on each, and so do the copies of an expert: a
    token routed to few groups goes to few nodes. Where groups or slots cannot be dealt out evenly, or a rank has more
    slots than a node has experts, it does not matter.
    """

    slots: tuple[int, ...]
    ranks_per_node: int = 0
    num_groups: int = 1

    def num_nodes(self, num_experts: int) -> int:
        """Among which the experts are dealt out; 1 when nodes do not matter."""
        ranks, per_node = len(self.slots), self.ranks_per_node or len(self.slots)
        nodes = ranks // per_node
        if ranks % per_node or self.num_groups % nodes or num_experts % self.num_groups:
            return 1
        shares = {sum(self.slots[first : first + per_node]) for first in range(0, ranks, per_node)}
        return nodes if len(shares) == 1 and max(self.slots) * nodes <= num_experts else 1


def busiest(counts: np.ndarray, placement: ExpertPlacement) -> float:
    """Sum over steps of the load of the busiest rank, in (token, k) pairs, when copies share evenly. counts: int64
    [T, E]."""
    return float(rank_loads(counts, placement).max(1).sum())


def rank_loads(counts: np.ndarray, placement: ExpertPlacement) -> np.ndarray:
    """fp64 [T, R]: pairs of each step that each rank computes, when copies share evenly. counts: int64 [T, E]."""
    share = counts / np.array([len(copies) for copies in placement.physical_of])
    ranks = range(placement.world_size)
    return np.stack([share[:, placement.local_experts(rank)].sum(1) for rank in ranks], 1)


def pack(counts: np.ndarray, gang: Gang, current: ExpertPlacement | None = None) -> ExpertPlacement:
    """The placement with the lowest `busiest` that is found within BUDGET. counts: int64 [T, E], of recent steps.

    Which experts get several copies is chosen with the packing: first the hottest, as DeepSeek's EPLB does it, then
    whatever lowers the cost. Stays as near to `current` as costs little, and is never worse than DeepSeek's choice.
    Every rank gets the same answer from the same counts: it is found in integers and without a clock. Raises ValueError
    when the experts do not fit.
    """
    num_experts, ranks = counts.shape[1], np.arange(len(gang.slots))
    rank_of = np.repeat(ranks, gang.slots)
    num_nodes = gang.num_nodes(num_experts)
    node_of = ranks // (len(ranks) // num_nodes)

    fresh = Descent(counts, rank_of, node_of, _fresh(counts, gang, rank_of, node_of))
    simple = fresh.cost
    fresh.run(BUDGET, KICKS)
    if current is None:
        return _placement(num_experts, gang, fresh.logical)
    at_home = _at_home(fresh.logical, current, gang, rank_of, node_of)
    if not _keeps_groups(current, gang, num_nodes, node_of):
        return _placement(num_experts, gang, at_home)
    near = Descent(counts, rank_of, node_of, np.array(current.logical_of))
    near.run(BUDGET, KICKS)
    if near.cost > simple or fresh.cost < near.cost - int(near.cost * MOVING_PAYS):
        return _placement(num_experts, gang, at_home)
    return _placement(num_experts, gang, _at_home(near.logical, current, gang, rank_of, node_of))


def _placement(num_experts: int, gang: Gang, logical: np.ndarray) -> ExpertPlacement:
    return ExpertPlacement(num_experts, gang.slots, tuple(logical.tolist()))


def _keeps_groups(placement: ExpertPlacement, gang: Gang, num_nodes: int, node_of: np.ndarray) -> bool:
    """Whether every routing group is on one node, and as many on each."""
    if num_nodes == 1:
        return True
    size = placement.num_logical // gang.num_groups
    nodes = [{int(node_of[placement.rank_of[p]]) for p in copies} for copies in placement.physical_of]
    groups = [set().union(*nodes[first : first + size]) for first in range(0, placement.num_logical, size)]
    if any(len(group) > 1 for group in groups):
        return False
    return len(set(np.bincount([node for group in groups for node in group], minlength=num_nodes))) == 1


def _fresh(counts: np.ndarray, gang: Gang, rank_of: np.ndarray, node_of: np.ndarray) -> np.ndarray:
    """A packing from scratch, [P]: groups to nodes, then copies of the hottest experts, then the heaviest copy to the
    least loaded rank."""
    totals = counts.sum(0) << UNIT_BITS
    logical = np.empty(len(rank_of), np.int64)
    for node, experts in enumerate(_experts_of_nodes(totals, gang.num_groups, int(node_of[-1]) + 1)):
        ranks = np.flatnonzero(node_of == node)
        slots = [gang.slots[rank] for rank in ranks]
        copies = _copies(totals[experts], sum(slots), sum(count > 0 for count in slots))
        packed = _heaviest_first(totals[experts] // copies, copies, slots)
        logical[node_of[rank_of] == node] = experts[np.concatenate(packed).astype(np.int64)]
    return logical


def _experts_of_nodes(totals: np.ndarray, num_groups: int, num_nodes: int) -> list[np.ndarray]:
    """Experts of each node: the heaviest group to the node that has least."""
    if num_nodes == 1:
        return [np.arange(len(totals))]
    groups = np.arange(len(totals)).reshape(num_groups, -1)
    weights = totals[groups].sum(1)
    packed = _heaviest_first(weights, np.ones(num_groups, np.int64), [num_groups // num_nodes] * num_nodes)
    return [np.sort(groups[of_node].reshape(-1)) for of_node in packed]


def _copies(totals: np.ndarray, num_slots: int, most: int) -> np.ndarray:
    """int64 [E] how many copies of each expert: one more for the one whose copies are heaviest, until all slots are
    taken; never more than `most`, one per rank."""
    if not len(totals) <= num_slots <= len(totals) * most:
        raise ValueError(f"{len(totals)} experts do not fill {num_slots} slots of {most} ranks, none twice on a rank")
    copies = np.ones(len(totals), np.int64)
    for _ in range(num_slots - len(totals)):
        copies[np.where(copies < most, totals // copies, -1).argmax()] += 1
    return copies


def _heaviest_first(weights: np.ndarray, copies: np.ndarray, slots: Sequence[int]) -> list[list[int]]:
    """Items of each bin: the heaviest to the least loaded bin that has a free slot and no copy of it yet."""
    packed: list[list[int]] = [[] for _ in slots]
    loads = [0] * len(slots)
    for item in np.repeat(np.arange(len(weights)), copies)[np.argsort(-np.repeat(weights, copies), kind="stable")]:
        free = [at for at, taken in enumerate(packed) if len(taken) < slots[at]]
        fitting = [at for at in free if item not in packed[at]]
        target = min(fitting, key=loads.__getitem__) if fitting else _make_room(packed, free[0], item)
        packed[target].append(int(item))
        for at in {target, free[0]}:
            loads[at] = int(weights[packed[at]].sum())
    return packed


def _make_room(packed: list[list[int]], free: int, item: int) -> int:
    """All bins with a free slot hold a copy of `item`: a bin without one, from which something has gone to `free`."""
    for at, taken in enumerate(packed):
        movable = [other for other in taken if other not in packed[free]]
        if item not in taken and movable:
            taken.remove(movable[0])
            packed[free].append(movable[0])
            return at
    raise ValueError(f"no rank has room for another copy of expert {item}: slots are too uneven")


def _at_home(
    logical: np.ndarray, current: ExpertPlacement, gang: Gang, rank_of: np.ndarray, node_of: np.ndarray
) -> np.ndarray:
    """The same packing with ranks exchanged so that most experts stay on their rank, and those in their slot."""
    ranks = range(len(gang.slots))
    old = [current.local_experts(rank) for rank in ranks]
    new = [logical[rank_of == rank].tolist() for rank in ranks]
    overlaps = [
        (-len(set(new[one]) & set(old[other])), one != other, one, other)
        for one in ranks
        for other in ranks
        if gang.slots[one] == gang.slots[other] and node_of[one] == node_of[other]
    ]
    home: dict[int, int] = {}
    for _, _, one, other in sorted(overlaps):
        if one not in home and other not in home.values():
            home[one] = other
    of_rank = {other: _in_slots(new[one], old[other]) for one, other in home.items()}
    return np.array([expert for rank in ranks for expert in of_rank[rank]], np.int64)


def _in_slots(new: Sequence[int], old: Sequence[int]) -> list[int]:
    """`new` in an order in which whatever is in `old`, too, keeps its place."""
    arriving = iter(sorted(set(new) - set(old)))
    return [expert if expert in new else next(arriving) for expert in old]
