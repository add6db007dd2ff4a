"""How tokens reach their experts and come back: the interface of all backends."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ep.placement import ExpertPlacement, Placements, Turns

CPU = torch.device("cpu")


class CollectiveFailed(RuntimeError):
    """An exchange with other ranks did not end: one of them is gone, or late by more than the group's time-out."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows for this rank's experts: rows [R, H] sorted by local expert (then by source rank, then by token), counts[e]
    of them for local expert e. `handle` is the backend's own and goes back to `combine`."""

    rows: Tensor
    counts: list[int]
    handle: Any


class Log(Protocol):
    """Where collectives, and the work of the experts between them, are noted while they run."""

    def enter(self, kind: bytes, size: int = 0, ordinal: int = 0) -> int:
        """Begin an entry. `size`: rows; `ordinal`: which collective it is since the start, 0 for none."""
        ...

    def leave(self, entry: int) -> None:
        """End the entry that `enter` numbered so."""
        ...


class NoLog:
    """Notes nothing."""

    def enter(self, kind: bytes, size: int = 0, ordinal: int = 0) -> int:
        return 0

    def leave(self, entry: int) -> None:
        return


class Dispatcher(ABC):
    """Carries tokens to the ranks that own their experts. Any rank may have no tokens, any expert no rows.

    All ranks of a gang call the same methods in the same order. The collectives that follow depend only on what
    `begin_step` agreed and on sizes exchanged before. `num_collectives` counts those entered since the start.

    Owns where the experts are, as far as tokens are concerned: `placements`, changed by `place` alone. `counts`, int64
    [layers, num_logical], is how many (token, k) pairs of this rank went to each expert of each layer since the start.

    Which row goes where is worked out on the host: split sizes must be known there anyway, and for the few pairs of a
    step numpy is several times faster than tensor operations.
    """

    def __init__(self, placements: Placements, rank: int, device: torch.device, log: Log | None = None):
        self.placements = placements
        self.rank = rank
        self.device = device
        self.log: Log = log or NoLog()
        self.num_collectives = 0
        experts = max((layer.num_logical for layer in placements.layers), default=0)
        self.counts = np.zeros((len(placements.layers), experts), np.int64)
        self._turns = [Turns(layer, rank) for layer in placements.layers]

    def place(self, layer: int, placement: ExpertPlacement) -> None:
        """From the next dispatch on, `layer` is placed so. All ranks do it between the same two steps, when the
        experts are where it says."""
        self.placements = self.placements.replaced(layer, placement)
        self._turns[layer] = Turns(placement, self.rank)

    def _physical(self, layer: int, topk_ids: Tensor) -> np.ndarray:
        """Physical expert of every (token, k) pair: int64 [T * k]. Counts them."""
        logical = topk_ids.cpu().numpy().reshape(-1)
        physical = self._turns[layer].physical(logical)
        self.counts[layer] += np.bincount(logical, minlength=self.counts.shape[1])
        return physical

    def _index(self, rows: np.ndarray) -> Tensor:
        """Row numbers for an index operation on this rank's device."""
        return torch.from_numpy(rows).to(self.device)

    @abstractmethod
    def begin_step(self, num_tokens: int) -> None:
        """Before the first dispatch of a forward: this rank will dispatch `num_tokens` tokens in each layer."""

    @abstractmethod
    def dispatch(self, layer: int, x: Tensor, topk_ids: Tensor, weights: Tensor) -> Dispatched:
        """x [T, H], the logical experts of each token, int64 [T, k], and their weights, fp32 [T, k]."""

    @abstractmethod
    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Experts' outputs, in the order of `Dispatched.rows` -> [T, H] at the source.

        It is `weighted_sum` over k, in the order of the token's topk_ids, so the same whatever the backend and the
        number of ranks.
        """


def weighted_sum(pairs: Tensor, weights: Tensor) -> Tensor:
    """pairs [T, k, H], weights fp32 [T, k] -> [T, H], summed in fp32 in k order."""
    return (pairs * weights.unsqueeze(-1)).sum(1).to(pairs.dtype)


def inverse(order: np.ndarray) -> np.ndarray:
    """The permutation that undoes `order`."""
    undo = np.empty_like(order)
    undo[order] = np.arange(len(order))
    return undo


def make_dispatcher(
    backend: str,
    placements: Placements,
    rank: int,
    world_size: int,
    group: ProcessGroup | None,
    device: torch.device = CPU,
    log: Log | None = None,
) -> Dispatcher:
    """The dispatcher `backend` (`ExpertConfig.backend`) for tokens on `device`. A backend is imported only when chosen.

    Raises ValueError when the backend does not fit the number of ranks.
    """
    if backend == "local" or (backend == "auto" and world_size == 1):
        from ep.local import LocalDispatcher

        return LocalDispatcher(placements, rank, device, log)
    if backend in ("alltoall", "auto"):
        from ep.alltoall import AllToAllDispatcher

        if group is None:
            raise ValueError(f"experts.backend {backend} needs a process group on {world_size} ranks")
        return AllToAllDispatcher(placements, rank, group, device, log=log)
    raise ValueError(f"unknown experts.backend {backend!r}")
