"""Dispatch without ranks: this one holds every expert."""

import numpy as np
import torch
from torch import Tensor

from ep.dispatch import Dispatched, Dispatcher, Log, inverse
from ep.placement import ExpertPlacement


class LocalDispatcher(Dispatcher):
    """Sorts rows by expert; enters no collective."""

    def __init__(self, placement: ExpertPlacement, rank: int, device: torch.device, log: Log | None = None):
        if placement.world_size != 1:
            raise ValueError(f"experts.backend local is for dp 1, not {placement.world_size}; use alltoall")
        super().__init__(placement, rank, device, log)

    def begin_step(self, num_tokens: int) -> None:
        """Nobody else to tell."""

    def dispatch(self, x: Tensor, topk_ids: Tensor) -> Dispatched:
        physical, top_k = self._physical(topk_ids), topk_ids.shape[1]
        order = np.argsort(physical, kind="stable")
        counts = np.bincount(physical, minlength=self.placement.num_physical)
        rows = x.index_select(0, self._index(order // top_k))
        return Dispatched(rows, counts.tolist(), (self._index(inverse(order)), top_k))

    def combine(self, rows: Tensor, handle: tuple[Tensor, int]) -> Tensor:
        undo, top_k = handle
        return rows.index_select(0, undo).unflatten(0, (-1, top_k))
