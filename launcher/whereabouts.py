"""Where a rank's process is, and what it has of its node. Said by the process itself."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.cores import show_list
from launcher.errors import DeploymentFailed
from launcher.interfaces import Interface
from launcher.processes import ProcessId


@dataclass(frozen=True)
class Whereabouts:
    """devices: ids of the GPUs Ray gave the process. cores: the CPUs it is kept on; empty if on none in particular."""

    node_id: str
    node_ip: str
    process: ProcessId
    devices: tuple[str, ...]
    threads: int
    cores: tuple[int, ...]
    interfaces: tuple[Interface, ...]

    @property
    def pid(self) -> int:
        return self.process.pid

    def __str__(self) -> str:
        device = f"GPU {','.join(self.devices)}" if self.devices else "CPU"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        cores = f"cores {show_list(self.cores)}" if self.cores else "any core"
        return f"node {self.node_ip} ({self.node_id[:8]}), pid {self.pid}, {device}, {threads} on {cores}"


def in_order(found: Sequence[Whereabouts]) -> list[int]:
    """Which process is which rank: by node, then by device, so that neighbours are near each other."""
    return sorted(range(len(found)), key=lambda i: (_key(found[i].node_ip), found[i].node_id, _device(found[i]), i))


def check_devices(ranks: Sequence[Whereabouts], gpus: float) -> None:
    """Every rank has the GPU it was promised, and shares it only if it asked for a part. Raises DeploymentFailed."""
    if not gpus:
        return
    holders: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, where in enumerate(ranks):
        if not where.devices:
            raise DeploymentFailed(
                f"rank {rank} on node {where.node_ip} got no device: {gpus:g} GPU was reserved for it, but Ray gave "
                "its process none; is the node's `ray start --num-gpus` right?"
            )
        for device in where.devices:
            holders[where.node_id, device].append(rank)
    for (node_id, device), sharing in holders.items():
        if gpus == 1 and len(sharing) > 1:
            node_ip = next(where.node_ip for where in ranks if where.node_id == node_id)
            raise DeploymentFailed(
                f"ranks {', '.join(map(str, sharing))} are all on GPU {device} of node {node_ip}; to let them share "
                "it, ask for a part of it each (--set ranks.gpus=0.5)"
            )


def _key(address: str) -> tuple[list[int], str]:
    """Addresses in the order of their numbers."""
    parts = address.split(".")
    return [int(part) for part in parts if part.isdigit()], address


def _device(where: Whereabouts) -> tuple[tuple[int, str], ...]:
    """Device ids are numbers mostly, and names with MIG."""
    return tuple((int(d) if d.isdigit() else 1 << 30, d) for d in where.devices)
