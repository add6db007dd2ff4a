"""Dispatch by DeepSeek's DeepEP, for NVIDIA GPUs: a token travels once to each rank that has one of its experts.

The rank of the experts sums its share of a token's outputs, in fp32 and in k order, and DeepEP adds up the shares of
the ranks. For one or two experts per token in fp32 these are the bits of every other backend; for more, sums are
associated differently, and in bf16 shares are rounded on the way. With `exact` each (token, k) pair travels as a token
of its own, with one expert, and the weighted sum happens at the source as elsewhere: the same bits, for the price of
the rows that DeepEP would have saved.

DeepEP numbers experts rank by rank, equally many on each: where the placement is uneven, the last numbers of a rank are
nobody's. A rank without tokens dispatches one row that names no expert, so goes nowhere.

Memory on each GPU: DeepEP's own buffer, made for `max_tokens` (times k if exact) per rank at the first dispatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ep.deepep_buffer import ExpertBuffer, Received, find_deepep, make_buffer
from ep.dispatch import (
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
from ep.placement import ExpertPlacement, Placements

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Handle:
    """weights: of the source's tokens if they are still to be summed there, fp32 [T, k], else None."""

    received: Received
    order: Tensor  # int64 [R] of each row among the pairs received
    num_tokens: int
    weights: Tensor | None


class DeepEPDispatcher(Dispatcher):
    """Owns DeepEP's buffer. `module` is deep_ep, or something that does as it does."""

    def __init__(
        self,
        placements: Placements,
        rank: int,
        group: ProcessGroup,
        device: torch.device,
        module: Any,
        exact: bool = False,
        timeout_s: float = TIMEOUT_S,
        log: Log | None = None,
        max_tokens: int = MAX_TOKENS,
    ):
        super().__init__(placements, rank, device, log, max_tokens)
        self.group = group
        self.exact = exact
        self.timeout_s = timeout_s
        self._module = module
        self._buffer: ExpertBuffer | None = None
        self._numbers = [_numbers(layer) for layer in placements.layers]

    def place(self, layer: int, placement: ExpertPlacement) -> None:
        super().place(layer, placement)
        self._numbers[layer] = _numbers(placement)

    def dispatch(self, layer: int, x: Tensor, topk_ids: Tensor, weights: Tensor) -> Dispatched:
        top_k, num_tokens = topk_ids.shape[1], len(x)
        experts = self._index(self._numbers[layer][self._physical(layer, topk_ids)]).view(-1, top_k)
        at_source = weights if self.exact else None
        if self.exact:
            x, experts = x.repeat_interleave(top_k, 0), experts.view(-1, 1)
            weights = torch.ones_like(experts, dtype=torch.float32)
        if not len(x):
            x = x.new_zeros(1, x.shape[1])
            experts, weights = experts.new_full((1, experts.shape[1]), -1), weights.new_zeros(1, experts.shape[1])
        buffer = self._buffer_for(x, top_k)
        placement = self.placements.layers[layer]
        width, num_local = max(placement.local_counts), placement.local_counts[self.rank]
        num_experts = width * placement.world_size
        received = self._call(
            b"dispatch", num_tokens, lambda: buffer.dispatch(x.contiguous(), experts, weights, num_experts)
        )
        counts = list(received.counts)
        if len(counts) != width or any(counts[num_local:]):
            raise CollectiveFailed(f"rank {self.rank}: DeepEP brings rows {counts} for {num_local} experts")
        flat = received.experts.flatten()
        order = torch.argsort(torch.where(flat < 0, width, flat), stable=True)[: sum(counts)]
        rows = received.tokens.index_select(0, order // received.experts.shape[1])
        return Dispatched(rows, counts[:num_local], _Handle(received, order, num_tokens, at_source))

    def combine(self, rows: Tensor, handle: _Handle) -> Tensor:
        received, buffer = handle.received, self._buffer
        assert buffer is not None, "dispatch comes first"
        pairs = rows.new_zeros(received.experts.numel(), rows.shape[1])
        pairs[handle.order] = rows
        shares = weighted_sum(
            pairs.unflatten(0, received.experts.shape), received.weights.masked_fill(received.experts < 0, 0)
        )
        total = self._call(b"combine", len(rows), lambda: buffer.combine(shares, received.handle))
        if handle.weights is None:
            return total[: handle.num_tokens]
        return weighted_sum(total[: handle.weights.numel()].unflatten(0, handle.weights.shape), handle.weights)

    def _buffer_for(self, x: Tensor, top_k: int) -> ExpertBuffer:
        """All ranks make theirs in the first dispatch."""
        if x.is_cuda and x.dtype != torch.bfloat16:
            raise BackendUnavailable(f"experts.backend deepep moves bf16, not {x.dtype}; set engine.dtype to bfloat16")
        if self._buffer is None:
            tokens, per_token = (self.max_tokens * top_k, 1) if self.exact else (self.max_tokens, top_k)
            row_bytes = x.shape[1] * x.element_size()
            self._buffer = make_buffer(
                self._module, self.group, tokens, x.shape[1], row_bytes, per_token, self.timeout_s
            )
        return self._buffer

    def _call(self, kind: bytes, size: int, call: Callable[[], T]) -> T:
        """The only place that enters a collective."""
        self.num_collectives += 1
        entry = self.log.enter(kind, size, self.num_collectives)
        try:
            result = call()
        except RuntimeError as error:
            raise CollectiveFailed(
                f"rank {self.rank}: DeepEP's {kind.decode()}, number {self.num_collectives}, failed: {error}"
            ) from error
        self.log.leave(entry)
        return result


def _numbers(placement: ExpertPlacement) -> np.ndarray:
    """int64 [num_physical] what DeepEP calls each physical expert."""
    width = max(placement.local_counts)
    return np.concatenate([rank * width + np.arange(count) for rank, count in enumerate(placement.local_counts)])


def make(setup: Setup) -> DeepEPDispatcher:
    """Raises BackendUnavailable without GPUs or without the package."""
    module = find_deepep(setup.device)
    return DeepEPDispatcher(
        setup.placements, setup.rank, setup.ranks, setup.device, module, setup.exact_combine, setup.timeout_s,
        setup.log, setup.max_tokens,
    )  # fmt: skip
