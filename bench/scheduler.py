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
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.servers import tail
from dp_engine.config import EngineConfig
from dp_engine.messages import Add, Sampling
from dp_engine.policies import make_scheduler
from vote.decision import StepType

POLICIES = ("phased", "unified")
PROMPT_TOKENS = 512
BLOCK_SIZE = 16
STEP_BUDGET = 8192  # tokens
TOKEN_IDS = (1000, 20000)  # the end-of-sequence token is not among them
WARM_UP = 16  # rounds
FEW_WAITING = 20
RUNNING_BESIDE_WAITING = 64
ABORTS = 1000
FIRST_WAITING = 1 << 20  # request id
FOR_EVER = 1 << 16  # new tokens: more than any run computes
PEER_SCRIPT = Path(__file__).with_name("scheduler_vllm.py")


class RunFailed(RuntimeError):
    """A run went wrong, so there is no figure; the message says how."""


class WrongInput(ValueError):
    """An argument is of no use; the message is one line."""


class Request(NamedTuple):
    request_id: int
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Shape:
    """Sizes of a scheduler, the same for all."""

    running: int  # most at a time
    num_blocks: int
    max_model_len: int
    budget: int
    block_size: int = BLOCK_SIZE


class Round(NamedTuple):
    """The steps up to and including the first that is no prefill. Times in µs, of all its steps together."""

    steps: int
    sequences: int  # in the last step
    schedule: float
    batch: float
    settle: float


class Cost(NamedTuple):
    """Of one step, in µs."""

    schedule_settle: float
    batch: float


# ---- ours


def elapsed(action: Callable[[Any], object], argument: Any) -> float:
    """Of one call, in µs."""
    began = time.perf_counter()
    action(argument)
    return 1e6 * (time.perf_counter() - began)


class OurScheduler:
    """One of our policies and the fake model. Lists of costs are µs, one per request."""

    def __init__(self, policy: str, shape: Shape) -> None:
        config = EngineConfig.model_validate(
            {
                "policy": policy,
                "block_size": shape.block_size,
                "max_num_seqs": shape.running,
                "max_num_batched_tokens": shape.budget,
            }
        )
        self._scheduler = make_scheduler(config, shape.num_blocks, shape.max_model_len, [TOKEN_IDS[1]])
        self._phased = policy == "phased"
        self._tokens = np.random.default_rng(0)

    def add(self, requests: Sequence[Request]) -> list[float]:
        costs = []
        for request_id, prompt_tokens, max_tokens in requests:
            prompt = np.random.default_rng(request_id).integers(*TOKEN_IDS, prompt_tokens).tolist()
            costs.append(elapsed(self._scheduler.add, Add(0, request_id, prompt, Sampling(max_tokens))))
        return costs

    def run(self, rounds: Sequence[Sequence[Request]]) -> list[Round]:
        """One round for each entry, before which these requests arrive."""
        costs = []
        for arrivals in rounds:
            self.add(arrivals)
            costs.append(self._round())
        return costs

    def _round(self) -> Round:
        steps, schedule, batch, settle = 0, 0.0, 0.0, 0.0
        step_type = StepType.PREFILL
        while step_type is StepType.PREFILL:
            began = time.perf_counter()
            step_type = self._step_type()
            self._scheduler.plan(step_type)
            planned = time.perf_counter()
            arrays = self._scheduler.batch()
            built = time.perf_counter()
            tokens = self._tokens.integers(*TOKEN_IDS, arrays.num_outputs)
            computed = time.perf_counter()
            self._scheduler.settle(tokens)
            settled = time.perf_counter()
            steps += 1
            schedule += planned - began
            batch += built - planned
            settle += settled - computed
        return Round(steps, len(arrays), 1e6 * schedule, 1e6 * batch, 1e6 * settle)

    def _step_type(self) -> StepType:
        """What a gang of this rank alone would choose."""
        facts = self._scheduler.facts()
        if not self._phased:
            return StepType.MIXED
        return StepType.PREFILL if facts.wants_prefill and self._scheduler.try_prefill() else StepType.DECODE

    def abort(self, request_ids: Sequence[int]) -> list[float]:
        return [elapsed(self._scheduler.abort, request_id) for request_id in request_ids]

    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished

    def bytes_each(self, requests: Sequence[Request]) -> float:
        """Add requests; the memory that each then holds."""
        tracemalloc.start()
        self.add(requests)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held / len(requests)

    def settle_down(self) -> None:
        """Take all that lives now out of the garbage collector's rounds, as vLLM's engine does when it is up."""
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        gc.unfreeze()


# ---- vLLM's, in a process of its own interpreter


class Peer:
    """Owns the process. Calls are answered in order; between calls it waits and costs nothing."""

    def __init__(self, process: subprocess.Popen[str], log: Any, python: str) -> None:
        self._process = process
        self._log = log
        self._handles = 0
        try:
            self.version = str(self._answer()["result"])
        except (RunFailed, ValueError, LookupError, TypeError):
            said = tail(log, 1).strip() or "it does not say why"
            raise WrongInput(f"{python} offers no vLLM scheduler that we know: {said}") from None

    def open(self, shape: Shape) -> "PeerScheduler":
        self._handles += 1
        self.call(self._handles, "open", asdict(shape))
        return PeerScheduler(self, self._handles)

    def call(self, handle: int, method: str, *arguments: Any) -> Any:
        """Raises RunFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([handle, method, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; reading its answer says how
        answer = self._answer()
        if "error" in answer:
            raise RunFailed(f"vLLM's scheduler failed in {method}: {answer['error']}")
        return answer["result"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RunFailed(f"vLLM's process ended with status {self._process.wait()}: {tail(self._log)}")
        return json.loads(line)


class PeerScheduler:
    """One scheduler in the peer's process."""

    def __init__(self, peer: Peer, handle: int) -> None:
        self._peer = peer
        self._handle = handle

    def add(self, requests: Sequence[Request]) -> list[float]:
        return self._peer.call(self._handle, "add", requests)

    def run(self, rounds: Sequence[Sequence[Request]]) -> list[Round]:
        return [Round(*cost) for cost in self._peer.call(self._handle, "run", rounds)]

    def abort(self, request_ids: Sequence[int]) -> list[float]:
        return self._peer.call(self._handle, "abort", request_ids)

    def num_unfinished(self) -> int:
        return self._peer.call(self._handle, "num_unfinished")

    def bytes_each(self, requests: Sequence[Request]) -> float:
        return self._peer.call(self._handle, "bytes_each", requests)

    def settle_down(self) -> None:
        self._peer.call(self._handle, "settle_down")

    def close(self) -> None:
        self._peer.call(self._handle, "close")


Scheduler: TypeAlias = OurScheduler | PeerScheduler
Make: TypeAlias = Callable[[Shape], Scheduler]


@contextmanager
def vllm(python: str) -> Iterator[Peer]:
    """The peer's process, stopped at the end. Raises WrongInput if it cannot be started."""
    env = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as model:
        try:
            process = subprocess.Popen(
                [python, "-I", str(PEER_SCRIPT), model],
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        except OSError as error:
            raise WrongInput(f"cannot run {python}: {error.strerror}") from None
        try:
            yield Peer(process, log, python)
        finally:
            process.kill()  # nothing of it wants saving
            process.communicate()


# ---- workloads


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
