"""How tokens reach their experts and come back: the interface of all backends."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ep.placement import ExpertPlacement

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

    Which row goes where is worked out on the host: split sizes must be known there anyway, and for the few pairs of a
    step numpy is several times faster than tensor operations.
    """

    def __init__(self, placement: ExpertPlacement, rank: int, device: torch.device, log: Log | None = None):
        self.placement = placement
        self.rank = rank
        self.device = device
        self.log: Log = log or NoLog()
        self.num_collectives = 0
        self._preferred = np.array(placement.preferred(rank))

    def _physical(self, topk_ids: Tensor) -> np.ndarray:
        """Physical expert of every (token, k) pair: int64 [T * k]."""
        return self._preferred[topk_ids.cpu().numpy().reshape(-1)]

    def _index(self, rows: np.ndarray) -> Tensor:
        """Row numbers for an index operation on this rank's device."""
        return torch.from_numpy(rows).to(self.device)

    @abstractmethod
    def begin_step(self, num_tokens: int) -> None:
        """Before the first dispatch of a forward: this rank will dispatch `num_tokens` tokens in each layer."""

    @abstractmethod
    def dispatch(self, x: Tensor, topk_ids: Tensor) -> Dispatched:
        """x [T, H] and the logical experts of each token, int64 [T, k]."""

    @abstractmethod
    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Experts' outputs, in the order of `Dispatched.rows` -> [T, k, H] at the source, in the order of its topk_ids.

        The weighted sum over k is the caller's, so it is the same whatever the backend and the number of ranks.
        """


def inverse(order: np.ndarray) -> np.ndarray:
    """The permutation that undoes `order`."""
    undo = np.empty_like(order)
    undo[order] = np.arange(len(order))
    return undo


def make_dispatcher(
    backend: str,
    placement: ExpertPlacement,
    rank: int,
    group: ProcessGroup | None,
    device: torch.device = CPU,
    log: Log | None = None,
) -> Dispatcher:
    """The dispatcher `backend` (`ExpertConfig.backend`) for tokens on `device`. A backend is imported only when chosen.

    Raises ValueError when the backend does not fit the number of ranks.
    """
    world_size = placement.world_size
    if backend == "local" or (backend == "auto" and world_size == 1):
        from ep.local import LocalDispatcher

        return LocalDispatcher(placement, rank, device, log)
    if backend in ("alltoall", "auto"):
        from ep.alltoall import AllToAllDispatcher

        if group is None:
            raise ValueError(f"experts.backend {backend} needs a process group on {world_size} ranks")
        return AllToAllDispatcher(placement, rank, group, device, log=log)
    raise ValueError(f"unknown experts.backend {backend!r}")
