"""Which cores of a node are whose: its ranks share them evenly, each within one NUMA node where it can be."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class Core:
    """A physical core: its NUMA node and its CPUs, several with SMT."""

    numa: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """This rank is number `index` of the `count` ranks of the launch on its node, gangs side by side included."""

    index: int
    count: int


def share_cores(cores: Sequence[Core], share: Share) -> tuple[int, ...]:
    """The CPUs of one rank, in order. Ranks of a node get disjoint ones; empty if there are fewer CPUs than ranks.

    Whole cores where there are enough; of one NUMA node where there are several and each has cores for its ranks.
    """
    if len(cores) < share.count:
        cores = [Core(core.numa, (cpu,)) for core in cores for cpu in core.cpus]
    if len(cores) < share.count:
        return ()
    by_node: dict[int, list[Core]] = defaultdict(list)
    for core in cores:
        by_node[core.numa].append(core)
    nodes = [by_node[numa] for numa in sorted(by_node)]
    together = [
        [rank for rank in range(share.count) if rank * len(nodes) // share.count == n] for n in range(len(nodes))
    ]
    if share.count < len(nodes) or any(len(node) < len(ranks) for node, ranks in zip(nodes, together, strict=True)):
        nodes, together = [[core for node in nodes for core in node]], [list(range(share.count))]
    node, ranks = next(pair for pair in zip(nodes, together, strict=True) if share.index in pair[1])
    place = ranks.index(share.index)
    mine = node[place * len(node) // len(ranks) : (place + 1) * len(node) // len(ranks)]
    return tuple(sorted(cpu for core in mine for cpu in core.cpus))


def node_cores(allowed: Sequence[int], system: Path = SYSTEM) -> list[Core]:
    """Cores of this node out of the CPUs this process may use; each CPU is one where the kernel tells less."""
    numa = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in parse_list(_read(folder / "cpulist"))
    }
    cores: dict[tuple[int, ...], None] = {}
    for cpu in sorted(allowed):
        siblings = parse_list(_read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")) or (cpu,)
        cores[tuple(sibling for sibling in siblings if sibling in allowed) or (cpu,)] = None
    return [Core(numa.get(cpus[0], 0), cpus) for cpus in sorted(cores, key=lambda cpus: (numa.get(cpus[0], 0), cpus))]


def parse_list(text: str) -> tuple[int, ...]:
    """A list of the kernel's: "0-3,8" is 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def show_list(cpus: Sequence[int]) -> str:
    """The inverse of `parse_list`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def pin_process(cpus: Sequence[int]) -> None:
    """Keep every thread of this process, and those to come, on these CPUs (Linux)."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            continue  # ended meanwhile


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
