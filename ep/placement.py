"""Which rank holds which expert: the one answer that loader, dispatcher and balancer share."""

import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class ExpertPlacement:
    """Where the experts of one MoE layer live.

    Physical experts are numbered rank by rank, slot by slot: rank r holds `local_counts[r]` of them in a row.
    `logical_of[p]` is the logical expert (as in the checkpoint) that physical expert p is a copy of. Every logical
    expert has at least one copy, copies of one expert lie on different ranks, and a rank may hold none. Raises
    ValueError when this does not hold.
    """

    num_logical: int
    local_counts: tuple[int, ...]
    logical_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_logical < 1 or not self.local_counts or min(self.local_counts) < 0:
            raise ValueError(f"placement of {self.num_logical} experts on ranks {self.local_counts} makes no sense")
        if sum(self.local_counts) != len(self.logical_of):
            raise ValueError(f"ranks hold {sum(self.local_counts)} experts but {len(self.logical_of)} are placed")
        if set(self.logical_of) != set(range(self.num_logical)):
            raise ValueError(f"copies {self.logical_of} do not cover exactly the experts 0..{self.num_logical - 1}")
        for rank in range(self.world_size):
            if len(set(self.local_experts(rank))) != self.local_counts[rank]:
                raise ValueError(f"rank {rank} would hold two copies of one expert: {self.local_experts(rank)}")

    @classmethod
    def contiguous(cls, num_experts: int, world_size: int, num_redundant: int = 0) -> "ExpertPlacement":
        """In order, as even as it goes: 8 experts on 3 ranks are 3, 3, 2; 2 on 3 are 1, 1, 0.

        num_redundant: copies beyond the first of each expert, in the gang. They lie on the rank before, so that each
        rank holds experts in a row: 4 experts and 2 copies on 2 ranks are 0 1 2, 2 3 0.
        """
        if world_size < 1:
            raise ValueError(f"world size {world_size} makes no sense")
        if not 0 <= num_redundant <= num_experts * (world_size - 1):
            raise ValueError(
                f"{num_redundant} redundant experts do not fit: {num_experts} experts on {world_size} ranks have room "
                f"for {num_experts * (world_size - 1)}, as copies of one expert lie on different ranks"
            )
        counts = _even(num_experts + num_redundant, world_size)
        logical, first = [], 0
        for own, count in zip(_even(num_experts, world_size), counts, strict=True):
            logical += [(first + slot) % num_experts for slot in range(count)]
            first += own
        return cls(num_experts, counts, tuple(logical))

    @property
    def world_size(self) -> int:
        return len(self.local_counts)

    @property
    def num_physical(self) -> int:
        return len(self.logical_of)

    @cached_property
    def first_physical(self) -> tuple[int, ...]:
        """[world_size + 1] first physical expert of each rank, and the number of all."""
        starts = [0]
        for count in self.local_counts:
            starts.append(starts[-1] + count)
        return tuple(starts)

    @cached_property
    def physical_of(self) -> tuple[tuple[int, ...], ...]:
        """[num_logical] all copies of each logical expert, in rising order."""
        copies: list[list[int]] = [[] for _ in range(self.num_logical)]
        for physical, logical in enumerate(self.logical_of):
            copies[logical].append(physical)
        return tuple(tuple(group) for group in copies)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """[num_physical] rank of each physical expert."""
        return tuple(rank for rank, count in enumerate(self.local_counts) for _ in range(count))

    def slot_of(self, physical: int) -> int:
        """Index of a physical expert among those of its rank."""
        return physical - self.first_physical[self.rank_of[physical]]

    def local_experts(self, rank: int) -> tuple[int, ...]:
        """Logical experts that `rank` holds, by slot: what its loader reads."""
        return self.logical_of[self.first_physical[rank] : self.first_physical[rank + 1]]

    @cached_property
    def digest(self) -> int:
        """Stands for all of it; 32 bits."""
        return zlib.crc32(repr((self.num_logical, self.local_counts, self.logical_of)).encode())


class Turns:
    """Which copy each token of one rank goes to: the copies of an expert take turns, so that they share its load evenly
    whichever ranks have the tokens. Ranks begin at different copies. Owns whose turn it is."""

    def __init__(self, placement: ExpertPlacement, source: int) -> None:
        self._num = np.array([len(copies) for copies in placement.physical_of])
        self._copies = np.zeros((placement.num_logical, self._num.max()), np.int64)
        for logical, copies in enumerate(placement.physical_of):
            self._copies[logical, : len(copies)] = np.roll(copies, -source)
        self._sent = np.zeros(placement.num_logical, np.int64)

    def physical(self, logical: np.ndarray) -> np.ndarray:
        """The physical experts for the next (token, k) pairs, by their logical ones; both int64 [N]."""
        if self._copies.shape[1] == 1:
            return self._copies[logical, 0]
        order = np.argsort(logical, kind="stable")
        grouped = logical[order]
        turn = np.empty_like(logical)
        turn[order] = np.arange(len(logical)) - np.searchsorted(grouped, grouped)
        turn += self._sent[logical]
        self._sent += np.bincount(logical, minlength=len(self._sent))
        return self._copies[logical, turn % self._num[logical]]


def _even(number: int, shares: int) -> tuple[int, ...]:
    """As even as it goes, larger shares first."""
    share, rest = divmod(number, shares)
    return tuple(share + (index < rest) for index in range(shares))


@dataclass(frozen=True)
class Placements:
    """Where the experts of all MoE layers live.

    `layers[i]` is the placement of the i-th MoE layer (dense layers do not count). `epoch` names them all: it rises by
    one with every layer that is placed anew. Raises ValueError when the layers are not of the same gang.
    """

    layers: tuple[ExpertPlacement, ...]
    epoch: int = 0

    def __post_init__(self) -> None:
        if len({layer.world_size for layer in self.layers}) > 1:
            raise ValueError(f"layers are placed on {sorted({layer.world_size for layer in self.layers})} ranks")

    @classmethod
    def contiguous(cls, num_layers: int, num_experts: int, world_size: int, num_redundant: int = 0) -> "Placements":
        """`ExpertPlacement.contiguous` in every layer."""
        return cls((ExpertPlacement.contiguous(num_experts, world_size, num_redundant),) * num_layers)

    @cached_property
    def digest(self) -> int:
        """Stands for all of it, epoch included; 31 bits. Ranks with different ones must not exchange tokens."""
        return zlib.crc32(repr((self.epoch, *(layer.digest for layer in self.layers))).encode()) >> 1

    def replaced(self, layer: int, placement: ExpertPlacement) -> "Placements":
        """The next epoch, in which `layer` is placed so."""
        return Placements((*self.layers[:layer], placement, *self.layers[layer + 1 :]), self.epoch + 1)
