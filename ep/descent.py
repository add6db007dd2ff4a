"""A packing of expert copies that gets better step by step: the search behind `ep.balance`."""

from random import Random

import numpy as np

# Loads are integers in units of 1/1024 pair, so that every rank finds the same packing, whatever its processor.
UNIT_BITS = 10

# What looking for a swap costs besides the loads computed, in loads.
CALL = 15_000


class Descent:
    """Owns a packing and lowers its cost: the sum over steps of the busiest rank's load, in 1/1024 pairs.

    counts: int64 [T, E] pairs of each step that went to each expert; copies of an expert share them evenly.
    rank_of: [P] rank of each slot, rising; node_of: [R] node of each rank, which experts do not leave.
    logical: [P] the expert in each slot, no expert twice on a rank.
    """

    def __init__(self, counts: np.ndarray, rank_of: np.ndarray, node_of: np.ndarray, logical: np.ndarray) -> None:
        self.counts = counts << UNIT_BITS
        self.rank_of = rank_of
        self.node_of = node_of
        self.logical = logical.copy()
        self.evaluated = 0  # loads computed: a measure of the time spent
        self._measure()

    @property
    def cost(self) -> int:
        return int(self.loads.max(1).sum())

    def run(self, budget: int, kicks: int) -> None:
        """Go down to where neither a swap nor another choice of copies helps; then `kicks` times swap at random, go
        down again and keep what is better. Ends when `evaluated` has risen by `budget`."""
        random, end = Random(0), self.evaluated + budget
        self._descend(end)
        best, cost = self.logical.copy(), self.cost
        for _ in range(kicks):
            if self.evaluated >= end or not self._kick(random):
                break
            self._descend(end)
            if self.cost < cost:
                best, cost = self.logical.copy(), self.cost
            else:
                self.logical = best.copy()
                self._measure()
        self.logical = best
        self._measure()

    def _measure(self) -> None:
        """Everything that follows from `logical`."""
        steps, experts = self.counts.shape
        ranks = len(self.node_of)
        self.copies = np.bincount(self.logical, minlength=experts)
        self.share = self.counts // self.copies  # [T, E] what each copy gets
        self.holds = np.zeros((ranks, experts), bool)
        self.holds[self.rank_of, self.logical] = True
        self.loads = np.zeros((steps, ranks), np.int64)
        for rank in range(ranks):
            self.loads[:, rank] = self.share[:, self.holds[rank]].sum(1)

    def _descend(self, end: int) -> None:
        while self.evaluated < end and self._lower():
            pass

    def _lower(self) -> bool:
        """The best swap for the rank that is busiest longest; if it has none, for the next; if nobody has, the same
        with copies, which are changed seldom and tried at greater cost."""
        ranks = _most_frequent(self.loads.argmax(1))
        return any(map(self._swap, ranks)) or any(map(self._recopy, ranks))

    def _swap(self, rank: int) -> bool:
        """Exchange an expert of `rank` for one of another rank of its node, if the cost falls."""
        mine = np.flatnonzero(self.rank_of == rank)
        others = np.flatnonzero((self.node_of[self.rank_of] == self.node_of[rank]) & (self.rank_of != rank))
        if not len(mine) or not len(others):
            return False
        theirs = self.rank_of[others]
        change = self.share[:, None, self.logical[others]] - self.share[:, self.logical[mine], None]  # [T, M, O]
        costs = self.loads[:, theirs][:, None, :] - change
        np.maximum(costs, self._most_without(rank)[:, theirs][:, None, :], out=costs)
        change += self.loads[:, rank, None, None]
        np.maximum(costs, change, out=costs)
        self.evaluated += costs.size + CALL
        total = costs.sum(0)
        total[self.holds[theirs][:, self.logical[mine]].T | self.holds[rank, self.logical[others]]] = total.max() + 1
        at = int(total.argmin())
        if total.flat[at] >= self.cost:
            return False
        self._exchange(mine[at // len(others)], others[at % len(others)])
        return True

    def _exchange(self, one: int, other: int) -> None:
        """Swap the experts in two slots."""
        logical, (a, b) = self.logical, self.rank_of[[one, other]]
        change = self.share[:, logical[other]] - self.share[:, logical[one]]
        self.loads[:, a] += change
        self.loads[:, b] -= change
        self.holds[[a, b], logical[[one, other]]] = False
        logical[[one, other]] = logical[[other, one]]
        self.holds[[a, b], logical[[one, other]]] = True

    def _recopy(self, rank: int) -> bool:
        """Give up a copy of an expert that has several for one more copy of an expert of `rank`, if the cost falls."""
        logical, copies = self.logical, self.copies
        spare = np.flatnonzero((copies[logical] > 1) & (self.node_of[self.rank_of] == self.node_of[rank]))
        wanted = np.flatnonzero(self.holds[rank] & (copies < np.count_nonzero(self.node_of == self.node_of[rank])))
        if not len(spare) or not len(wanted):
            return False
        given, places = logical[spare], self.rank_of[spare]
        fewer, more = self.counts[:, given] // (copies[given] - 1), self.counts[:, wanted] // (copies[wanted] + 1)
        without = (fewer - self.share[:, given])[:, :, None] * self.holds[:, given].T  # [T, S, R]
        without[:, np.arange(len(spare)), places] = -self.share[:, given]
        with_one_more = (more - self.share[:, wanted])[:, :, None] * self.holds[:, wanted].T  # [T, W, R]
        loads = (self.loads[:, None, :] + without)[:, :, None, :] + with_one_more[:, None]  # [T, S, W, R]
        loads[:, np.arange(len(spare)), :, places] += more
        self.evaluated += loads.size + CALL
        total = loads.max(3).sum(0)
        total[self.holds[places][:, wanted]] = total.max() + 1  # the same expert twice on a rank, or itself
        at = int(total.argmin())
        if total.flat[at] >= self.cost:
            return False
        logical[spare[at // len(wanted)]] = wanted[at % len(wanted)]
        self._measure()
        return True

    def _most_without(self, rank: int) -> np.ndarray:
        """[T, R] the greatest load of all ranks but `rank` and this one."""
        rest = self.loads.copy()
        rest[:, rank] = -1
        steps = np.arange(len(rest))
        first = rest.argmax(1)
        most = np.repeat(rest[steps, first][:, None], rest.shape[1], 1)
        rest[steps, first] = -1
        most[steps, first] = rest.max(1)
        return most

    def _kick(self, random: Random) -> bool:
        """Three swaps at random. False: none is possible."""
        done = 0
        for _ in range(32):
            one, other = random.randrange(len(self.logical)), random.randrange(len(self.logical))
            a, b = self.rank_of[one], self.rank_of[other]
            foreign = not self.holds[a, self.logical[other]] and not self.holds[b, self.logical[one]]
            if foreign and self.node_of[a] == self.node_of[b]:
                self._exchange(one, other)
                done += 1
                if done == 3:
                    break
        return done > 0


def _most_frequent(ranks: np.ndarray) -> list[int]:
    """Distinct values, the most frequent first, then the least."""
    values, counts = np.unique(ranks, return_counts=True)
    return [int(value) for value in values[np.argsort(-counts, kind="stable")]]
