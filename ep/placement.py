"""Which rank holds which expert: the one answer that loader, dispatcher and balancer share."""

from dataclasses import dataclass
from functools import cached_property


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
    def contiguous(cls, num_experts: int, world_size: int) -> "ExpertPlacement":
        """One copy each, in order, as even as it goes: 8 experts on 3 ranks are 3, 3, 2; 2 on 3 are 1, 1, 0."""
        if world_size < 1:
            raise ValueError(f"world size {world_size} makes no sense")
        share, rest = divmod(num_experts, world_size)
        counts = tuple(share + (rank < rest) for rank in range(world_size))
        return cls(num_experts, counts, tuple(range(num_experts)))

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

    def preferred(self, source: int) -> tuple[int, ...]:
        """[num_logical] the copy that tokens of rank `source` go to: its own if there is one, else spread by rank."""
        chosen = []
        for copies in self.physical_of:
            own = [physical for physical in copies if self.rank_of[physical] == source]
            chosen.append(own[0] if own else copies[source % len(copies)])
        return tuple(chosen)


@dataclass(frozen=True)
class Placements:
    """Where the experts of all MoE layers live.

    `layers[i]` is the placement of the i-th MoE layer (dense layers do not count). `epoch` names them all: it rises by
    one with every layer that is placed anew, and ranks with different epochs must not exchange tokens. Raises
    ValueError when the layers are not of the same gang.
    """

    layers: tuple[ExpertPlacement, ...]
    epoch: int = 0

    def __post_init__(self) -> None:
        if len({layer.world_size for layer in self.layers}) > 1:
            raise ValueError(f"layers are placed on {sorted({layer.world_size for layer in self.layers})} ranks")

    @classmethod
    def contiguous(cls, num_layers: int, num_experts: int, world_size: int) -> "Placements":
        """`ExpertPlacement.contiguous` in every layer."""
        return cls((ExpertPlacement.contiguous(num_experts, world_size),) * num_layers)

    def replaced(self, layer: int, placement: ExpertPlacement) -> "Placements":
        """The next epoch, in which `layer` is placed so."""
        return Placements((*self.layers[:layer], placement, *self.layers[layer + 1 :]), self.epoch + 1)
