"""Many deployments that start at the same moment in one Ray cluster: does each find its own ranks, and how fast?

    python -m bench.starts                            # 6 deployments of 2 ranks, 10 rounds, a small random model
    python -m bench.starts --gangs 2 --rounds 3 --model DIR --json starts.json

Every deployment is asked for one completion; the exit code is 1 unless all were answered, with the same text. The table
goes to stderr, the report as JSON to stdout.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from bench.servers import ROOT, ServerFailed, free_port, stop, tail

READY = re.compile(rb"^ready\s+(http://\S+)\s+model (\S+)", re.MULTILINE)
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
RAY_START_S = 120.0
OBJECT_STORE_BYTES = 80 << 20


@dataclass(frozen=True)
class Start:
    """One deployment of one round. seconds: until ready. text: its answer, None if there was none."""

    round: int
    seconds: float
    text: str | None
    error: str


@contextmanager
def ray_cluster(cpus: int) -> Iterator[str]:
    """A head node of its own for the measurement; yields its address. Raises ServerFailed."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="px") as folder, tempfile.TemporaryFile() as log:
        argv = [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats",
            "--port", str(port), "--num-cpus", str(cpus), "--include-dashboard", "false", "--temp-dir", folder,
            "--node-ip-address", "127.0.0.1", "--object-store-memory", str(OBJECT_STORE_BYTES),
        ]  # fmt: skip
        process = start(argv, log)
        try:
            wait_for(process, log, rb"Ray runtime started", RAY_START_S)
            yield f"127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)  # it ends all of its node
            stop(process)


def start(argv: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def wait_for(process: subprocess.Popen[bytes], log: IO[bytes], words: bytes, timeout_s: float) -> re.Match[bytes]:
    """The place of `words`, a pattern, in what the process writes. Raises ServerFailed when that does not come."""
    deadline = time.monotonic() + timeout_s
    while True:
        if found := re.search(words, os.pread(log.fileno(), 1 << 20, 0), re.MULTILINE):
            return found
        if process.poll() is not None:
            raise ServerFailed(f"ended with status {process.returncode}: {tail(log)}")
        if time.monotonic() > deadline:
            raise ServerFailed(f"nothing after {timeout_s:.0f} s: {tail(log)}")
        time.sleep(0.1)


def try_one(number: int, address: str, model: Path, arguments: argparse.Namespace) -> Start:
    """Start a deployment, ask it once, and stop it."""
    argv = [sys.executable, "-m", "launcher", "serve", "--port", "0", "--ray-address", address, "--model", str(model)]
    argv += ["--dp", str(arguments.ranks), *(part for setting in arguments.set for part in ("--set", setting))]
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = start(argv, log)
        try:
            ready = wait_for(process, log, READY.pattern, arguments.limit_s)
            seconds = time.monotonic() - began
            return Start(number, seconds, ask(ready[1].decode(), ready[2].decode()), "")
        except (ServerFailed, OSError, ValueError, LookupError) as error:
            return Start(number, time.monotonic() - began, None, str(error))
        finally:
            stop(process)


def ask(url: str, model: str) -> str:
    body = {"model": model, "prompt": "the capital of", "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def run(arguments: argparse.Namespace, model: Path, console: Console) -> list[Start]:
    starts: list[Start] = []
    with ray_cluster(arguments.gangs * arguments.ranks) as address, ThreadPoolExecutor(arguments.gangs) as pool:
        for number in range(1, arguments.rounds + 1):
            tries = [pool.submit(try_one, number, address, model, arguments) for _ in range(arguments.gangs)]
            found = [attempt.result() for attempt in tries]
            starts += found
            served = sum(one.text is not None for one in found)
            slowest = max(one.seconds for one in found)
            console.print(f"round {number}: {served} of {len(found)} answered, the slowest ready after {slowest:.1f} s")
            for one in found:
                if one.error:
                    console.print(one.error, markup=False, highlight=False)
    return starts


def report_of(starts: Sequence[Start], arguments: argparse.Namespace) -> dict[str, Any]:
    seconds = [one.seconds for one in starts if one.text is not None]
    return {
        "gangs": arguments.gangs,
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "started": len(starts),
        "answered": len(seconds),
        "different_answers": len({one.text for one in starts if one.text is not None}),
        "ready_s": {"median": statistics.median(seconds), "max": max(seconds)} if seconds else {},
        "starts": [asdict(one) for one in starts],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.starts", description="Deployments that start at the same moment.")
    parser.add_argument("--gangs", type=int, default=6, help="deployments at once")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", type=Path, help="checkpoint; default: a small random one")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help="setting of `phalanx serve`")
    parser.add_argument("--limit-s", type=float, default=300.0, help="longest wait for one deployment")
    parser.add_argument("--json", type=Path, help="also write the report here")
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        starts = run(arguments, arguments.model or random_model(Path(folder) / "tiny"), console)
    report = report_of(starts, arguments)
    table = Table(title=f"{arguments.gangs} deployments of {arguments.ranks} ranks at once")
    for column in ("rounds", "started", "answered", "ready, median s", "ready, slowest s"):
        table.add_column(column, justify="right")
    ready = [f"{value:.1f}" for value in report["ready_s"].values()] or ["-", "-"]
    table.add_row(str(arguments.rounds), str(report["started"]), str(report["answered"]), *ready)
    console.print(table)
    text = json.dumps(report, indent=2)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")
    print(text)
    return 0 if report["answered"] == report["started"] and report["different_answers"] == 1 else 1


def random_model(directory: Path) -> Path:
    from tests.checkpoints import write_mixtral

    return write_mixtral(directory, with_tokenizer=True)


if __name__ == "__main__":
    sys.exit(main())
