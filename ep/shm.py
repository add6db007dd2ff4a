"""Dispatch through shared memory: the ranks of one host, tokens on the CPU.

Each rank has an area that all others see (`ep.region`), and a line on a board where it says how far it is (`ep.board`):

    ids     int32 [max_tokens, k]       physical experts of its tokens
    tokens  rows  [max_tokens]
    pairs   rows  [max_tokens, k]       what the experts made of each (token, k) pair

- dispatch: a rank writes its ids and tokens and says how many; when all have, each takes the rows of its experts.
- combine: a rank writes every output to the place of its pair in the area of the token's rank; when all have, each sums
  its own pairs.

Two exchanges per layer, and none for the sizes, which are on the board. A row is copied twice there and once back. An
area needs no lock: ids and tokens are written anew only after everybody has combined, so has read them; pairs are
written only after their rank has dispatched anew, so has summed the old ones. Nobody writes outside an area: the place
of a pair follows from ids and numbers of tokens that are checked first.

Memory on the host, shared and taken when first used: world size * max_tokens * (4 k + (k + 1) * bytes of a row).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ep.board import COMBINED, DISPATCHED, Board
from ep.dispatch import (
    CPU,
    MAX_TOKENS,
    TIMEOUT_S,
    BackendUnavailable,
    CollectiveFailed,
    Dispatched,
    Dispatcher,
    Log,
    Setup,
    weighted_sum,
)
from ep.owners import Owners
from ep.placement import ExpertPlacement, Placements
from ep.region import NotShared, Region, open_region

_ALIGNMENT = 64


class _Areas:
    """All ranks' areas for tokens of one dtype, width and top_k, as arrays by rank. A row is one element."""

    def __init__(self, region: Region, max_tokens: int, top_k: int, x: Tensor):
        self.row = np.dtype(f"V{x.shape[1] * x.element_size()}")
        size, num_pairs = region.size, max_tokens * top_k
        shapes = ((np.dtype(np.int32), num_pairs), (self.row, max_tokens), (self.row, num_pairs))
        lengths = [-(-size * dtype.itemsize * count // _ALIGNMENT) * _ALIGNMENT for dtype, count in shapes]
        memory, starts = region.rest(sum(lengths)), np.cumsum([0, *lengths])
        parts = [
            np.frombuffer(memory, dtype, size * count, start).reshape(size, count)
            for (dtype, count), start in zip(shapes, starts, strict=False)
        ]
        self.ids, self.tokens, self.pairs = parts
        own = torch.from_numpy(self.pairs[region.rank].view(np.uint8))
        self.own_pairs = own.view(x.dtype).view(max_tokens, top_k, x.shape[1])

    def rows(self, tensor: Tensor) -> np.ndarray:
        """A tensor [N, H] as rows [N] in the same memory."""
        return tensor.view(torch.uint8).numpy().reshape(-1).view(self.row)


@dataclass(frozen=True, slots=True)
class _Handle:
    areas: _Areas
    places: np.ndarray  # int64 [R] of each output among the pairs of all ranks
    weights: Tensor  # fp32 [T, k]


class ShmDispatcher(Dispatcher):
    """Owns the region. All ranks must be on the region's host."""

    def __init__(
        self,
        placements: Placements,
        rank: int,
        region: Region,
        log: Log | None = None,
        max_tokens: int = MAX_TOKENS,
        timeout_s: float = TIMEOUT_S,
    ):
        super().__init__(placements, rank, CPU, log, max_tokens)
        self._region = region
        self._board = Board(region.board, rank, region.size, timeout_s)
        self._owners = [Owners(layer, rank) for layer in placements.layers]
        self._areas: dict[tuple[int, int, torch.dtype], _Areas] = {}
        self._number = 0  # of the layers dispatched so far

    def place(self, layer: int, placement: ExpertPlacement) -> None:
        super().place(layer, placement)
        self._owners[layer] = Owners(placement, self.rank)

    def dispatch(self, layer: int, x: Tensor, topk_ids: Tensor, weights: Tensor) -> Dispatched:
        physical, top_k, x = self._physical(layer, topk_ids), topk_ids.shape[1], x.contiguous()
        areas = self._areas_for(x, top_k)
        areas.ids[self.rank, : len(physical)] = physical
        areas.tokens[self.rank, : len(x)] = areas.rows(x)
        self._number += 1
        agreed = layer, self.placements.epoch, top_k, areas.row.itemsize
        self._exchange(b"dispatch", DISPATCHED, len(x), (*agreed, len(x)))

        num_pairs = [top_k * count for count in self._announced_by_all(agreed)]
        owners, capacity = self._owners[layer], areas.ids.shape[1]
        ids = np.concatenate([ids[:count] for ids, count in zip(areas.ids, num_pairs, strict=True)])
        if (stranger := owners.stranger(ids, num_pairs)) is not None:
            raise CollectiveFailed(f"rank {self.rank}: rank {stranger} sends tokens to an expert that does not exist")
        mine, counts = owners.claim(ids)
        place_of = [np.arange(rank * capacity, rank * capacity + count) for rank, count in enumerate(num_pairs)]
        places = np.concatenate(place_of)[mine]
        rows = x.new_empty(len(places), x.shape[1])
        np.take(areas.tokens.reshape(-1), places // top_k, out=areas.rows(rows), mode="clip")  # "raise" would buffer
        return Dispatched(rows, counts, _Handle(areas, places, weights))

    def combine(self, rows: Tensor, handle: _Handle) -> Tensor:
        areas, weights = handle.areas, handle.weights
        areas.pairs.reshape(-1)[handle.places] = areas.rows(rows.contiguous())
        self._exchange(b"combine", COMBINED, len(rows))
        return weighted_sum(areas.own_pairs[: len(weights)], weights)

    def close(self) -> None:
        self._board.leave()

    def _exchange(self, kind: bytes, column: int, size: int, facts: tuple[int, ...] = ()) -> None:
        """The only place that waits for others."""
        self.num_collectives += 1
        entry = self.log.enter(kind, size, self.num_collectives)
        self._board.publish(column, self._number, facts)
        self._board.wait(column, self._number)
        self.log.leave(entry)

    def _announced_by_all(self, agreed: tuple[int, ...]) -> list[int]:
        """Every rank's number of tokens. Raises CollectiveFailed when one dispatches something else than this rank."""
        by_rank = self._board.facts(len(agreed) + 1)
        for rank, (*found, _) in enumerate(by_rank):
            if tuple(found) != agreed:
                raise CollectiveFailed(
                    f"rank {self.rank}: rank {rank} dispatches (layer, placement epoch, top_k, bytes of a row) "
                    f"{tuple(found)}, this rank {agreed}"
                )
        num_tokens = [facts[-1] for facts in by_rank]
        self._believe(num_tokens)
        return num_tokens

    def _areas_for(self, x: Tensor, top_k: int) -> _Areas:
        key = top_k, x.shape[1], x.dtype
        if key not in self._areas:
            self._areas[key] = _Areas(self._region, self.max_tokens, top_k, x)
        return self._areas[key]


def make(setup: Setup) -> ShmDispatcher:
    """Raises BackendUnavailable, on all ranks, when they do not share a host."""
    if setup.device.type != "cpu":
        raise BackendUnavailable(f"experts.backend shm is for tokens on CPUs, not on {setup.device}; use alltoall")
    try:
        region = open_region(setup.ranks)
    except NotShared as reason:
        raise BackendUnavailable(f"experts.backend shm: {reason}; use alltoall") from None
    return ShmDispatcher(setup.placements, setup.rank, region, setup.log, setup.max_tokens, setup.timeout_s)
