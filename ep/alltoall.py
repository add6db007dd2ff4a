"""Dispatch over torch.distributed's all-to-all: gloo on CPUs, NCCL on GPUs; the group decides.

Rows travel as bytes, so that any dtype goes over any backend. Two ways, chosen from what `begin_step` agreed:

- rows: counts per expert first, then each row to the rank of its expert. Bytes grow with top_k.
- tokens: every token whole, with its expert ids, to every rank. Bytes grow with the number of ranks, but sizes are
  known beforehand, so a collective per layer is saved. Right for small steps, where latency is all, and for few ranks.

Either way `combine` sends back one row per (token, k) pair, in an exchange whose sizes both sides know.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllToAllOptions, Work

from ep.dispatch import (
    MAX_TOKENS,
    CollectiveFailed,
    Dispatched,
    Dispatcher,
    Log,
    Setup,
    inverse,
    weighted_sum,
)
from ep.owners import Owners
from ep.placement import ExpertPlacement, Placements

# Bytes per rank that may be sent in vain to save one collective: what a loopback or a network link moves meanwhile.
SPARE_BYTES = 128 << 10

# Longest polling for an exchange before the thread sleeps until it ends. Between two layers of a decode step peers are
# apart by less; gloo wakes its waiters through a chain of threads that takes two to three times as long.
POLL_S = 0.002


def tokens_travel_whole(num_tokens: list[int], top_k: int, row_bytes: int, spare_bytes: int = SPARE_BYTES) -> bool:
    """Whether whole tokens cost at most `spare_bytes` more on the busiest rank than one row per (token, k) pair."""
    return max(num_tokens) * row_bytes * (len(num_tokens) - top_k) <= spare_bytes


@dataclass(frozen=True, slots=True)
class _Handle:
    """What `combine` needs. Splits are rows per rank; those to receive sum to T * k."""

    to_send: Tensor  # int64 [R] outputs in the order in which they are sent
    send_splits: list[int]
    receive_splits: list[int]
    to_pairs: Tensor  # int64 [T * k] where the output of each (token, k) pair is among the received rows
    weights: Tensor  # fp32 [T, k]


class AllToAllDispatcher(Dispatcher):
    """Exchange over a process group whose ranks are those of the placement. The group is the caller's."""

    def __init__(
        self,
        placements: Placements,
        rank: int,
        group: ProcessGroup,
        device: torch.device,
        spare_bytes: int = SPARE_BYTES,
        log: Log | None = None,
        max_tokens: int = MAX_TOKENS,
    ):
        """`device`: where the tokens are, and what the group's backend can send from."""
        super().__init__(placements, rank, device, log, max_tokens)
        self.group = group
        self.world_size = group.size()
        self.spare_bytes = spare_bytes
        self._options = AllToAllOptions()
        self._num_tokens: list[int] = []
        self._entry = 0  # of the collective under way; one at a time
        self._owners = [Owners(layer, rank) for layer in placements.layers]

    def place(self, layer: int, placement: ExpertPlacement) -> None:
        super().place(layer, placement)
        self._owners[layer] = Owners(placement, self.rank)

    def begin_step(self, num_tokens: int) -> None:
        """Tell every rank how many tokens every other has. Raises CollectiveFailed when one announces too many."""
        super().begin_step(num_tokens)
        ones = [1] * self.world_size
        mine = torch.full((len(ones),), num_tokens, dtype=torch.int64, device=self.device)
        self._num_tokens = self._exchange(b"token counts", mine, ones, ones).tolist()
        self._believe(self._num_tokens)

    def dispatch(self, layer: int, x: Tensor, topk_ids: Tensor, weights: Tensor) -> Dispatched:
        whole = self._whole(topk_ids.shape[1], x.shape[1] * x.element_size())
        send = self._dispatch_tokens if whole else self._dispatch_rows
        return send(self._owners[layer], x, self._physical(layer, topk_ids), weights)

    def combine(self, rows: Tensor, handle: _Handle) -> Tensor:
        outputs = rows.index_select(0, handle.to_send)
        received = self._exchange(b"combine", outputs, handle.send_splits, handle.receive_splits)
        pairs = received.index_select(0, handle.to_pairs).unflatten(0, handle.weights.shape)
        return weighted_sum(pairs, handle.weights)

    def _whole(self, top_k: int, row_bytes: int) -> bool:
        """Whether whole tokens are to travel. The same on all ranks."""
        return tokens_travel_whole(self._num_tokens, top_k, row_bytes, self.spare_bytes)

    def _share(self, records: Tensor) -> tuple[Work, Tensor]:
        """Begin to send this rank's records, uint8 [T, bytes], to every rank. The result holds everybody's, rank by
        rank, once `_collect` has seen it."""
        copies = torch.cat([records] * self.world_size)
        return self._start(b"dispatch", copies, [len(records)] * self.world_size, self._num_tokens)

    def _collect(self, work: Work, received: Tensor) -> Tensor:
        """[sum of all ranks' T, bytes]"""
        self._finish(work)
        return received

    def _dispatch_tokens(self, owners: Owners, x: Tensor, physical: np.ndarray, weights: Tensor) -> Dispatched:
        world_size, top_k, row_bytes = self.world_size, weights.shape[1], x.shape[1] * x.element_size()
        ids = self._index(physical.astype(np.int32)).view(-1, top_k)
        work, received = self._share(torch.cat((x.view(torch.uint8), ids.view(torch.uint8)), dim=1))
        ranks = owners.rank_of[physical]
        receive_splits = np.bincount(ranks, minlength=world_size).tolist()
        to_pairs = self._index(inverse(np.argsort(ranks, kind="stable")))
        received = self._collect(work, received)

        tokens = received[:, :row_bytes].view(x.dtype)
        everybodys = received[:, row_bytes:].cpu().numpy().view(np.int32).reshape(-1)
        num_pairs = [top_k * count for count in self._num_tokens]
        if (stranger := owners.stranger(everybodys, num_pairs)) is not None:
            raise CollectiveFailed(f"rank {self.rank}: rank {stranger} sends tokens to an expert that does not exist")
        mine, counts = owners.claim(everybodys)
        from_token = mine // top_k
        ends = np.cumsum(self._num_tokens)
        send_splits = np.bincount(np.searchsorted(ends, from_token, side="right"), minlength=world_size).tolist()
        to_send = self._index(np.argsort(mine))
        rows = tokens.index_select(0, self._index(from_token))
        return Dispatched(rows, counts, _Handle(to_send, send_splits, receive_splits, to_pairs, weights))

    def _dispatch_rows(self, owners: Owners, x: Tensor, physical: np.ndarray, weights: Tensor) -> Dispatched:
        world_size, top_k = self.world_size, weights.shape[1]
        order = np.argsort(physical, kind="stable")
        counts = np.bincount(physical, minlength=owners.num_physical)
        send_splits = np.bincount(owners.rank_of[physical], minlength=world_size).tolist()
        ones = [owners.num_local] * world_size
        received_counts = self._exchange(b"expert counts", self._index(counts), owners.counts, ones)
        per_source = received_counts.cpu().numpy().reshape(world_size, owners.num_local)
        received_splits = self._plausible(per_source, top_k)
        outgoing = x.index_select(0, self._index(order // top_k))
        received = self._exchange(b"dispatch", outgoing, send_splits, received_splits)
        slots = np.repeat(np.tile(np.arange(owners.num_local), world_size), per_source.reshape(-1))
        by_slot = np.argsort(slots, kind="stable")
        handle = _Handle(
            self._index(inverse(by_slot)), received_splits, send_splits, self._index(inverse(order)), weights
        )
        return Dispatched(received.index_select(0, self._index(by_slot)), per_source.sum(0).tolist(), handle)

    def _plausible(self, per_source: np.ndarray, top_k: int) -> list[int]:
        """Rows from each rank, given its rows for each local expert. Raises CollectiveFailed when a rank announces more
        than its tokens can make, before there is room for them."""
        rows: list[int] = per_source.sum(1).tolist()
        for rank, num_tokens in enumerate(self._num_tokens):
            most, found = num_tokens * top_k, per_source[rank]
            if found.min(initial=0) < 0 or found.max(initial=0) > most or rows[rank] > most:
                raise CollectiveFailed(
                    f"rank {self.rank}: rank {rank} announces rows {found.tolist()} for my experts, but has "
                    f"{num_tokens} tokens of {top_k} experts each"
                )
        return rows

    def _exchange(self, kind: bytes, rows: Tensor, send_splits: list[int], receive_splits: list[int]) -> Tensor:
        work, received = self._start(kind, rows, send_splits, receive_splits)
        self._finish(work)
        return received

    def _start(
        self, kind: bytes, rows: Tensor, send_splits: list[int], receive_splits: list[int]
    ) -> tuple[Work, Tensor]:
        """Begin an all-to-all. rows [sum(send_splits), ...]; splits count rows."""
        received = rows.new_empty((sum(receive_splits), *rows.shape[1:]))
        into, out = (received.view(torch.uint8), rows.view(torch.uint8)) if rows.ndim > 1 else (received, rows)
        call = partial(self.group.alltoall_base, into, out, receive_splits, send_splits, self._options)
        return self._enter(kind, len(rows), call), received

    def _enter(self, kind: bytes, size: int, call: Callable[[], Work]) -> Work:
        """The only place that enters a collective."""
        self.num_collectives += 1
        self._entry = self.log.enter(kind, size, self.num_collectives)
        try:
            return call()
        except RuntimeError as error:
            raise self._failed(error) from error

    def _finish(self, work: Work) -> None:
        """Wait for a collective; on the CPU by asking first, since being woken takes longer than a small exchange."""
        try:
            if self.device.type == "cpu":
                deadline = time.monotonic() + POLL_S
                while not work.is_completed() and time.monotonic() < deadline:
                    os.sched_yield()
            work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        self.log.leave(self._entry)

    def _failed(self, error: RuntimeError) -> CollectiveFailed:
        return CollectiveFailed(f"rank {self.rank}: collective number {self.num_collectives} failed: {error}")


def make(setup: Setup) -> AllToAllDispatcher:
    return AllToAllDispatcher(
        setup.placements, setup.rank, setup.ranks, setup.device, log=setup.log, max_tokens=setup.max_tokens
    )
