"""How even packings of experts make the load, and how long planning takes: ours against DeepSeek's EPLB.

    python -m bench.eplb                  recorded and made-up counts
    python -m bench.eplb --json FILE      and keep the figures

Each packing is planned from a window of steps, summed up in 16 parts as ranks do it, and judged by

window    these parts: the busiest rank's load summed over them, as a multiple of an even share. What is optimised.
total     the busiest rank's load in the whole window, as a multiple of an even share: what DeepSeek looks at.
next      the steps that come after the window, each by itself, as "window" is.
ms        planning a layer: processor time of one thread.

doubled   layers in which two copies of an expert are on one rank. As far as load goes that is one copy and a slot left
          empty, which can be right; but a rank lost takes both with it. Ours never does it.

Means over layers; 1 is best. What must hold: in "window" ours is not worse than DeepSeek's, flat against global and by
nodes against hierarchical, in the mean and in each layer in which theirs has nothing doubled; planning takes less than
50 ms. Exit code 1: it does not.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import eplb_peers
from bench.eplb_counts import SYNTHETIC, recorded
from ep.balance import Gang, pack
from ep.placement import ExpertPlacement
from ep.window import PARTS

MOST_MS = 50.0
PACKERS = ("contiguous", "DeepSeek global", "ours", "DeepSeek hierarchical", "ours by nodes")
PAIRS = (("ours", "DeepSeek global"), ("ours by nodes", "DeepSeek hierarchical"))


@dataclass(frozen=True)
class Case:
    """A model's layers on a gang. nodes, groups: 1 where there is only one."""

    name: str
    ranks: int
    redundant: int
    layers: list[np.ndarray]  # each [steps, experts]
    nodes: int = 1
    groups: int = 1

    @property
    def experts(self) -> int:
        return self.layers[0].shape[1]


@dataclass(frozen=True)
class Row:
    """One packer in one case: means over layers, by layer where it is compared."""

    case: str
    ranks: int
    experts: int
    redundant: int
    packer: str
    window: float
    total: float
    next: float
    ms: float
    window_by_layer: list[float]
    doubled_in: list[int]  # layers


def cases(quick: bool) -> Iterator[Case]:
    demo = recorded()
    layers = [demo[:, layer] for layer in range(demo.shape[1])]
    for ranks, redundant in ((2, 0), (3, 0), (4, 0), (4, 4)):
        yield Case("demo", ranks, redundant, layers[: 4 if quick else None])
    for name, make in SYNTHETIC.items():
        for experts, ranks, redundant, nodes, groups in ((8, 4, 0, 1, 1), (64, 8, 8, 2, 8), (256, 32, 32, 4, 8)):
            rng = np.random.default_rng(experts)
            made = [make(experts, 256, rng) for _ in range(1 if quick else 4)]
            yield Case(name, ranks, redundant, made, nodes, groups)


def packers(case: Case) -> dict[str, Callable[[np.ndarray], eplb_peers.Packing]]:
    """By name, from the counts of a window's parts. What a packer cannot do is left out."""
    start = ExpertPlacement.contiguous(case.experts, case.ranks, case.redundant)
    slots = case.experts + case.redundant

    def unplanned(counts: np.ndarray) -> eplb_peers.Packing:
        return by_rank(start)

    def ours(counts: np.ndarray, gang: Gang) -> eplb_peers.Packing:
        return by_rank(pack(counts, gang, start))

    found: dict[str, Callable[[np.ndarray], eplb_peers.Packing]] = {
        "contiguous": unplanned,
        "ours": partial(ours, gang=Gang(start.local_counts)),
    }
    if slots % case.ranks == 0:
        found["DeepSeek global"] = lambda counts: eplb_peers.flat(counts.sum(0), slots, case.ranks)
    if case.nodes > 1:
        found["ours by nodes"] = partial(ours, gang=Gang(start.local_counts, case.ranks // case.nodes, case.groups))
        found["DeepSeek hierarchical"] = lambda counts: eplb_peers.hierarchical(
            counts.sum(0), slots, case.ranks, case.nodes, case.groups
        )
    return {name: found[name] for name in PACKERS if name in found}


def by_rank(placement: ExpertPlacement) -> eplb_peers.Packing:
    return [list(placement.local_experts(rank)) for rank in range(placement.world_size)]


def unevenness(counts: np.ndarray, packing: eplb_peers.Packing) -> float:
    """The busiest rank's load summed over steps, as a multiple of an even share. counts: [T, E]."""
    loads = eplb_peers.loads(counts, packing)
    return float(loads.max(1).sum() / loads.mean(1).sum())


def measure(case: Case) -> list[Row]:
    rows = []
    for name, packer in packers(case).items():
        figures, seconds, doubled_in = [], [], []
        for layer, counts in enumerate(case.layers):
            window, after = np.split(counts, 2)
            parts = window.reshape(PARTS, -1, case.experts).sum(1)
            started = time.thread_time()
            packing = packer(parts)
            seconds.append(time.thread_time() - started)
            if any(len(set(rank)) < len(rank) for rank in packing):
                doubled_in.append(layer)
            whole = parts.sum(0, keepdims=True)
            figures.append([unevenness(some, packing) for some in (parts, whole, after)])
        window_, total, following = np.mean(figures, 0).tolist()
        ms = float(np.median(seconds)) * 1000
        shape = (case.name, case.ranks, case.experts, case.redundant)
        rows.append(Row(*shape, name, window_, total, following, ms, [figure[0] for figure in figures], doubled_in))
    return rows


def failures(rows: list[Row]) -> list[str]:
    """What must hold and does not."""
    found = []
    by_packer = {row.packer: row for row in rows}
    for ours, theirs in PAIRS:
        if ours in by_packer and theirs in by_packer:
            mine, peer = by_packer[ours], by_packer[theirs]
            both = enumerate(zip(mine.window_by_layer, peer.window_by_layer, strict=True))
            worse = [layer for layer, (one, other) in both if layer not in peer.doubled_in and _above(one, other)]
            found += [f"{mine.case}: {ours} is worse than {theirs} in layer {layer}" for layer in worse]
            if _above(mine.window, peer.window):
                found.append(f"{mine.case}: {ours} is worse than {theirs} in the mean")
    found += [
        f"{row.case}: {row.packer} takes {row.ms:.0f} ms" for row in rows if row.ms > MOST_MS and "ours" in row.packer
    ]
    return found


def _above(one: float, other: float) -> bool:
    return one > other * (1 + 1e-9)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.eplb", description="Compare packings of experts.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    parser.add_argument("--quick", action="store_true", help="fewer layers")
    options = parser.parse_args()
    table = Table(
        "counts", "experts", "ranks", "packing", "window", "total", "next", "doubled", "ms", title="1 is an even load"
    )
    rows, failed = [], []
    for case in cases(options.quick):
        measured = measure(case)
        rows += measured
        failed += failures(measured)
        for row in measured:
            figures = [f"{figure:.3f}" for figure in (row.window, row.total, row.next)]
            experts = f"{row.experts} + {row.redundant}" if row.redundant else str(row.experts)
            table.add_row(
                row.case, experts, str(row.ranks), row.packer, *figures, str(len(row.doubled_in)), f"{row.ms:.1f}"
            )
        table.add_section()
    Console(width=110).print(table)
    if options.json:
        machine = {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor() or platform.machine()}
        report = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": machine,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
