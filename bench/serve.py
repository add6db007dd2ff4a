"""Throughput and latency of a server under closed bursts; a peer is measured in the same run.

    python -m bench.serve                                   starts `phalanx serve configs/demo.yaml` itself
    python -m bench.serve --vllm-python VENV/bin/python     then vLLM on the same checkpoint, and the ratio
    python -m bench.serve --url http://127.0.0.1:8000       measures a server that runs already

A burst is N requests sent at once, each of exactly `--prompt-tokens` random token ids (the same ids for every server,
new ones in every burst), answered greedily with exactly `--max-tokens` tokens. After one burst as warm-up, every figure
is the median over `--repeat` bursts. The table goes to stderr, JSON to stdout. Exit code 1: a request failed or a token
count is wrong.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import servers
from bench.client import burst
from bench.stats import BadAnswer, Summary, median_of, summarise, timeline

BURST_TIMEOUT_S = 600.0
START_TIMEOUT_S = 600.0
TOKEN_IDS = range(1000, 20000)  # text tokens of any vocabulary we serve; --token-ids for small ones


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="measure this running server instead of starting one")
    parser.add_argument("--config", type=Path, default=servers.ROOT / "configs" / "demo.yaml", help="phalanx's config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting for phalanx serve")
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint directory; default: the demo model")
    parser.add_argument("--vllm-python", metavar="PATH", help="Python of an environment with vLLM: measured too")
    parser.add_argument("--only-vllm", action="store_true", help="leave phalanx out")
    parser.add_argument("--concurrency", type=_counts, default=[1, 8, 32], metavar="N,N", help="burst sizes (1,8,32)")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3, help="measured bursts per size (3)")
    parser.add_argument("--token-ids", type=_span, default=TOKEN_IDS, metavar="FROM,TO", help="ids prompts are made of")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON to this file too")
    return parser.parse_args(argv)


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise ValueError
    return counts


def _span(text: str) -> range:
    first, last = text.split(",")
    return range(int(first), int(last))


def request_bodies(arguments: argparse.Namespace, model: str, size: int, number: int) -> list[bytes]:
    """The requests of burst `number` of a size: a function of the arguments only, so every server gets the same."""
    rng = random.Random(f"{size}/{number}")
    return [
        json.dumps(
            {
                "model": model,
                "prompt": rng.choices(arguments.token_ids, k=arguments.prompt_tokens),
                "max_tokens": arguments.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for _ in range(size)
    ]


def measure(url: str, arguments: argparse.Namespace, console: Console) -> dict[int, Summary]:
    """All burst sizes against one server. Raises BadAnswer."""
    model = servers.served_model(url)
    figures = {}
    for size in arguments.concurrency:
        bursts = []
        for number in range(arguments.repeat + 1):
            bodies = request_bodies(arguments, model, size, number)
            exchanges = asyncio.run(burst(f"{url}/v1/completions", bodies, BURST_TIMEOUT_S))
            bursts.append(summarise([timeline(exchange, arguments.max_tokens) for exchange in exchanges]))
            console.print(f"  {size} concurrent, burst {number}: {bursts[-1].tok_s:.1f} tok/s", highlight=False)
        figures[size] = median_of(bursts[1:])
    return figures


def commands(arguments: argparse.Namespace) -> Iterator[tuple[servers.Command, int]]:
    if not arguments.only_vllm:
        port = servers.free_port()
        yield servers.phalanx(arguments.model, port, arguments.config, arguments.set), port
    if arguments.vllm_python:
        port = servers.free_port()
        longest = max(2048, arguments.prompt_tokens + arguments.max_tokens)
        yield servers.vllm(arguments.vllm_python, checkpoint(arguments), port, longest), port


def checkpoint(arguments: argparse.Namespace) -> Path:
    """The checkpoint a peer loads."""
    if arguments.model:
        return Path(arguments.model).resolve()
    from launcher.demo_model import ensure_demo_model

    return ensure_demo_model()


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure every server in turn and return the report as it goes into the JSON."""
    engines: dict[str, Any] = {}
    if arguments.url:
        figures = measure(arguments.url.rstrip("/"), arguments, console)
        engines["server"] = {"start_s": None, "bursts": figures}
    for command, port in commands(arguments) if not arguments.url or arguments.vllm_python else ():
        if arguments.url and command.name == "phalanx":
            continue
        console.print(f"starting {command.name}", highlight=False)
        with servers.running(command, port, START_TIMEOUT_S) as server:
            console.print(f"{server.name} was ready after {server.start_s:.1f} s", highlight=False)
            engines[server.name] = {"start_s": server.start_s, "bursts": measure(server.url, arguments, console)}
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor() or platform.machine()},
        "prompt_tokens": arguments.prompt_tokens,
        "max_tokens": arguments.max_tokens,
        "repeat": arguments.repeat,
        "engines": {
            name: {
                "start_s": engine["start_s"],
                "bursts": {str(size): asdict(figures) for size, figures in engine["bursts"].items()},
            }
            for name, engine in engines.items()
        },
        "tok_s_ratio": ratios(engines),
    }


def ratios(engines: dict[str, Any]) -> dict[str, float]:
    """Our tokens per second over vLLM's, by burst size; empty unless both were measured."""
    ours = engines.get("phalanx") or engines.get("server")
    theirs = engines.get("vllm")
    if not ours or not theirs:
        return {}
    return {str(size): figures.tok_s / theirs["bursts"][size].tok_s for size, figures in ours["bursts"].items()}


def print_table(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"prompt {report['prompt_tokens']}, {report['max_tokens']} new tokens; times in ms")
    table.add_column("engine")
    for column in ("concurrent", "tok/s", "TTFT p50", "p99", "inter-token p50", "p99", "vs vLLM"):
        table.add_column(column, justify="right")
    for name, engine in report["engines"].items():
        for size, row in engine["bursts"].items():
            ratio = report["tok_s_ratio"].get(size)
            versus = f"{ratio:.2f}x" if ratio and name != "vllm" else ""
            table.add_row(name, size, *(f"{value:.1f}" for value in row.values()), versus)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = Console(stderr=True)
    try:
        report = run(arguments, console)
    except (BadAnswer, servers.ServerFailed) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print_table(report, console)
    text = json.dumps(report, indent=2)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
