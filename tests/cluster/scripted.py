"""Rank actors that do as the test says instead of running an engine."""

import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from launcher.interfaces import Endpoint
from launcher.rank_actor import RankActor, Rendezvous

if TYPE_CHECKING:
    from dp_engine.spec import RankSpec


class LockstepBroken(Exception):
    """Has the name of the error of a rank that only noticed that another had left."""


class ScriptedActor(RankActor):
    """`model_dir` is the script: what each rank does in `run`, by rank, with commas between."""

    engine = "json"  # nothing heavy

    def open_rendezvous(self, host: str, timeout_s: float) -> Rendezvous:
        self._listener = socket.create_server((host, 0))
        return Rendezvous(host, self._listener.getsockname()[1])

    def run(self, spec: "RankSpec", rendezvous: Rendezvous | None, endpoint: Endpoint) -> None:
        match spec.model_dir.split(",")[spec.rank]:
            case "wait":
                time.sleep(600)
            case "raise":
                raise ValueError("a step went wrong")
            case "notice":
                raise LockstepBroken("rank 1 was killed")
            case "leave":
                return
            case "exit":
                sys.exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "environment":
                raise ValueError(" ".join(f"{name}={value}" for name, value in sorted(os.environ.items())))


class MeetingActor(RankActor):
    """Meets the others in real groups, adds up the ranks' numbers with them, and leaves them again."""

    engine = "vote.group"

    def run(self, spec: "RankSpec", rendezvous: Rendezvous | None, endpoint: Endpoint) -> None:
        self._loaded.join()
        import torch
        import torch.distributed as dist

        from vote.group import Groups
        from vote.rendezvous import join_store

        os.environ["GLOO_SOCKET_IFNAME"] = endpoint.interface
        assert rendezvous is not None
        store = self._store or join_store(rendezvous.host, rendezvous.port, 60)
        groups = Groups()
        groups.connect(
            store, spec.rank, spec.world_size, control=spec.vote.control_backend, device=torch.device("cpu"),
            host=spec.host, secret=spec.keys.client_secret.encode(), timeout_s=60,
        )  # fmt: skip
        mine = torch.tensor([spec.epoch * 100 + spec.rank])
        dist.all_reduce(mine)
        dist.barrier()
        groups.abandon()
        self._store = None
        raise ValueError(f"sum {mine.item()}")
