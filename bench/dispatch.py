"""What it costs to carry tokens to their experts and back.

    python -m bench.dispatch

Dispatch and combine of one layer over real processes on loopback: every backend that runs on CPUs, one after the other
in each turn, so that what slows the machine slows all of them. Experts do nothing. Rows are bf16, 2 of 8 experts per
token, each rank has as many tokens. Figures are medians of rank 0, with their ratio to alltoall in the same turns. With
more ranks than cores all of it is mostly the operating system's scheduling.

What must hold: the backend that `auto` takes is the fastest, or within a tenth of it. The table goes to stdout, `--json
FILE` keeps the figures. Exit code 1: a run went wrong, or it does not hold; 2: wrong input.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.gang import GangFailed, in_turns, on_all
from bench.verdict import conclude

RANKS = (2, 4)
WIDTHS = (576, 2048)
TOKENS = (1, 8, 32, 512)
TOP_K, NUM_EXPERTS = 2, 8
BACKENDS = ("alltoall", "allgather", "shm")
PEER = "alltoall"
MOST = 1.1
WARM_UP = 5


@dataclass(frozen=True)
class Cost:
    """Of a layer: medians in µs, one per round. tokens: of each rank."""

    ranks: int
    hidden: int
    tokens: int
    backend: str
    rounds_us: list[float]

    @property
    def us(self) -> float:
        return statistics.median(self.rounds_us)


def measure(ranks: int, hidden: int, tokens: int, rounds: int, turns: int) -> tuple[list[Cost], str]:
    """Every backend, and what `auto` is. Raises GangFailed."""
    medians, chosen = on_all(ranks, _alternate, hidden, tokens, rounds, turns)
    return [Cost(ranks, hidden, tokens, backend, found) for backend, found in medians.items()], chosen


def _alternate(
    rank: int, group: Any, hidden: int, tokens: int, rounds: int, turns: int
) -> tuple[dict[str, list[float]], str]:
    import torch

    from ep.dispatch import make_dispatcher
    from ep.placement import Placements

    size = group.size()
    placements = Placements.contiguous(1, NUM_EXPERTS, size)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    weights, topk_ids = torch.rand(tokens, NUM_EXPERTS, generator=generator).topk(TOP_K)

    def layer(dispatcher: Any) -> None:
        dispatched = dispatcher.dispatch(0, x, topk_ids, weights)
        dispatcher.combine(dispatched.rows, dispatched.handle)

    layers = []
    for backend in BACKENDS:
        dispatcher = make_dispatcher(backend, placements, rank, size, group)
        dispatcher.begin_step(tokens)
        layers.append(partial(layer, dispatcher))
    chosen = type(make_dispatcher("auto", placements, rank, size, group)).__module__.removeprefix("ep.")
    medians: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    with torch.inference_mode():
        in_turns(layers, WARM_UP)
        for _ in range(rounds):
            for backend, found in zip(BACKENDS, in_turns(layers, turns), strict=True):
                medians[backend].append(1e6 * statistics.median(found))
    return medians, chosen


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure everything and return the report as it goes into the JSON. Raises GangFailed."""
    rounds = 3 if arguments.quick else 7
    costs, chosen = [], ""
    for ranks in arguments.ranks:
        for hidden in WIDTHS:
            for tokens in TOKENS:
                console.print(f"{ranks} ranks, {tokens} tokens of {hidden}", highlight=False)
                turns = max(10, (2000 if arguments.quick else 8000) // (40 + tokens))
                found, chosen = measure(ranks, hidden, tokens, rounds, turns)
                costs += found
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor() or platform.machine()},
        "auto": chosen,
        "costs": [asdict(cost) | {"us": cost.us, "ratio": cost.us / _peer(costs, cost).us} for cost in costs],
    }


def _peer(costs: Sequence[Cost], cost: Cost) -> Cost:
    """alltoall's in the same turns."""
    situation = (cost.ranks, cost.hidden, cost.tokens, PEER)
    return next(one for one in costs if (one.ranks, one.hidden, one.tokens, one.backend) == situation)


def failures(report: dict[str, Any]) -> list[str]:
    """Where `auto` is not the best choice."""
    best: dict[tuple[int, int, int], float] = {}
    for row in report["costs"]:
        situation = row["ranks"], row["hidden"], row["tokens"]
        best[situation] = min(row["us"], best.get(situation, row["us"]))
    return [
        f"auto takes {row['backend']}, which needs {row['us']:.0f} µs for {row['tokens']} tokens of {row['hidden']} on "
        f"{row['ranks']} ranks; another backend {best[row['ranks'], row['hidden'], row['tokens']]:.0f} µs"
        for row in report["costs"]
        if row["backend"] == report["auto"] and row["us"] > MOST * best[row["ranks"], row["hidden"], row["tokens"]]
    ]


def table(report: dict[str, Any]) -> Table:
    drawn = Table(title=f"dispatch and combine of a layer, medians in µs and ratios to {PEER}; auto: {report['auto']}")
    for column in ("ranks", "hidden", "tokens", *BACKENDS):
        drawn.add_column(column, justify="right")
    rows: dict[tuple[int, int, int], list[str]] = {}
    for row in report["costs"]:
        situation = row["ranks"], row["hidden"], row["tokens"]
        rows.setdefault(situation, []).append(f"{row['us']:.0f} ({row['ratio']:.2f})")
    for numbers, cells in rows.items():
        drawn.add_row(*map(str, numbers), *cells)
    return drawn


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.dispatch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS), metavar="N", help="sizes of the gang")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    arguments = parser.parse_args(argv)
    if any(ranks < 2 for ranks in arguments.ranks):
        parser.error("--ranks: a gang has two ranks at least")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        report = run(arguments, Console(stderr=True))
    except GangFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return conclude(report, table(report), arguments.json, failures(report))


if __name__ == "__main__":
    sys.exit(main())
