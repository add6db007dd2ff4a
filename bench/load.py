"""Loading a checkpoint at several ranks against reading the bytes that they own.

    python -m bench.load                     1 GB, written to a temporary directory
    python -m bench.load --gb 10 --dir DIR   10 GB, kept in DIR and used again

A random Mixtral is written; then, in turns, processes side by side (a) read the ranges of the files that ranks
own with plain reads into memory that they keep, and (b) load the model as ranks do. Cold: the files' pages were dropped
before; warm: they are in memory. The table goes to stderr, JSON to stdout. Exit code 1: a cold load took more than 1.5
times the read, or a rank's own memory came to more than its bytes and 1 GB. What all ranks own (dense layers) is read
from disk once and from memory by the others, in both.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.load_checkpoint import STORED, drop_pages, write_checkpoint
from bench.load_ranks import Outcome, run_ranks

MOST_RATIO = 1.5
MOST_SURPLUS = 1_000_000_000  # bytes


@dataclass(frozen=True)
class Figures:
    """Medians of all rounds. Seconds until the last rank was done; processor seconds and GB of all ranks together;
    largest rank's surplus. On a machine that others use, `load_cpu_s` over its cores says what `load_s` could be."""

    cache: str
    owned_gb: float
    read_s: float
    load_s: float
    load_cpu_s: float
    ratio: float
    surplus_gb: float


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--dtype", choices=STORED, default="bfloat16", help="of the checkpoint, and of the engine")
    parser.add_argument("--dp", type=int, default=4, metavar="N", help="ranks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--dir", type=Path, help="keep the checkpoint here; one that is there is used")
    parser.add_argument("--no-warm", action="store_true", help="cold runs alone")
    return parser.parse_args(argv)


def figures(cache: str, reads: list[list[Outcome]], loads: list[list[Outcome]]) -> Figures:
    """reads, loads: the ranks' outcomes of every round, a read and a load in turns. The ratio is the rounds' median."""
    read, load = ([wall_s(round_) for round_ in rounds] for rounds in (reads, loads))
    surplus = max(outcome.peak_bytes - outcome.owned_bytes for round_ in loads for outcome in round_)
    return Figures(
        cache,
        sum(outcome.owned_bytes for outcome in loads[0]) / 1e9,
        statistics.median(read),
        statistics.median(load),
        statistics.median(sum(outcome.cpu_s for outcome in outcomes) for outcomes in loads),
        statistics.median(b / a for a, b in zip(read, load, strict=True)),
        surplus / 1e9,
    )


def wall_s(outcomes: list[Outcome]) -> float:
    """From the first rank's start to the last one's end."""
    return max(outcome.ended for outcome in outcomes) - min(outcome.began for outcome in outcomes)


def holds(found: Figures) -> bool:
    return (found.cache != "cold" or found.ratio <= MOST_RATIO) and found.surplus_gb <= MOST_SURPLUS / 1e9


def measure(model_dir: Path, arguments: argparse.Namespace) -> list[Figures]:
    results = []
    for cache in ["cold"] if arguments.no_warm else ["cold", "warm"]:
        rounds: dict[str, list[list[Outcome]]] = {"read": [], "load": []}
        for _ in range(arguments.rounds):
            for what, outcomes in rounds.items():
                if cache == "cold":
                    drop_pages(model_dir)
                outcomes.append(run_ranks(what, model_dir, arguments.dp, arguments.threads))
                print(f"{cache} {what}: {wall_s(outcomes[-1]):.2f} s", file=sys.stderr, flush=True)
        results.append(figures(cache, rounds["read"], rounds["load"]))
    return results


def table(results: list[Figures]) -> Table:
    drawn = Table("pages", "owned GB", "read s", "load s", "load cpu s", "load / read", "surplus GB a rank", "holds")
    for row in results:
        numbers = (row.owned_gb, row.read_s, row.load_s, row.load_cpu_s, row.ratio, row.surplus_gb)
        drawn.add_row(row.cache, *(f"{number:.2f}" for number in numbers), "yes" if holds(row) else "no")
    return drawn


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = arguments.dir or Path(scratch)
        if not (model_dir / "config.json").exists():
            write_checkpoint(model_dir, arguments.gb, arguments.dtype)
        results = measure(model_dir, arguments)
    Console(stderr=True).print(table(results))
    print(json.dumps([asdict(row) for row in results]))
    return 0 if all(map(holds, results)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
