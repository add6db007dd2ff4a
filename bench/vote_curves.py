"""What the decisions do to a gang under load, by simulation: curves over load and skew, and what must hold.

    python -m bench.vote_curves docs/images     writes vote-curves.csv and vote-curves.png there
    python -m bench.vote_curves DIR --quick     the same in a minute, with few requests

`bench.vote_simulation` says what is simulated. Left to right: the skews; top to bottom, for each number of ranks: time
to first token, and the 99th percentile of the intervals between tokens, against the requests a second of a busy rank.
In the lonely skew the time to first token is that of the lonely rank. The stated load (`STATED`) is one of them, run
for longer, and compared with what must hold: mean time to first token of the lonely rank at most a fifth of cadence's,
99th percentile of the intervals at most 1.1 times cadence's. Exit code 1: that does not hold; 2: wrong input. Two jobs
take a quarter of an hour on free cores, most of it for 64 ranks.
"""

import argparse
import csv
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.vote_simulation import DECISIONS, LONELY_RATE, WARM_UP_S, Load, Outcome, simulate

SKEWS = ("equal", "lonely")
RATES = {2: (0.5, 1.0, 2.0, 4.0), 8: (0.5, 1.0, 2.0, 4.0), 64: (1.0, 4.0)}
SECONDS = {2: 100.0, 8: 60.0, 64: 26.0}
STATED = [Load(2, "lonely", 4.0, 500.0), Load(8, "lonely", 4.0, 300.0), Load(64, "lonely", 4.0, 200.0)]
WIDTH = 100  # of the table, whatever the terminal has
QUICK = 0.1  # of the seconds, warm-up apart
MUST_HOLD = {"ttft": 0.2, "interval": 1.1}  # of cadence's

COLORS = {
    "cadence": "#888888",
    "cadence + fast path": "#444444",
    "adaptive": "#c8102e",
    "ANY every step": "#1f77b4",
    "ALL only": "#2ca02c",
}


@dataclass(frozen=True)
class Run:
    decision: str
    load: Load
    outcome: Outcome

    @property
    def watched(self) -> str:
        """Whose time to first token the curves show."""
        return "lonely" if self.load.skew == "lonely" else "all"

    def row(self) -> dict[str, Any]:
        load, outcome, whose = self.load, self.outcome, getattr(self.outcome, self.watched)
        return {
            "ranks": load.ranks,
            "skew": load.skew,
            "rate": load.rate,
            "seconds": f"{load.seconds:g}",
            "decision": self.decision,
            "ttft_of": self.watched,
            "requests": whose.requests,
            "ttft_mean_ms": f"{whose.ttft_mean:.0f}",
            "ttft_p50_ms": f"{whose.ttft_p50:.0f}",
            "ttft_p99_ms": f"{whose.ttft_p99:.0f}",
            "busy_ttft_mean_ms": f"{outcome.busy.ttft_mean:.0f}",
            "interval_mean_ms": f"{outcome.all.interval_mean:.2f}",
            "interval_p99_ms": f"{outcome.all.interval_p99:.1f}",
            "tokens_per_s": f"{outcome.all.tokens_per_s:.0f}",
            "prefill_steps": f"{outcome.prefill_steps:.4f}",
            "prefill_time": f"{outcome.prefill_time:.4f}",
            "unserved": outcome.all.unserved,
        }


def run(task: tuple[str, Load]) -> Run:
    name, load = task
    return Run(name, load, simulate(load, DECISIONS[name]))


def loads_for(ranks: Iterable[int], quick: bool) -> list[Load]:
    stated = {(load.ranks, load.skew, load.rate): load for load in STATED}
    points = [(n, skew, rate) for n in ranks for skew in SKEWS for rate in RATES[n]]
    loads = [stated.get(point) or Load(*point, SECONDS[point[0]]) for point in points]
    return [replace(load, seconds=WARM_UP_S + QUICK * (load.seconds - WARM_UP_S)) if quick else load for load in loads]


def in_parallel(loads: Sequence[Load], jobs: int, console: Console) -> list[Run]:
    """Every decision under every load, the longest first."""
    tasks = [(name, load) for load in loads for name in DECISIONS]
    tasks.sort(key=lambda task: -task[1].ranks * task[1].seconds)
    done: list[Run] = []
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for one in pool.map(run, tasks):
            done.append(one)
            load = one.load
            console.print(
                f"{len(done)} of {len(tasks)}: {load.ranks} ranks, {load.skew}, {load.rate:g}/s, {one.decision}",
                highlight=False,
            )
    order = list(DECISIONS)
    return sorted(done, key=lambda one: (one.load.ranks, one.load.skew, one.load.rate, order.index(one.decision)))


# ---- what must hold


def verdicts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each stated load, adaptive against cadence as published, and against cadence with the fast path."""
    found = []
    for ranks in sorted({one.load.ranks for one in runs}):
        by_name = {one.decision: one.outcome for one in runs if one.load.ranks == ranks}
        ours = by_name["adaptive"]
        for name in ("cadence", "cadence + fast path"):
            theirs = by_name[name]
            ttft = ours.lonely.ttft_mean / theirs.lonely.ttft_mean
            interval = ours.all.interval_p99 / theirs.all.interval_p99
            holds = ttft <= MUST_HOLD["ttft"] and interval <= MUST_HOLD["interval"]
            throughput = ours.all.tokens_per_s / theirs.all.tokens_per_s
            row = {"ranks": ranks, "against": name, "ttft": ttft, "interval": interval, "throughput": throughput}
            found.append(row | {"holds": holds})
    return found


def table(runs: Sequence[Run]) -> Table:
    drawn = Table(title=f"a lonely rank ({LONELY_RATE:g} requests/s) among busy ones ({STATED[0].rate:g}/s); ms")
    drawn.add_column("ranks", justify="right")
    drawn.add_column("decision", no_wrap=True)
    for column in ("TTFT\nlonely", "p99", "TTFT\nbusy", "interval", "p99", "tok/s", "prefill\nsteps"):
        drawn.add_column(column, justify="right", no_wrap=True)
    for one in runs:
        out = one.outcome
        waits = (f"{wait:.0f}" for wait in (out.lonely.ttft_mean, out.lonely.ttft_p99, out.busy.ttft_mean))
        intervals = (f"{out.all.interval_mean:.1f}", f"{out.all.interval_p99:.1f}", f"{out.all.tokens_per_s:.0f}")
        drawn.add_row(str(one.load.ranks), one.decision, *waits, *intervals, f"{out.prefill_steps:.1%}")
    return drawn


# ---- files


def write_csv(path: Path, runs: Sequence[Run], command: str) -> None:
    """The command that made it in the first line."""
    with path.open("w", newline="") as file:
        file.write(f"# {command}\n")
        rows = [one.row() for one in runs]
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw(path: Path, runs: Sequence[Run], command: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = sorted({one.load.ranks for one in runs})
    with pyplot.rc_context({"font.size": 8, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure, panels = pyplot.subplots(
            2 * len(ranks), len(SKEWS), figsize=(8.2, 3.5 * len(ranks) + 0.9), squeeze=False, sharex=True
        )
        for row, number in enumerate(ranks):
            for column, skew in enumerate(SKEWS):
                shown = [one for one in runs if one.load.ranks == number and one.load.skew == skew]
                whose = "lonely rank" if skew == "lonely" else "all ranks"
                _panel(panels[2 * row][column], shown, f"{number} ranks, {skew}: mean TTFT, {whose} (ms)", _ttft)
                _panel(
                    panels[2 * row + 1][column], shown, f"{number} ranks, {skew}: token interval p99 (ms)", _interval
                )
        for panel in panels[-1]:
            panel.set_xlabel("requests per second of a busy rank")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
        figure.text(0.01, 0.004, command, fontsize=6, family="monospace")
        figure.tight_layout(rect=(0, 0.012, 1, 0.975))
        figure.savefig(path, dpi=90)
        pyplot.close(figure)


def _ttft(one: Run) -> float:
    return float(getattr(one.outcome, one.watched).ttft_mean)


def _interval(one: Run) -> float:
    return one.outcome.all.interval_p99


def _panel(panel: Any, runs: Sequence[Run], title: str, value: Callable[[Run], float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for name, color in COLORS.items():
        line = [(one.load.rate, value(one)) for one in runs if one.decision == name]
        style = {"linewidth": 2.2, "zorder": 3} if name == "adaptive" else {"linewidth": 1.1}
        dashes = "--" if name == "cadence + fast path" else "-"
        panel.plot(*zip(*line, strict=True), dashes, marker="o", markersize=3, color=color, label=name, **style)
    panel.set_title(title, loc="left")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    rates = RATES[2]
    panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())


# ---- command line


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.vote_curves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where the files go")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=list(RATES), choices=list(RATES), help="sizes of the gang"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="simulations at the same time (1)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the simulated time: noisy")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = Console(stderr=True)
    try:
        arguments.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"bench: cannot write to {arguments.directory}: {error.strerror}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", "bench.vote_curves", *(argv if argv is not None else sys.argv[1:])])
    runs = in_parallel(loads_for(arguments.ranks, arguments.quick), arguments.jobs, console)
    write_csv(arguments.directory / "vote-curves.csv", runs, command)
    draw(arguments.directory / "vote-curves.png", runs, command)
    points = {(load.ranks, load.skew, load.rate) for load in STATED}
    stated = [one for one in runs if (one.load.ranks, one.load.skew, one.load.rate) in points]
    Console(width=WIDTH).print(table(stated))
    return report(verdicts(stated))


def report(found: Sequence[dict[str, Any]]) -> int:
    """One line for each comparison; 1 if one with cadence as published does not hold."""
    for row in found:
        print(
            f"{row['ranks']} ranks, adaptive / {row['against']}: lonely TTFT {row['ttft']:.2f} (at most 0.2), "
            f"interval p99 {row['interval']:.2f} (at most 1.1), tok/s {row['throughput']:.3f}"
            f"{'' if row['holds'] else '   DOES NOT HOLD'}"
        )
    return int(not all(row["holds"] for row in found if row["against"] == "cadence"))


if __name__ == "__main__":
    sys.exit(main())
