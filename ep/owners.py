"""Where the experts of one layer are, as arrays, seen from one rank."""

import numpy as np

from ep.placement import ExpertPlacement


class Owners:
    """counts: experts of each rank; rank_of, slot_of: of each physical expert, int64 [num_physical], where slot_of is
    `num_local` for the experts of other ranks."""

    def __init__(self, placement: ExpertPlacement, rank: int):
        self.counts = list(placement.local_counts)
        self.num_local = placement.local_counts[rank]
        self.num_physical = placement.num_physical
        first = placement.first_physical[rank]
        self.slot_of = np.full(placement.num_physical, self.num_local, np.int16)  # numpy sorts 16 bits by radix
        self.slot_of[first : first + self.num_local] = np.arange(self.num_local)
        self.rank_of = np.array(placement.rank_of)

    def claim(self, physical: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Of (token, k) pairs with these physical experts, [P], those for this rank: int64 [R] their numbers, sorted by
        slot and else in order, and how many there are for each slot."""
        slots = self.slot_of[physical]
        order = np.argsort(slots, kind="stable")
        counts = np.bincount(slots, minlength=self.num_local + 1)[: self.num_local].tolist()
        return order[: sum(counts)], counts

    def stranger(self, physical: np.ndarray, num_pairs: list[int]) -> int | None:
        """The rank that names a physical expert which does not exist, if any. num_pairs: pairs of each rank, in the
        order of `physical`."""
        if not len(physical) or (physical.min() >= 0 and physical.max() < self.num_physical):
            return None
        wrong = np.flatnonzero((physical < 0) | (physical >= self.num_physical))
        return int(np.searchsorted(np.cumsum(num_pairs), wrong[0], side="right"))
