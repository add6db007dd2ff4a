"""Dispatch without ranks: this one holds every expert."""

import numpy as np
import torch
from torch import Tensor

from ep.dispatch import MAX_TOKENS, Dispatched, Dispatcher, Log, Setup, inverse, weighted_sum
from ep.placement import Placements


class LocalDispatcher(Dispatcher):
    """Sorts rows by expert; enters no collective."""

    def __init__(
        self,
        placements: Placements,
        rank: int,
        device: torch.device,
        log: Log | None = None,
        max_tokens: int = MAX_TOKENS,
    ):
        for layer in placements.layers:
            if layer.world_size != 1:
                raise ValueError(f"experts.backend local is for dp 1, not {layer.world_size}; use alltoall")
        super().__init__(placements, rank, device, log, max_tokens)

    def dispatch(self, layer: int, x: Tensor, topk_ids: Tensor, weights: Tensor) -> Dispatched:
        physical, top_k = self._physical(layer, topk_ids), topk_ids.shape[1]
        order = np.argsort(physical, kind="stable")
        counts = np.bincount(physical, minlength=self.placements.layers[layer].num_physical)
        rows = x.index_select(0, self._index(order // top_k))
        return Dispatched(rows, counts.tolist(), (self._index(inverse(order)), weights))

    def combine(self, rows: Tensor, handle: tuple[Tensor, Tensor]) -> Tensor:
        undo, weights = handle
        return weighted_sum(rows.index_select(0, undo).unflatten(0, weights.shape), weights)


def make(setup: Setup) -> LocalDispatcher:
    return LocalDispatcher(setup.placements, setup.rank, setup.device, setup.log, setup.max_tokens)
