"""Control groups: how ballots travel. Here over torch.distributed; see also `vote.star` and `vote.simulated`."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from vote.star import connect_star

CPU = torch.device("cpu")


class ControlGroup(Protocol):
    """A MIN all-reduce over all ranks. `all_reduce_min` raises RuntimeError when a rank is missing for too long."""

    rank: int
    size: int

    def all_reduce_min(self, vector: np.ndarray) -> np.ndarray:
        """Element-wise MIN over all ranks' int32 vectors of the same shape. The result is the caller's."""
        ...

    def close(self) -> None:
        """This rank votes no more. Idempotent."""
        ...


class TorchControlGroup:
    """Ballots over a torch.distributed group, whose own time-out applies. `device`: CPU for gloo, the rank's GPU for
    NCCL, where the result is waited for on the host.

    Over gloo every rank sends its ballot to every other one. gloo's all-reduce cuts it into pieces that travel round a
    ring one after the other: as many hops as with one number, and a multiple of the messages.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device = CPU) -> None:
        self._group = group
        self._device = device
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self.rank = group.rank()
        self.size = group.size()
        self._set_length(0)

    def all_reduce_min(self, vector: np.ndarray) -> np.ndarray:
        if self._device.type != "cpu":
            tensor = torch.from_numpy(vector.copy()).to(self._device)
            self._group.allreduce([tensor], self._options).wait()
            return tensor.cpu().numpy()
        if len(vector) != self._to_all.shape[1]:
            self._set_length(len(vector))
        self._to_all[:] = vector
        self._group.alltoall_base(self._received, self._sent, [], []).wait()
        return np.minimum.reduce(self._from_all)

    def close(self) -> None:
        """The group is torch.distributed's to close."""

    def _set_length(self, length: int) -> None:
        """Buffers by rank, each seen by numpy and by torch."""
        self._to_all, self._from_all = np.empty((2, self.size, length), np.int32)
        self._sent, self._received = (torch.from_numpy(buffer.ravel()) for buffer in (self._to_all, self._from_all))


class SoloGroup:
    """A gang of one: nobody to wait for."""

    rank = 0
    size = 1

    def all_reduce_min(self, vector: np.ndarray) -> np.ndarray:
        return vector.copy()

    def close(self) -> None:
        """Nothing is open."""


class Groups:
    """Owns a rank's groups, so that they can be left whatever happens to the rank. A gang of one needs none."""

    def __init__(self) -> None:
        self.control: ControlGroup = SoloGroup()
        self.data: dist.ProcessGroup | None = None
        self._leavers: list[Callable[[], None]] = []

    def leave_too(self, leave: Callable[[], None]) -> None:
        """Have `leave` called when this rank leaves unasked: for what others wait at outside of these groups."""
        self._leavers.append(leave)

    def connect(
        self, store: dist.Store | None, rank: int, size: int, *,
        control: str, device: torch.device, host: str, secret: bytes, timeout_s: float,
    ) -> None:  # fmt: skip
        """Meet all ranks of the gang.

        control: what ballots travel over, "star", "gloo" or "nccl"; data travels over NCCL if `device` is a GPU, else
        over gloo. host, secret: this rank's address and the launch's secret, for the star. The time-out is given to
        every group explicitly: `new_group` does not inherit the one of `init_process_group`. Raises RuntimeError when
        a group does not hold all ranks, or ballots are to travel over NCCL without a GPU.
        """
        if size == 1:
            return
        assert store is not None
        if control == "nccl" and device.type != "cuda":
            raise RuntimeError(f"rank {rank}: vote.control_backend is nccl, but the rank has no GPU; use star or gloo")
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        self.data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        sizes = dist.get_world_size(), dist.get_world_size(self.data)
        if sizes != (size, size):
            raise RuntimeError(f"rank {rank}: control and data group have {sizes} ranks, not {size}")
        if control == "star":
            self.control = connect_star(store, rank, size, host=host, secret=secret, timeout_s=timeout_s)
        elif control == "nccl":
            self.control = TorchControlGroup(dist.new_group(backend="nccl", timeout=timeout), device)
        else:
            assert dist.group.WORLD is not None
            self.control = TorchControlGroup(dist.group.WORLD)

    def abandon(self) -> None:
        """This rank leaves unasked: close its connections, so that others who wait for it notice at once. A collective
        that runs in another thread of it fails too."""
        for leave in self._leavers:
            leave()
        self.control.close()
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
