"""Dispatch over torch.distributed's all-to-all: gloo on CPUs, NCCL on GPUs; the group decides.

Rows travel as bytes, so that any dtype goes over any backend. Two ways, chosen from what `begin_step` agreed:

- rows: counts per expert first, then each row to the rank of its expert. Bytes grow with top_k.
- tokens: every token whole, with its expert ids, to every rank. Bytes grow with the number of ranks, but sizes are
  known beforehand, so a collective per layer is saved. Right for small steps, where latency is all, and for few ranks.

Either way `combine` sends back one row per (token, k) pair, in an exchange whose sizes both sides know.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllToAllOptions, Work

from ep.dispatch import CollectiveFailed, Dispatched, Dispatcher, sort_by_slot
from ep.placement import ExpertPlacement

# Bytes per rank that may be sent in vain to save one collective: what a loopback or a network link moves meanwhile.
SPARE_BYTES = 128 << 10


def tokens_travel_whole(num_tokens: list[int], top_k: int, row_bytes: int, spare_bytes: int = SPARE_BYTES) -> bool:
    """Whether whole tokens cost at most `spare_bytes` more on the busiest rank than one row per (token, k) pair."""
    return max(num_tokens) * row_bytes * (len(num_tokens) - top_k) <= spare_bytes


@dataclass(frozen=True, slots=True)
class _Handle:
    """What `combine` needs: the sending order of outputs, split sizes, and how received pairs are numbered."""

    to_send: Tensor  # int64 [R]
    send_splits: list[int]  # [world_size] rows to each rank
    receive_splits: list[int]  # [world_size] rows from each rank, the sum is T * k
    pairs: Tensor  # int64 [T * k] (token, k) pair of each received row
    top_k: int


class AllToAllDispatcher(Dispatcher):
    """Exchange over a process group whose ranks are those of the placement. The group is the caller's."""

    def __init__(
        self,
        placement: ExpertPlacement,
        rank: int,
        group: ProcessGroup,
        device: torch.device,
        spare_bytes: int = SPARE_BYTES,
    ):
        """`device`: where the tokens are, and what the group's backend can send from."""
        super().__init__(placement, rank, device)
        if group.size() != placement.world_size or group.rank() != rank:
            raise ValueError(
                f"rank {rank} of {placement.world_size} got a group in which it is {group.rank()} of {group.size()}"
            )
        self.group = group
        self.spare_bytes = spare_bytes
        self.num_local = placement.local_counts[rank]
        self._options = AllToAllOptions()
        self._num_tokens: list[int] = []
        first = placement.first_physical[rank]
        slots = torch.full((placement.num_physical,), self.num_local)  # num_local: some other rank's
        slots[first : first + self.num_local] = torch.arange(self.num_local)
        self._slot_of = slots.to(device)
        self._rank_of = torch.tensor(placement.rank_of, device=device)
        self._sources = torch.empty(0, dtype=torch.int64, device=device)

    def begin_step(self, num_tokens: int) -> None:
        """Tell every rank how many tokens every other has."""
        world_size = self.placement.world_size
        mine = torch.full((world_size,), num_tokens, dtype=torch.int64, device=self.device)
        self._num_tokens = self._exchange(mine, [1] * world_size, [1] * world_size).tolist()
        self._sources = torch.repeat_interleave(
            torch.arange(world_size, device=self.device), torch.tensor(self._num_tokens, device=self.device)
        )

    def dispatch(self, x: Tensor, topk_ids: Tensor) -> Dispatched:
        if len(x) != self._num_tokens[self.rank]:
            raise ValueError(f"rank {self.rank} announced {self._num_tokens[self.rank]} tokens and dispatches {len(x)}")
        top_k = topk_ids.shape[1]
        row_bytes = x.shape[1] * x.element_size()
        if tokens_travel_whole(self._num_tokens, top_k, row_bytes, self.spare_bytes):
            return self._dispatch_tokens(x, self._physical(topk_ids), top_k)
        return self._dispatch_rows(x, self._physical(topk_ids), top_k)

    def combine(self, rows: Tensor, handle: _Handle) -> Tensor:
        outputs = rows.index_select(0, handle.to_send)
        received = self._exchange(outputs, handle.send_splits, handle.receive_splits)
        return torch.empty_like(received).index_copy_(0, handle.pairs, received).unflatten(0, (-1, handle.top_k))

    def _dispatch_tokens(self, x: Tensor, physical: Tensor, top_k: int) -> Dispatched:
        world_size, row_bytes = self.placement.world_size, x.shape[1] * x.element_size()
        ids = physical.to(torch.int32).view(-1, top_k)
        record = torch.cat((x.view(torch.uint8), ids.view(torch.uint8)), dim=1)
        work, received = self._start(record.repeat(world_size, 1), [len(x)] * world_size, self._num_tokens)
        owners = self._rank_of.index_select(0, physical)
        pairs, receive_splits = sort_by_slot(owners, world_size)
        self._finish(work)

        tokens = received[:, :row_bytes].view(x.dtype)
        physical = received[:, row_bytes:].contiguous().view(torch.int32).view(-1)
        slots = self._slot_of.index_select(0, physical)
        order = torch.argsort(slots, stable=True)
        sources = self._sources if top_k == 1 else self._sources.repeat_interleave(top_k)
        table = torch.bincount(slots * world_size + sources, minlength=(self.num_local + 1) * world_size)
        counts = table.cpu().numpy().reshape(-1, world_size)[: self.num_local]
        mine = order[: int(counts.sum())]  # pairs of other ranks' experts are sorted behind
        handle = _Handle(torch.argsort(mine), counts.sum(0).tolist(), receive_splits.tolist(), pairs, top_k)
        return Dispatched(tokens.index_select(0, mine // top_k), counts.sum(1).tolist(), handle)

    def _dispatch_rows(self, x: Tensor, physical: Tensor, top_k: int) -> Dispatched:
        world_size, locals_ = self.placement.world_size, list(self.placement.local_counts)
        order, counts = sort_by_slot(physical, self.placement.num_physical)
        received_counts = self._exchange(counts, locals_, [self.num_local] * world_size)
        per_source = received_counts.view(world_size, self.num_local)
        send_splits = np.add.reduceat(np.append(counts.cpu().numpy(), 0), self.placement.first_physical[:-1])
        send_splits = np.where(np.array(locals_) > 0, send_splits, 0).tolist()
        received_splits = per_source.sum(1).tolist()
        received = self._exchange(x.index_select(0, order // top_k), send_splits, received_splits)
        slots = torch.arange(self.num_local, device=x.device).repeat(world_size)
        by_slot = torch.argsort(torch.repeat_interleave(slots, received_counts), stable=True)
        handle = _Handle(torch.argsort(by_slot), received_splits, send_splits, order, top_k)
        return Dispatched(received.index_select(0, by_slot), per_source.sum(0).tolist(), handle)

    def _exchange(self, rows: Tensor, send_splits: list[int], receive_splits: list[int]) -> Tensor:
        work, received = self._start(rows, send_splits, receive_splits)
        self._finish(work)
        return received

    def _start(self, rows: Tensor, send_splits: list[int], receive_splits: list[int]) -> tuple[Work, Tensor]:
        """The only place that enters a collective. rows [sum(send_splits), ...]; splits count rows."""
        received = rows.new_empty((sum(receive_splits), *rows.shape[1:]))
        into, out = (received.view(torch.uint8), rows.view(torch.uint8)) if rows.ndim > 1 else (received, rows)
        self.num_collectives += 1
        try:
            return self.group.alltoall_base(into, out, receive_splits, send_splits, self._options), received
        except RuntimeError as error:
            raise self._failed(error) from error

    def _finish(self, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> CollectiveFailed:
        return CollectiveFailed(f"rank {self.rank}: all-to-all number {self.num_collectives} failed: {error}")
