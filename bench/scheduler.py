"""What scheduling a step costs: one thread, and a fake model of random tokens.

    python -m bench.scheduler                                   both policies of ours
    python -m bench.scheduler --vllm-python VENV/bin/python     and vLLM's V1 scheduler in the same run, and the ratio

decode              N running requests get one token a step.
+ prefill           Besides, a prompt of 512 tokens arrives and an old request ends, so that N stay running. The phased
                    policy takes two steps for that, a prefill and a decode: its figure is the mean of the two.
waiting             64 running, room for no more, and a short or a long queue.

Every prompt has 512 random tokens, sequences are at all places of a block (16 tokens), the prefix cache is on.
"schedule + settle" is what vLLM's `schedule` and `update_from_output` do. "batch" builds the step's arrays, which vLLM
leaves to its model runner, so it counts in "with batch" only. Schedulers take turns; a figure is the median of its
repeats, a repeat the median of its rounds. Exit code 1: a run went wrong, 2: wrong input.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rich.console import Console
from rich.table import Table

from bench.schedulers import (
    BLOCK_SIZE,
    Make,
    OurScheduler,
    Request,
    Round,
    RunFailed,
    Scheduler,
    Shape,
    WrongInput,
    vllm,
)

POLICIES = ("phased", "unified")
PROMPT_TOKENS = 512
STEP_BUDGET = 8192  # tokens
WARM_UP = 16  # rounds
FEW_WAITING = 20
RUNNING_BESIDE_WAITING = 64
ABORTS = 1000
FIRST_WAITING = 1 << 20  # request id
FOR_EVER = 1 << 16  # new tokens: more than any run computes


# ---- workloads


class Cost(NamedTuple):
    """Of one step, in µs."""

    schedule_settle: float
    batch: float


@dataclass(frozen=True)
class Population:
    """Requests that bring a scheduler to N running ones at all places of a block, and keep it there.

    `per_round` arrive a round until N are there. With `turnover` one ends in each round from then on, in order of
    arrival, and the next arrives in the round after.
    """

    running: int
    per_round: int
    turnover: bool
    tokens_on_arrival: int  # that a request gets in its first round

    @property
    def growth(self) -> int:
        """Rounds until all are there."""
        return -(-self.running // self.per_round)

    def arrivals(self, number: int) -> list[Request]:
        """Before round `number`."""
        if number < self.growth:
            first = number * self.per_round
            return [self._request(i, number) for i in range(first, min(first + self.per_round, self.running))]
        if self.turnover and number > self.growth:
            return [self._request(self.running + number - self.growth - 1, number)]
        return []

    def _request(self, index: int, number: int) -> Request:
        last_round = self.growth + index
        max_tokens = last_round - number + self.tokens_on_arrival if self.turnover else FOR_EVER
        return Request(index + 1, PROMPT_TOKENS, max_tokens)


def shape_for(running: int, rounds: int) -> Shape:
    """Room for `running` requests at a time that live for up to `rounds` rounds each."""
    length = PROMPT_TOKENS + rounds + 2
    return Shape(
        running=running,
        num_blocks=-(-5 * (running + 2) * -(-length // BLOCK_SIZE) // 4),
        max_model_len=length + running,
        budget=max(STEP_BUDGET, 2 * running),
    )


def population_for(running: int, turnover: bool, phased: bool) -> Population:
    room = (shape_for(running, 0).budget - running) // PROMPT_TOKENS
    return Population(running, max(1, min(running // BLOCK_SIZE, room)), turnover, 2 if phased else 1)


class Driven:
    """A scheduler and its population, round by round."""

    def __init__(self, name: str, scheduler: Scheduler, population: Population) -> None:
        self.name = name
        self.scheduler = scheduler
        self._population = population
        self._number = 0
        self.run(population.growth)

    def run(self, count: int) -> list[Round]:
        numbers = range(self._number, self._number + count)
        self._number += count
        return self.scheduler.run([self._population.arrivals(number) for number in numbers])

    def cost(self, count: int) -> Cost:
        """Medians of `count` rounds. Raises RunFailed if not all requests ran in one of them."""
        rounds = self.run(count)
        for row in rounds:
            if row.sequences != self._population.running:
                raise RunFailed(f"{self.name}: {row.sequences} of {self._population.running} requests ran in a step")
        return Cost(
            statistics.median((row.schedule + row.settle) / row.steps for row in rounds),
            statistics.median(row.batch / row.steps for row in rounds),
        )


@contextmanager
def grown(makes: dict[str, Make], running: int, rounds: int, turnover: bool) -> Iterator[list[Driven]]:
    """One scheduler of each kind with `running` requests, and room for so many rounds more."""
    with ExitStack() as stack:
        driven = []
        for name, make in makes.items():
            population = population_for(running, turnover, name == "phased")
            scheduler = stack.enter_context(closing(make(shape_for(running, population.growth + rounds))))
            driven.append(Driven(name, scheduler, population))
        yield driven


def in_turns(driven: Sequence[Driven], steps: int, repeat: int) -> list[Cost]:
    """Medians of `repeat` costs each, taken in turns."""
    for one in driven:
        one.run(WARM_UP)
        one.scheduler.settle_down()
    costs = [[one.cost(steps) for one in driven] for _ in range(repeat)]
    return [
        Cost(statistics.median(c.schedule_settle for c in column), statistics.median(c.batch for c in column))
        for column in zip(*costs, strict=True)
    ]


def measure_steps(makes: dict[str, Make], running: int, turnover: bool, steps: int, repeat: int) -> dict[str, Cost]:
    with grown(makes, running, WARM_UP + steps * repeat, turnover) as driven:
        return dict(zip(makes, in_turns(driven, steps, repeat), strict=True))


def queue(count: int, prompt_tokens: int = PROMPT_TOKENS) -> list[Request]:
    return [Request(FIRST_WAITING + index, prompt_tokens, FOR_EVER) for index in range(count)]


def bytes_waiting(scheduler: Scheduler, requests: Sequence[Request]) -> float:
    """Of each while it waits; they are gone afterwards."""
    held = scheduler.bytes_each(requests)
    scheduler.abort([request.request_id for request in requests])
    return held


def measure_waiting(name: str, make: Make, many: int, steps: int, repeat: int) -> dict[str, float]:
    """Two schedulers in turns, one with few and one with many requests waiting: µs of a step's schedule and settle, µs
    of adding a request and of aborting any of the many, bytes of a request with a prompt of 512 tokens and of one.
    """
    size = (RUNNING_BESIDE_WAITING, WARM_UP + steps * repeat, False)
    with grown({name: make}, *size) as [short], grown({name: make}, *size) as [long]:
        aborted = random.Random(0).sample(range(FIRST_WAITING, FIRST_WAITING + many), min(ABORTS, many))
        bytes_each = bytes_waiting(short.scheduler, queue(len(aborted)))
        bytes_without_prompt = bytes_waiting(short.scheduler, queue(len(aborted), prompt_tokens=1))
        short.scheduler.add(queue(FEW_WAITING))
        add = long.scheduler.add(queue(many))
        cost_few, cost_many = in_turns([short, long], steps, repeat)
        abort = long.scheduler.abort(aborted)
        left = long.scheduler.num_unfinished()
    if left != RUNNING_BESIDE_WAITING + many - len(aborted):
        raise RunFailed(
            f"{name}: {left} requests are left of {RUNNING_BESIDE_WAITING + many} after {len(aborted)} aborts"
        )
    return {
        "few_us": cost_few.schedule_settle,
        "many_us": cost_many.schedule_settle,
        "add_us": statistics.fmean(add),
        "abort_us": statistics.fmean(abort),
        "bytes_each": bytes_each,
        "bytes_without_prompt": bytes_without_prompt,
    }


# ---- report


def step_rows(workload: str, running: int, costs: dict[str, Cost]) -> list[dict[str, Any]]:
    """One row per engine; ratios are fractions of vLLM's time, None without it and for itself."""
    theirs = costs["vllm"].schedule_settle if "vllm" in costs else None
    return [
        {
            "workload": workload,
            "running": running,
            "engine": name,
            "schedule_settle_us": cost.schedule_settle,
            "batch_us": None if name == "vllm" else cost.batch,
            "ratio": cost.schedule_settle / theirs if theirs and name != "vllm" else None,
            "ratio_with_batch": (cost.schedule_settle + cost.batch) / theirs if theirs and name != "vllm" else None,
        }
        for name, cost in costs.items()
    ]


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure everything and return the report as it goes into the JSON. Raises RunFailed, WrongInput."""
    makes: dict[str, Make] = {policy: partial(OurScheduler, policy) for policy in POLICIES}
    version = None
    steps: list[dict[str, Any]] = []
    waiting: dict[str, Any] = {}
    with ExitStack() as stack:
        if arguments.vllm_python:
            console.print("starting vLLM's interpreter", highlight=False)
            peer = stack.enter_context(vllm(arguments.vllm_python))
            makes["vllm"], version = peer.open, peer.version
        for running in arguments.running:
            for workload, turnover in (("decode", False), ("+ prefill", True)):
                console.print(f"{workload}, {running} running", highlight=False)
                costs = measure_steps(makes, running, turnover, arguments.steps, arguments.repeat)
                steps += step_rows(workload, running, costs)
        for name, make in makes.items() if arguments.waiting else ():
            console.print(f"{name} with {arguments.waiting} waiting", highlight=False)
            waiting[name] = measure_waiting(name, make, arguments.waiting, arguments.steps, arguments.repeat)
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor() or platform.machine()},
        "vllm": version,
        "prompt_tokens": PROMPT_TOKENS,
        "block_size": BLOCK_SIZE,
        "rounds": arguments.steps,
        "repeat": arguments.repeat,
        "steps": steps,
        "few_waiting": FEW_WAITING,
        "many_waiting": arguments.waiting,
        "waiting": waiting,
    }


def print_tables(report: dict[str, Any], console: Console) -> None:
    console.print(steps_table(report))
    console.print("phased, + prefill: mean of a prefill and a decode step; others do both in one", highlight=False)
    if report["waiting"]:
        console.print(waiting_table(report))


def steps_table(report: dict[str, Any]) -> Table:
    table = Table("workload", title="µs per step")
    for column in ("running", "engine", "schedule\n+ settle", "batch", "vs vLLM", "with batch"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for row in report["steps"]:
        batch = "" if row["batch_us"] is None else f"{row['batch_us']:.0f}"
        ratios = ("" if row[key] is None else f"{row[key]:.3f}x" for key in ("ratio", "ratio_with_batch"))
        cost = f"{row['schedule_settle_us']:.0f}"
        table.add_row(row["workload"], str(row["running"]), row["engine"], cost, batch, *ratios)
    return table


def waiting_table(report: dict[str, Any]) -> Table:
    """`bytes` of a waiting request, whole and with a prompt of one token."""
    table = Table("engine", title=f"{RUNNING_BESIDE_WAITING} running and a queue: µs, bytes of a request")
    few, many = report["few_waiting"], report["many_waiting"]
    for column in (f"step,\n{few} waiting", f"step,\n{many} waiting", "add", "abort", "bytes", "without\nprompt"):
        table.add_column(column, justify="right")
    for name, row in report["waiting"].items():
        steps = (f"{row[key]:.0f}" for key in ("few_us", "many_us"))
        single = (f"{row[key]:.1f}" for key in ("add_us", "abort_us"))
        table.add_row(name, *steps, *single, *(f"{row[key]:.0f}" for key in ("bytes_each", "bytes_without_prompt")))
    return table


# ---- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench: {message}\n")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m bench.scheduler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [64, 256, 1024, 4096]
    parser.add_argument("--running", type=_positive, nargs="+", default=numbers, metavar="N", help="requests that run")
    parser.add_argument("--steps", type=_positive, default=20, metavar="N", help="rounds in a repeat (20)")
    parser.add_argument("--repeat", type=_positive, default=9, metavar="N", help="repeats, in turns (9)")
    parser.add_argument("--waiting", type=_count, default=20000, metavar="N", help="the long queue (20000); 0: none")
    parser.add_argument("--vllm-python", metavar="PATH", help="Python of an environment with vLLM: measured too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        if arguments.json:
            writable(arguments.json)
        report = run(arguments, Console(stderr=True))
    except RunFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except WrongInput as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print_tables(report, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def writable(path: Path) -> None:
    """Find out before the run whether there will be a file. Raises WrongInput."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise WrongInput(f"cannot write {path}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
