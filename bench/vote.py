"""What a vote costs.

    python -m bench.vote                 everything
    python -m bench.vote --no-server     without the demo server

ballot      on 2, 4 and 8 real processes over loopback, against a bare 4-byte MIN all-reduce in the same run; at most
            1.3 times that. On fewer cores than ranks both are mostly the operating system's scheduling.
recorder    an entry of the flight recorder, entered and left; under 1 µs.
share       of a decode step of the demo on two ranks, one request; at most 2 %.

What the decisions do is another program's: `python -m bench.vote_curves`. The table goes to stdout, `--json FILE` keeps
the figures. Exit code 1: a run went wrong, or something does not hold; 2: wrong input.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import servers
from bench.gang import GangFailed
from bench.verdict import conclude
from bench.vote_gang import BallotCost, measure_ballots, recorder_ns
from bench.vote_share import Share, measure_share

RANKS = (2, 4, 8)
CONTROLS = ("star", "gloo")  # the default first
MOST = {"ballot": 1.3, "recorder": 1000.0, "share": 0.02}


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure everything and return the report as it goes into the JSON. Raises GangFailed, servers.ServerFailed."""
    rounds, turns = (3, 300) if arguments.quick else (7, 1000)
    ballots = []
    for ranks, control in product(arguments.ranks, CONTROLS):
        console.print(f"ballots of {ranks} ranks over {control}", highlight=False)
        ballots.append(measure_ballots(ranks, control, rounds, turns))
    console.print("recorder", highlight=False)
    recorder = recorder_ns(20_000 if arguments.quick else 200_000, rounds)
    shares: list[Share] = []
    if not arguments.no_server:
        console.print("demo server", highlight=False)
        shares = measure_share(arguments.config, 64 if arguments.quick else 256, 2 if arguments.quick else 5)
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor() or platform.machine()},
        "ballots": [ballot_row(cost) for cost in ballots],
        "recorder_ns": {"median": statistics.median(recorder), "rounds": recorder},
        "share": share_row(shares) if shares else None,
    }


def ballot_row(cost: BallotCost) -> dict[str, Any]:
    medians = {"ballot_us": statistics.median(cost.ballot_us), "bare_us": statistics.median(cost.bare_us)}
    return (
        {"ranks": cost.ranks, "control": cost.control} | medians | {"ratio": cost.ratio, "ratios": sorted(cost.ratios)}
    )


def share_row(shares: Sequence[Share]) -> dict[str, Any]:
    return {
        "votes_us": statistics.median(share.votes_us for share in shares),
        "step_us": statistics.median(share.step_us for share in shares),
        "share": statistics.median(share.share for share in shares),
        "rounds": [asdict(share) for share in shares],
    }


def failures(report: dict[str, Any]) -> list[str]:
    """What does not hold."""
    found = [
        f"a ballot of {row['ranks']} ranks takes {row['ratio']:.2f} times a bare all-reduce, not {MOST['ballot']}"
        for row in report["ballots"]
        if row["control"] == CONTROLS[0] and row["ratio"] > MOST["ballot"]
    ]
    if report["recorder_ns"]["median"] > MOST["recorder"]:
        found.append(f"a recorder entry takes {report['recorder_ns']['median']:.0f} ns, not {MOST['recorder']:.0f}")
    if report["share"] and report["share"]["share"] > MOST["share"]:
        found.append(f"votes take {report['share']['share']:.1%} of a decode step, not {MOST['share']:.0%}")
    return found


def table(report: dict[str, Any]) -> Table:
    drawn = Table("what", title="a vote; medians of rounds, and the rounds' least and greatest ratio")
    for column in ("cost", "against", "ratio", "from", "to", "at most"):
        drawn.add_column(column, justify="right")
    for row in report["ballots"]:
        ratios = (row["ratio"], min(row["ratios"]), max(row["ratios"]), MOST["ballot"])
        costs = (f"{row['ballot_us']:.0f} µs", f"{row['bare_us']:.0f} µs")
        drawn.add_row(f"ballot, {row['ranks']} ranks, {row['control']}", *costs, *(f"{ratio:.2f}" for ratio in ratios))
    entry = report["recorder_ns"]
    drawn.add_row("recorder entry", f"{entry['median']:.0f} ns", "", "", "", "", f"{MOST['recorder']:.0f} ns")
    if share := report["share"]:
        parts = [one["share"] for one in share["rounds"]]
        shares = (share["share"], min(parts), max(parts), MOST["share"])
        costs = (f"{share['votes_us']:.0f} µs", f"{share['step_us']:.0f} µs")
        drawn.add_row("votes of a decode step", *costs, *(f"{part:.2%}" for part in shares))
    return drawn


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.vote", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS), metavar="N", help="sizes of the gang")
    parser.add_argument("--no-server", action="store_true", help="leave the demo server out")
    parser.add_argument("--config", type=Path, default=servers.ROOT / "configs" / "demo.yaml", help="the demo's config")
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
    except (GangFailed, servers.ServerFailed) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return conclude(report, table(report), arguments.json, failures(report))


if __name__ == "__main__":
    sys.exit(main())
