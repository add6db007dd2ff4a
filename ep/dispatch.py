"""How tokens reach their experts and come back: the interface of all backends."""

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ep.placement import ExpertPlacement, Placements, Turns
from kernels import rows

CPU = torch.device("cpu")

BACKENDS = "local", "alltoall", "allgather", "shm", "deepep"  # each a module of this package with a `make`

# Most tokens of a rank in a step, and longest wait for the others, where nobody says otherwise.
MAX_TOKENS = 2048
TIMEOUT_S = 30.0

_SUM_ELEMENTS = 1 << 17  # of a block's products, in fp32


class CollectiveFailed(RuntimeError):
    """An exchange with other ranks did not end, or not as agreed: one of them is gone, late by more than the time-out,
    or sends what it must not send."""


class BackendUnavailable(RuntimeError):
    """The chosen `experts.backend` cannot run here; the message says what to install or which one to choose."""


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

    `max_tokens` is the most that any rank dispatches in a step, the same on all ranks. It bounds whatever a backend
    sets aside for others' tokens: more is refused here, and a rank that announces more is not believed.

    Owns where the experts are, as far as tokens are concerned: `placements`, changed by `place` alone. `counts`, int64
    [layers, num_logical], is how many (token, k) pairs of this rank went to each expert of each layer since the start.

    Which row goes where is worked out on the host: split sizes must be known there anyway, and for the few pairs of a
    step numpy is several times faster than tensor operations.
    """

    def __init__(
        self,
        placements: Placements,
        rank: int,
        device: torch.device,
        log: Log | None = None,
        max_tokens: int = MAX_TOKENS,
    ):
        self.placements = placements
        self.rank = rank
        self.device = device
        self.log: Log = log or NoLog()
        self.max_tokens = max_tokens
        self.num_collectives = 0
        experts = max((layer.num_logical for layer in placements.layers), default=0)
        self.counts = np.zeros((len(placements.layers), experts), np.int64)
        self._turns = [Turns(layer, rank) for layer in placements.layers]
        self._announced = 0  # tokens of this rank in each layer of the step

    def place(self, layer: int, placement: ExpertPlacement) -> None:
        """From the next dispatch on, `layer` is placed so. All ranks do it between the same two steps, when the
        experts are where it says."""
        self.placements = self.placements.replaced(layer, placement)
        self._turns[layer] = Turns(placement, self.rank)

    def close(self) -> None:
        """This rank dispatches no more: others who wait for it notice at once, where the backend can tell them.
        Idempotent."""
        return

    def _physical(self, layer: int, topk_ids: Tensor) -> np.ndarray:
        """Physical expert of every (token, k) pair: int64 [T * k]. Counts them."""
        if len(topk_ids) != self._announced:
            raise ValueError(f"rank {self.rank} announced {self._announced} tokens and dispatches {len(topk_ids)}")
        logical = topk_ids.cpu().numpy().reshape(-1)
        counts = np.bincount(logical, minlength=self.counts.shape[1])
        if len(counts) > self.counts.shape[1]:
            raise ValueError(f"rank {self.rank} routes to expert {len(counts) - 1} of {self.counts.shape[1]}")
        self.counts[layer] += counts
        return self._turns[layer].physical(logical)

    def _believe(self, num_tokens: Sequence[int]) -> None:
        """Check what the ranks have announced, before anything is set aside for it. Raises CollectiveFailed."""
        for rank, announced in enumerate(num_tokens):
            if not 0 <= announced <= self.max_tokens:
                raise CollectiveFailed(
                    f"rank {self.rank}: rank {rank} announces {announced} tokens for a step; agreed are 0 to "
                    f"{self.max_tokens} (engine.max_num_batched_tokens)"
                )

    def _index(self, rows: np.ndarray) -> Tensor:
        """Row numbers for an index operation on this rank's device."""
        return torch.from_numpy(rows).to(self.device)

    def begin_step(self, num_tokens: int) -> None:
        """Before the first dispatch of a forward: this rank will dispatch `num_tokens` tokens in each layer.

        Raises ValueError, and tells nobody, when that is more than `max_tokens`.
        """
        if not 0 <= num_tokens <= self.max_tokens:
            raise ValueError(
                f"rank {self.rank} is to dispatch {num_tokens} tokens in a step; agreed are at most {self.max_tokens} "
                "(engine.max_num_batched_tokens)"
            )
        self._announced = num_tokens

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
    """pairs [T, k, H], weights fp32 [T, k] -> [T, H], summed in fp32 in k order.

    A block of tokens at a time on the CPU: products of a long prefill would be new memory in every layer, whose page
    faults take longer than the sums.
    """
    if rows.usable(pairs, step=16) and pairs.is_contiguous() and weights.is_contiguous():
        return rows.weighted_sum(pairs, weights)
    per_token = pairs.shape[1] * pairs.shape[2]
    block = max(1, _SUM_ELEMENTS // per_token) if pairs.device.type == "cpu" else len(pairs)
    if len(pairs) <= block:
        return _weighted_sum(pairs, weights)
    total = pairs.new_empty(len(pairs), pairs.shape[2])
    for start in range(0, len(pairs), block):
        part = slice(start, start + block)
        total[part] = _weighted_sum(pairs[part], weights[part])
    return total


def _weighted_sum(pairs: Tensor, weights: Tensor) -> Tensor:
    return (pairs * weights.unsqueeze(-1)).sum(1).to(pairs.dtype)


def inverse(order: np.ndarray) -> np.ndarray:
    """The permutation that undoes `order`."""
    undo = np.empty_like(order)
    undo[order] = np.arange(len(order))
    return undo


@dataclass(frozen=True, slots=True)
class Setup:
    """What a backend is made from. All but rank, group, device and log are the same on all ranks."""

    placements: Placements
    rank: int
    world_size: int
    group: ProcessGroup | None
    device: torch.device
    log: Log | None
    max_tokens: int
    timeout_s: float
    exact_combine: bool

    @property
    def ranks(self) -> ProcessGroup:
        """The group, which must be that of the placements."""
        if self.group is None:
            raise ValueError(f"{self.world_size} ranks need a process group to exchange tokens")
        found = self.group.rank(), self.group.size()
        if found != (self.rank, self.world_size) or any(
            layer.world_size != self.world_size for layer in self.placements.layers
        ):
            sizes = sorted({layer.world_size for layer in self.placements.layers})
            raise ValueError(
                f"rank {self.rank} of {self.world_size} got a group in which it is {found[0]} of {found[1]}, and "
                f"experts placed on {sizes} ranks"
            )
        return self.group


def make_dispatcher(
    backend: str,
    placements: Placements,
    rank: int,
    world_size: int,
    group: ProcessGroup | None,
    device: torch.device = CPU,
    log: Log | None = None,
    *,
    max_tokens: int = MAX_TOKENS,
    timeout_s: float = TIMEOUT_S,
    exact_combine: bool = False,
) -> Dispatcher:
    """The dispatcher `backend` (`ExpertConfig.backend`) for tokens on `device`. A backend is imported only when chosen.

    max_tokens: most tokens of any rank in a step; timeout_s: longest wait for other ranks, where the backend waits
    itself and not the group; exact_combine: `ExpertConfig.exact_combine`. All ranks call this together: whether they
    share a host, for one, they find out by asking each other.

    Raises ValueError when the backend does not fit the gang, BackendUnavailable when it cannot run here.
    """
    setup = Setup(placements, rank, world_size, group, device, log, max_tokens, timeout_s, exact_combine)
    if backend != "auto":
        return _make(backend, setup)
    *better, last = _candidates(setup)
    for name in better:
        with suppress(BackendUnavailable):  # on all ranks or on none
            return _make(name, setup)
    return _make(last, setup)


def _candidates(setup: Setup) -> tuple[str, ...]:
    """What `auto` tries, best first: bench/dispatch.py has the figures, docs/expert-parallel.md the reasons."""
    if setup.world_size == 1 or not setup.placements.layers:
        return ("local",)
    if setup.device.type == "cpu" and platform.machine() == "x86_64":
        return "shm", "alltoall"
    return ("alltoall",)


def _make(backend: str, setup: Setup) -> Dispatcher:
    if backend not in BACKENDS:
        raise ValueError(f"unknown experts.backend {backend!r}; there are auto, {', '.join(BACKENDS)}")
    make: Callable[[Setup], Dispatcher] = import_module(f"ep.{backend}").make
    return make(setup)
