"""What votes take of a decode step: one request on the demo model, and the gang's own trace of it.

A ballot lasts on each rank until the last one has come. What it costs is the time of that last rank, the shortest of
all; what the others spend is waiting for a slower step, which a vote only makes visible.
"""

import json
import statistics
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import servers

START_TIMEOUT_S = 600.0
BALLOTS = ("first ballot", "second ballot")


@dataclass(frozen=True)
class Share:
    """Of the decode steps of a trace: medians of the votes of a step and of its whole length, in µs, and what all votes
    took of all steps."""

    steps: int
    votes_us: float
    step_us: float
    share: float


def vote_share(events: Sequence[dict[str, Any]]) -> Share:
    """`events`: of a Chrome trace, as GET /debug/trace gives it. A step lasts from its first ballot to the next step's.
    Raises ValueError if no two decode steps follow each other."""
    slices = [event for event in events if event.get("ph") == "X" and not event["args"].get("unfinished")]
    decodes = {event["args"]["step"] for event in slices if event["name"] == "DECODE"}
    lengths: dict[int, dict[int, float]] = defaultdict(dict)  # ordinal of a ballot -> rank -> how long
    steps: dict[int, int] = {}  # ordinal -> step
    begins: dict[int, float] = {}  # step -> its first ballot on rank 0
    for event in slices:
        if event["name"] in BALLOTS:
            ordinal, step = event["args"]["ordinal"], event["args"]["step"]
            lengths[ordinal][event["pid"]] = event["dur"]
            steps[ordinal] = step
            if event["pid"] == 0 and event["name"] == BALLOTS[0]:
                begins[step] = event["ts"]
    ranks = max((len(by_rank) for by_rank in lengths.values()), default=0)
    votes: dict[int, float] = defaultdict(float)
    for ordinal, by_rank in lengths.items():
        if len(by_rank) == ranks:
            votes[steps[ordinal]] += min(by_rank.values())
    whole = sorted(
        step for step in decodes if step in votes and step in begins and step + 1 in begins and step + 1 in decodes
    )
    if not whole:
        raise ValueError("the trace has no two decode steps that follow each other")
    took = [begins[step + 1] - begins[step] for step in whole]
    cast = [votes[step] for step in whole]
    return Share(len(whole), statistics.median(cast), statistics.median(took), sum(cast) / sum(took))


def measure_share(config: Path, tokens: int, rounds: int) -> list[Share]:
    """Start the demo, let it answer one request after the other, and read its trace after each. Raises
    servers.ServerFailed."""
    port = servers.free_port()
    with servers.running(servers.phalanx(None, port, config, []), port, START_TIMEOUT_S) as server:
        model = servers.served_model(server.url)
        _answer(server.url, model, tokens)
        found = []
        for _ in range(rounds):
            _answer(server.url, model, tokens)
            trace = json.loads(_request(f"{server.url}/debug/trace?steps={tokens - 8}"))
            found.append(vote_share(trace["traceEvents"]))
        return found


def _answer(url: str, model: str, tokens: int) -> None:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    _request(f"{url}/v1/completions", json.dumps(body).encode())


def _request(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return bytes(answer.read())
    except OSError as error:
        raise servers.ServerFailed(f"{url}: {error}") from None
