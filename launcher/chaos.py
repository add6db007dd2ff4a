"""`phalanx chaos`: faults on demand in a running server, over its HTTP API, one at a time or as a drill."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from launcher.diagnose import DiagnoseError, message_of

TIMEOUT_S = 10.0
LOOK_S = 0.05
WAITS_S = 120.0  # for a fault to show: longer than a vote may take
RECOVERS_S = 600.0
DEADLY = ("kill", "stop", "raise", "hang")
KINDS = (*DEADLY, "slow", "full")  # of a drill: what shows, or passes, without anybody's help


@dataclass(frozen=True)
class Outcome:
    """One fault of a drill. `seconds`: until the server was ready again; None: it never was, for this `reason`."""

    kind: str
    rank: int
    seconds: float | None
    reason: str = ""


def inject(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST a fault; the answer names kind and ranks. Raises DiagnoseError."""
    try:
        reply = httpx.post(f"{url.rstrip('/')}/debug/chaos", json=body, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DiagnoseError(f"no answer from {url}: {error or type(error).__name__}") from None
    if reply.status_code != 200:
        raise DiagnoseError(f"{url} answers {reply.status_code}: {message_of(reply)}")
    answer: dict[str, Any] = reply.json()
    return answer


def run_fault(url: str, kind: str, rank: str, parameters: dict[str, Any]) -> int:
    """One fault. `rank`: a number, random or all. Raises DiagnoseError."""
    done = inject(url, {"kind": kind, "rank": int(rank) if rank.isdecimal() else rank, **parameters})
    print(f"{kind} at rank{'s' if len(done['ranks']) > 1 else ''} {', '.join(map(str, done['ranks']))}")
    return 0


def run_drill(url: str, kinds: Sequence[str], *, count: int, every_s: float, seed: int) -> int:
    """Faults of these kinds at random ranks, each when the server is ready again after the one before.

    Prints a table. 0: it recovered from all; 1: it did not. Raises DiagnoseError.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise DiagnoseError(f"a drill knows {', '.join(KINDS)}, not {', '.join(unknown)}")
    console, rng, outcomes = Console(stderr=True, highlight=False), random.Random(seed), list[Outcome]()
    with httpx.Client(base_url=url.rstrip("/"), timeout=TIMEOUT_S) as client:
        server = Server(client)
        if (ranks := server.ranks()) is None:
            raise DiagnoseError(f"{url} is not ready: {server.reason}")
        for number in range(count):
            if number:
                time.sleep(every_s)
            kind, rank = rng.choice(kinds), rng.randrange(ranks)
            began = time.monotonic()
            inject(url, {"kind": kind, "rank": rank})
            recovered = server.recovers(began, falls=kind in DEADLY)
            outcomes.append(Outcome(kind, rank, time.monotonic() - began if recovered else None, server.reason))
            console.print(f"{number + 1} of {count}: {_words(outcomes[-1])}")
            if not recovered:
                break
    Console(highlight=False).print(_table(outcomes))
    return 0 if all(outcome.seconds is not None for outcome in outcomes) else 1


class Server:
    """The server as a drill sees it. `reason`: why it was not ready when it was asked last."""

    def __init__(self, client: httpx.Client, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason = ""
        self._client = client
        self._clock = clock
        self._model = ""

    def ranks(self) -> int | None:
        """How many there are; None: the server is not ready."""
        try:
            reply = self._client.get("/ready")
        except httpx.TransportError as error:
            self.reason = f"the server has ended ({error or type(error).__name__})"
            return None
        if reply.status_code != 200:
            self.reason = str(reply.json().get("reason", reply.status_code))
            return None
        return int(reply.json()["ranks"])

    def recovers(self, began: float, *, falls: bool) -> bool:
        """Wait until the server is ready again after a fault at `began`; first that it is not, if it `falls`.

        A rank that is stopped in its sleep is missed by nobody before there is work, so there is some.
        """
        while falls and self.ranks() is not None:
            self._give_work()
            if self._clock() - began > WAITS_S:
                self.reason = f"nobody noticed the fault within {WAITS_S:g} s"
                return False
            time.sleep(LOOK_S)
        while self.ranks() is None:
            if self.reason.startswith("the server has ended") or self._clock() - began > RECOVERS_S:
                return False
            time.sleep(LOOK_S)
        self.reason = ""
        return True

    def _give_work(self) -> None:
        """A request of one token, whose answer nobody waits for."""
        try:
            if not self._model:
                self._model = self._client.get("/v1/models").json()["data"][0]["id"]
            body = {"model": self._model, "prompt": "a", "max_tokens": 1}
            self._client.post("/v1/completions", json=body, timeout=2 * LOOK_S)
        except (httpx.TransportError, ValueError, LookupError, TypeError):
            return


def _words(outcome: Outcome) -> str:
    end = f"ready again after {outcome.seconds:.1f} s" if outcome.seconds is not None else outcome.reason
    return f"{outcome.kind} at rank {outcome.rank}: {end}"


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("fault", "rank", "ready again after")
    for outcome in outcomes:
        after = f"{outcome.seconds:.1f} s" if outcome.seconds is not None else f"never: {outcome.reason}"
        table.add_row(outcome.kind, str(outcome.rank), after)
    return table
