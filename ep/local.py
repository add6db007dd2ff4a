"""Dispatch without ranks: this one holds every expert."""

import torch
from torch import Tensor

from ep.dispatch import Dispatched, Dispatcher, sort_by_slot
from ep.placement import ExpertPlacement


class LocalDispatcher(Dispatcher):
    """Sorts rows by expert; enters no collective."""

    def __init__(self, placement: ExpertPlacement, rank: int, device: torch.device):
        if placement.world_size != 1:
            raise ValueError(f"experts.backend local is for dp 1, not {placement.world_size}; use alltoall")
        super().__init__(placement, rank, device)

    def begin_step(self, num_tokens: int) -> None:
        """Nobody else to tell."""

    def dispatch(self, x: Tensor, topk_ids: Tensor) -> Dispatched:
        order, counts = sort_by_slot(self._physical(topk_ids), self.placement.num_physical)
        top_k = topk_ids.shape[1]
        rows = x.index_select(0, order // top_k)
        return Dispatched(rows, counts.tolist(), (order, top_k))

    def combine(self, rows: Tensor, handle: tuple[Tensor, int]) -> Tensor:
        order, top_k = handle
        return rows.new_empty(rows.shape).index_copy_(0, order, rows).unflatten(0, (-1, top_k))
