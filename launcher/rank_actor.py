"""The Ray actor around one rank. Nothing of torch is imported before `prepare` has set the process up."""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

_PR_SET_PDEATHSIG = 1

if TYPE_CHECKING:
    from torch.distributed import Store

    from dp_engine.spec import RankSpec


@dataclass(frozen=True)
class Whereabouts:
    """Where an actor landed. `gpus`: the device ids Ray gave it."""

    node_id: str
    node_ip: str
    pid: int
    gpus: tuple[int, ...]
    cores: int


@dataclass(frozen=True)
class Rendezvous:
    """Where rank 0 keeps the gang's store."""

    host: str
    port: int


class RankActor:
    """Calls arrive in this order: `whereabouts`, `prepare`, on rank 0 `open_rendezvous`, then `run` until the end."""

    def __init__(self) -> None:
        self._store: Store | None = None

    def whereabouts(self) -> Whereabouts:
        context = ray.get_runtime_context()
        return Whereabouts(
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            gpus=tuple(int(gpu) for gpu in ray.get_gpu_ids()),
            cores=len(os.sched_getaffinity(0)),
        )

    def prepare(self, threads: int, interface: str | None) -> None:
        """Set what libraries read once: compute threads, and the interface gloo listens on."""
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface

    def open_rendezvous(self, host: str, timeout_s: float) -> Rendezvous:
        """Rank 0 binds first and says where, from inside its own process."""
        from vote.rendezvous import open_store

        self._store, port = open_store(host, timeout_s)
        return Rendezvous(host, port)

    def run(self, spec: "RankSpec", rendezvous: Rendezvous | None) -> None:
        """Serve until shut down. Raises what ended the rank."""
        from dp_engine.rank import run_rank
        from vote.rendezvous import join_store

        if rendezvous is not None and self._store is None:
            self._store = join_store(rendezvous.host, rendezvous.port, spec.start_timeout_s)
        _die_with_parent()
        run_rank(spec, self._store)


def _die_with_parent() -> None:
    """A rank must not outlive the raylet that started it, not even while it hangs or is stopped (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
