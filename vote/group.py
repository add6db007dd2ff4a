"""Control groups: how ballots travel. One interface over torch.distributed and over threads of one process."""

import threading
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist


class ControlGroup(Protocol):
    """A MIN all-reduce over all ranks. `all_reduce_min` raises RuntimeError when a rank is missing for too long."""

    rank: int
    size: int

    def all_reduce_min(self, vector: np.ndarray) -> np.ndarray:
        """Element-wise MIN over all ranks' int32 vectors of the same shape. The result is the caller's."""
        ...


class TorchControlGroup:
    """Ballots over a torch.distributed group (gloo: CPU tensors; the group's own time-out applies)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce_min(self, vector: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(vector.copy())
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return tensor.numpy()


class SoloGroup:
    """A gang of one: nobody to wait for."""

    rank = 0
    size = 1

    def all_reduce_min(self, vector: np.ndarray) -> np.ndarray:
        return vector.copy()


class SimulatedExchange:
    """The meeting place of a simulated gang whose ranks are threads of this process."""

    def __init__(self, size: int, timeout_s: float = 30.0) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._arrived: list[np.ndarray] = []
        self._results: list[np.ndarray] = []  # one per round
        self._broken = False

    def group(self, rank: int) -> "SimulatedGroup":
        return SimulatedGroup(self, rank)

    def meet(self, vector: np.ndarray) -> np.ndarray:
        """Deposit, wait for all, take the minimum. A round that is complete stays so whoever leaves afterwards."""
        with self._condition:
            number = len(self._results)
            self._arrived.append(vector)
            if len(self._arrived) == self.size:
                self._results.append(np.minimum.reduce(self._arrived))
                self._arrived = []
                self._condition.notify_all()
            arrived = self._condition.wait_for(lambda: len(self._results) > number or self._broken, self._timeout_s)
            if not arrived or len(self._results) <= number:
                raise RuntimeError("a simulated rank is missing")
            return self._results[number].copy()

    def leave(self) -> None:
        """A rank is gone: whoever waits, or will wait, fails."""
        with self._condition:
            self._broken = True
            self._condition.notify_all()


class SimulatedGroup:
    """One rank's end of a SimulatedExchange."""

    def __init__(self, exchange: SimulatedExchange, rank: int) -> None:
        self._exchange = exchange
        self.rank = rank
        self.size = exchange.size

    def all_reduce_min(self, vector: np.ndarray) -> np.ndarray:
        return self._exchange.meet(vector.copy())


def connect_groups(
    store: dist.Store | None, rank: int, size: int, *, data_backend: str, timeout_s: float
) -> tuple[ControlGroup, dist.ProcessGroup | None]:
    """The control group and the data group of a gang. A gang of one needs neither.

    The time-out is given to both explicitly: `new_group` does not inherit the one of `init_process_group`.
    """
    if size == 1:
        return SoloGroup(), None
    assert store is not None
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    control = dist.group.WORLD
    assert control is not None
    data = dist.new_group(backend=data_backend, timeout=timeout)
    sizes = dist.get_world_size(control), dist.get_world_size(data)
    if sizes != (size, size):
        raise RuntimeError(f"rank {rank}: control and data group have {sizes} ranks, not {size}")
    return TorchControlGroup(control), data
