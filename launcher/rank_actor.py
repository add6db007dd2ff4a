"""The Ray actor around one rank. What libraries read only once is set up before torch is imported."""

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from launcher.config import DECIDED_VARIABLES
from launcher.cores import Share, node_cores, pin_process, share_cores
from launcher.interfaces import Endpoint, list_interfaces
from launcher.processes import this_process
from launcher.whereabouts import Whereabouts

LEAVE_S = 30.0  # after the end of `run`, for its outcome to travel; a host that is cut off must not keep the memory
_PR_SET_PDEATHSIG = 1

if TYPE_CHECKING:
    from torch.distributed import Store

    from dp_engine.spec import RankSpec


@dataclass(frozen=True)
class Setup:
    """What a process needs to know before it loads anything. env: variables that travel from the launcher."""

    env: Mapping[str, str]
    share: Share
    threads: int | None
    pin: bool
    node_ip_of: Mapping[str, str]  # by node id, as Ray knows them


@dataclass(frozen=True)
class Rendezvous:
    """Where rank 0 keeps the gang's store."""

    host: str
    port: int


class RankActor:
    """Calls arrive in this order: `whereabouts`, on rank 0 `open_rendezvous`, `unreachable`, then `run` until the end.

    The engine's modules, torch above all, take seconds to import: that begins at once, beside everything else.
    """

    engine = "dp_engine.rank"  # the module that imports all others

    def __init__(self, setup: Setup) -> None:
        _die_with_parent()
        allowed = sorted(os.sched_getaffinity(0))
        self._cores = share_cores(node_cores(allowed), setup.share) if setup.pin else ()
        if self._cores:
            pin_process(self._cores)
        self._threads = setup.threads or max(1, len(allowed) // setup.share.count)
        self._devices = tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))
        self._node_ip_of = setup.node_ip_of
        for name in DECIDED_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(setup.env)
        os.environ["OMP_NUM_THREADS"] = str(self._threads)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices)
        self._store: Store | None = None
        self._loaded = threading.Thread(target=_import, args=(self.engine,), daemon=True)
        self._loaded.start()

    def whereabouts(self) -> Whereabouts:
        node_id = ray.get_runtime_context().get_node_id()
        return Whereabouts(
            node_id=node_id,
            node_ip=self._node_ip_of.get(node_id) or ray.util.get_node_ip_address(),
            process=this_process(),
            devices=self._devices,
            threads=self._threads,
            cores=self._cores,
            interfaces=list_interfaces(),
        )

    def open_rendezvous(self, host: str, timeout_s: float) -> Rendezvous:
        """Rank 0 binds first and says where, from inside its own process."""
        self._loaded.join()
        from vote.rendezvous import open_store

        self._store, port = open_store(host, timeout_s)
        return Rendezvous(host, port)

    def unreachable(self, places: Mapping[str, tuple[str, int]], timeout_s: float) -> list[str]:
        """Which of these places, by name, this process cannot connect to, and why."""
        faults = []
        for name, place in places.items():
            try:
                socket.create_connection(place, timeout_s).close()
            except OSError as error:
                faults.append(f"{name} at {place[0]} port {place[1]}: {error.strerror or error}")
        return faults

    def run(self, spec: "RankSpec", rendezvous: Rendezvous | None, endpoint: Endpoint) -> None:
        """Serve until shut down. Raises what ended the rank."""
        self._loaded.join()
        from dp_engine.rank import run_rank
        from vote.rendezvous import join_store

        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = endpoint.interface
        if rendezvous is not None and self._store is None:
            self._store = join_store(rendezvous.host, rendezvous.port, spec.start_timeout_s)
        try:
            run_rank(spec, self._store)
        finally:
            leaving = threading.Timer(LEAVE_S, os._exit, (1,))
            leaving.daemon = True
            leaving.start()


def _import(module: str) -> None:
    """An error comes again where the modules are used.

    Nobody else may import them meanwhile: torch has circular imports, and two threads that meet there start it twice.
    """
    with contextlib.suppress(Exception):
        importlib.import_module(module)


def _die_with_parent() -> None:
    """A rank must not outlive the raylet that started it, not even while it hangs or is stopped (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
