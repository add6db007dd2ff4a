"""Many streams through many faults: none may be lost, and none may be altered by as much as a token.

    python -m bench.soak                            200 streams through 25 faults, on a small random checkpoint
    python -m bench.soak --model DIR --seeded       on a checkpoint of one's own, sampled with seeds
    python -m bench.soak --faults 0                 the streams alone

The streams run once undisturbed, which gives what they have to say. Then they run again, over and over while ranks are
killed, stopped or made to raise; the next fault comes when the server has got over the one before. The table goes to
stderr, JSON to stdout. Exit code 1: a stream was lost, altered or failed, something was left in the books, or the
server left a process or a segment of shared memory behind.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import servers
from bench.soak_faults import Blow, SoakFailed, recovery, strike_all
from bench.soak_streams import KINDS, Answer, ask_all, make_bodies
from bench.stats import percentile

START_TIMEOUT_S = 300.0
GONE_S = 20.0  # for processes to end after their server
DRAINED_S = 15.0
SETTINGS = ["chaos.enabled=true", "vote.control_timeout_s=5"]
BOOKS = ("phalanx_requests_inflight", "phalanx_load_tokens", "phalanx_kv_blocks_used")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=200, metavar="N")
    parser.add_argument("--faults", type=int, default=25, metavar="F")
    parser.add_argument("--concurrency", type=int, default=16, metavar="C")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["kill", "stop", "raise"], metavar="K,K")
    parser.add_argument("--seeded", action="store_true", help="sample, with a seed for each stream; default: greedy")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and faults")
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint; default: a small random one, fp32")
    parser.add_argument("--config", type=Path, default=servers.ROOT / "configs" / "demo.yaml", help="phalanx's config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting for phalanx serve")
    parser.add_argument("--token-ids", type=_span, default=range(5, 300), metavar="FROM,TO")
    parser.add_argument("--prompt-tokens", type=_span, default=range(4, 40), metavar="FROM,TO")
    parser.add_argument("--max-tokens", type=_span, default=range(40, 160), metavar="FROM,TO")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="for the whole soak once the server is ready")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON to this file too")
    return parser.parse_args(argv)


def _span(text: str) -> range:
    first, last = text.split(",")
    return range(int(first), int(last))


@dataclass
class Outcome:
    """What a soak came to. `troubles`: what is not as it was promised, one line each."""

    verdicts: Counter[str] = field(default_factory=Counter)
    refusals: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # of streams that are not ok
    blows: list[Blow] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    books: dict[str, float] = field(default_factory=dict)  # what is left in them
    processes: list[str] = field(default_factory=list)  # left behind
    segments: list[str] = field(default_factory=list)
    stopped: str = ""  # why it ended early

    def take(self, answer: Answer, reference: Answer) -> None:
        verdict = answer.verdict(reference)
        self.verdicts[verdict] += 1
        self.refusals += answer.refusals
        self.arrivals += answer.arrivals
        if verdict != "ok":
            self.reasons[answer.failure or answer.broken or "another text than undisturbed"] += 1

    @property
    def recoveries(self) -> list[float]:
        arrivals = sorted(self.arrivals)
        return [seconds for blow in self.blows if (seconds := recovery(arrivals, blow)) is not None]

    @property
    def troubles(self) -> list[str]:
        broken = [f"{self.verdicts[kind]} streams {kind}" for kind in KINDS[1:] if self.verdicts[kind]]
        books = [f"{name} is {value:g} after the last stream" for name, value in self.books.items()]
        left = [f"process left: {process}" for process in self.processes]
        left += [f"shared memory left: {name}" for name in self.segments]
        return [*broken, *books, *left, *([self.stopped] if self.stopped else [])]

    def report(self) -> dict[str, Any]:
        """As it goes into the JSON."""
        seconds = self.recoveries
        return {
            "streams": {kind: self.verdicts[kind] for kind in KINDS},
            "refused_at_first": self.refusals,
            "reasons": dict(self.reasons),
            "faults": [asdict(blow) for blow in self.blows],
            "recovery_s": {"median": percentile(seconds, 0.5), "p95": percentile(seconds, 0.95), "max": max(seconds)}
            if seconds
            else None,
            "troubles": self.troubles,
        }


async def soak(url: str, arguments: argparse.Namespace, outcome: Outcome, progress: Progress) -> None:
    """Both runs against a server that is ready; `outcome` is filled as they go. Raises SoakFailed."""
    bodies = make_bodies(
        servers.served_model(url), arguments.streams, seeded=arguments.seeded, seed=arguments.seed,
        token_ids=arguments.token_ids, prompts=arguments.prompt_tokens, lengths=arguments.max_tokens,
    )  # fmt: skip
    references: dict[int, Answer] = {}
    undisturbed = progress.add_task("undisturbed", total=len(bodies))
    struck = progress.add_task("faults", total=arguments.faults)

    def refer(number: int, answer: Answer) -> None:
        if answer.failure or answer.broken:
            raise SoakFailed(f"an undisturbed stream fails: {answer.failure or answer.broken}")
        references[number] = answer
        progress.advance(undisturbed)

    def note(blow: Blow) -> None:
        outcome.blows.append(blow)
        progress.advance(struck)

    options = {"concurrency": arguments.concurrency, "patience_s": arguments.limit_s}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=httpx.Timeout(60, read=arguments.limit_s), limits=limits
    ) as client:
        await ask_all(client, bodies, **options, on_answer=refer)
        disturbed = progress.add_task("disturbed", total=None)

        def compare(number: int, answer: Answer) -> None:
            outcome.take(answer, references[number])
            progress.advance(disturbed)

        faults = asyncio.create_task(
            strike_all(
                client,
                arguments.kinds,
                arguments.faults,
                random.Random(arguments.seed),
                limit_s=arguments.limit_s,
                on_blow=note,
            )
        )
        try:
            await ask_all(client, bodies, **options, on_answer=compare, enough=faults.done)
            await faults
        finally:
            faults.cancel()
        outcome.books = await _left_in_books(client)


async def _left_in_books(client: httpx.AsyncClient) -> dict[str, float]:
    """Metrics that are not 0 though there is nothing to do; the last reports may take a moment."""
    deadline = time.monotonic() + DRAINED_S
    while (left := _samples((await client.get("/metrics")).text)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return left


def _samples(metrics: str) -> dict[str, float]:
    pairs = (line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith(BOOKS))
    return {name: float(value) for name, value in pairs if float(value)}


@contextlib.contextmanager
def nothing_left(outcome: Outcome) -> Iterator[set[psutil.Process]]:
    """Processes that are put into the set, and segments of shared memory, have to be gone at the end."""
    segments, processes = set(os.listdir("/dev/shm")), set[psutil.Process]()
    yield processes
    _, alive = psutil.wait_procs(processes, GONE_S)
    outcome.processes = [f"{process.pid} {process.name()}" for process in alive]
    outcome.segments = sorted(set(os.listdir("/dev/shm")) - segments)


async def watched(
    url: str, pid: int, arguments: argparse.Namespace, outcome: Outcome, seen: set[psutil.Process]
) -> None:
    """The soak in its time; `seen` gets every process that the server had."""

    async def watch() -> None:
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.update(psutil.Process(pid).children(recursive=True))
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    try:
        with Progress(console=Console(stderr=True)) as progress:
            await asyncio.wait_for(soak(url, arguments, outcome, progress), arguments.limit_s)
    except TimeoutError:
        outcome.stopped = f"the soak took longer than {arguments.limit_s:g} s"
    except SoakFailed as error:
        outcome.stopped = str(error)
    except ExceptionGroup as errors:
        outcome.stopped = "; ".join(str(error) for error in errors.exceptions)
    finally:
        watching.cancel()


def checkpoint(directory: Path) -> Path:
    """A small random model in fp32, of which a changed token shows as another text."""
    from tests.checkpoints import write_mixtral

    return write_mixtral(directory / "soak", with_tokenizer=True)


def print_table(outcome: Outcome, console: Console) -> None:
    table = Table("", "", title="soak", show_header=False)
    for kind in KINDS:
        table.add_row(f"streams {kind}", str(outcome.verdicts[kind]))
    for reason, count in outcome.reasons.most_common(5):
        table.add_row("", f"{count} x {reason[:200]}")
    table.add_row(
        "faults", ", ".join(f"{n} {kind}" for kind, n in Counter(b.kind for b in outcome.blows).items()) or "0"
    )
    if seconds := outcome.recoveries:
        figures = percentile(seconds, 0.5), percentile(seconds, 0.95), max(seconds)
        table.add_row("fault to next token, s", "median {:.1f}  p95 {:.1f}  max {:.1f}".format(*figures))
    for trouble in outcome.troubles or ["nothing lost, nothing altered, nothing left"]:
        table.add_row("result", trouble)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(list(argv) if argv is not None else None)
    outcome, port = Outcome(), servers.free_port()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model.resolve() if arguments.model else checkpoint(Path(scratch))
        settings = [*SETTINGS, f"supervision.crash_dir={scratch}/crashes", *arguments.set]
        command = servers.phalanx(model, port, arguments.config, settings)
        try:
            with nothing_left(outcome) as seen, servers.running(command, port, START_TIMEOUT_S) as server:
                asyncio.run(watched(server.url, server.pid, arguments, outcome, seen))
        except servers.ServerFailed as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    print_table(outcome, Console(stderr=True))
    text = json.dumps(outcome.report(), indent=2)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")
    print(text)
    return 1 if outcome.troubles else 0


if __name__ == "__main__":
    sys.exit(main())
