"""`phalanx chaos`: faults on demand in a running server, over its HTTP API, one at a time or as a drill."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from launcher.client import ServerError, ask, open_client

TIMEOUT_S = 10.0
LOOK_S = 0.05
WAITS_S = 120.0  # for a fault to show: longer than a vote may take
RECOVERS_S = 600.0
DEADLY = ("kill", "stop", "raise", "hang")
KINDS = (*DEADLY, "slow", "full")  # of a drill: what shows, or passes, without anybody's help


@dataclass(frozen=True)
class Outcome:
    """One fault of a drill, and how long until the server was ready again, unless there is a `failure`."""

    kind: str
    replica: int
    rank: int
    seconds: float
    failure: str

    @property
    def end(self) -> str:
        return f"never ready again: {self.failure}" if self.failure else f"ready again after {self.seconds:.1f} s"


def inject(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST a fault; the answer names kind and ranks. Raises ServerError."""
    answer: dict[str, Any] = ask("POST", url, "/debug/chaos", timeout_s=TIMEOUT_S, body=body).json()
    return answer


def run_fault(url: str, kind: str, rank: str, parameters: dict[str, Any]) -> int:
    """One fault. `rank`: a number, random or all. Raises ServerError."""
    done = inject(url, {"kind": kind, "rank": int(rank) if rank.isdecimal() else rank, **parameters})
    print(f"{kind} at rank{'s' if len(done['ranks']) > 1 else ''} {', '.join(map(str, done['ranks']))}")
    return 0


def run_drill(url: str, kinds: Sequence[str], *, count: int, every_s: float, seed: int) -> int:
    """Faults of these kinds at random ranks, each when the server is ready again after the one before.

    Prints a table. 0: it recovered from all; 1: it did not. Raises ServerError.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ServerError(f"a drill knows {', '.join(KINDS)}, not {', '.join(unknown)}")
    console, rng, outcomes = Console(stderr=True, highlight=False), random.Random(seed), list[Outcome]()
    with open_client(url, timeout=TIMEOUT_S) as client:
        server = Server(client)
        if not (before := server.look()).ready:
            raise ServerError(f"{url} is not ready: {before.reason}")
        for number in range(count):
            if number:
                time.sleep(every_s)
            kind, replica = rng.choice(kinds), rng.randrange(len(before.ranks))
            rank, began = rng.randrange(before.ranks[replica]), time.monotonic()
            inject(url, {"kind": kind, "replica": replica, "rank": rank})
            failure = server.recovers(before, falls=kind in DEADLY)
            outcomes.append(Outcome(kind, replica, rank, time.monotonic() - began, failure))
            console.print(f"{number + 1} of {count}: {kind} at rank {rank}: {outcomes[-1].end}")
            if failure:
                break
            before = server.look()
    Console(highlight=False).print(_table(outcomes))
    return 1 if outcomes[-1].failure else 0


@dataclass(frozen=True)
class Look:
    """A server as it was found. `ranks`: of each replica; `lives`: of all gangs together; `reason`: why it is not
    ready; `ended`: it never will be.
    """

    ready: bool
    ranks: tuple[int, ...] = ()
    lives: int = 0
    reason: str = ""
    ended: bool = False


class Server:
    """The server of a drill."""

    def __init__(self, client: httpx.Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._model = ""

    def look(self) -> Look:
        """By /status, which tells of each replica."""
        try:
            replicas = self._client.get("/status").raise_for_status().json()["replicas"]
        except httpx.TransportError as error:
            return Look(False, reason=f"the server has ended ({error or type(error).__name__})", ended=True)
        except httpx.HTTPStatusError as error:
            raise ServerError(f"{error.request.url} answers {error.response.status_code}") from None
        waiting = [each["reason"] or each["state"] for each in replicas if each["state"] != "serving"]
        ranks, lives = tuple(each["ranks"] for each in replicas), sum(each["epoch"] for each in replicas)
        return Look(not waiting, ranks, lives, ", ".join(waiting))

    def recovers(self, before: Look, *, falls: bool) -> str:
        """Wait until the server is ready again; first that it is not, if it `falls`. Returns why it is not, or "".

        A rank that is stopped in its sleep is missed by nobody before there is work, so there is some.
        """
        began = self._clock()
        while falls and (now := self.look()).ready and now.lives == before.lives:
            self._give_work()
            if self._clock() - began > WAITS_S:
                return f"nobody noticed the fault within {WAITS_S:g} s"
            time.sleep(LOOK_S)
        while not (now := self.look()).ready:
            if now.ended or self._clock() - began > RECOVERS_S:
                return now.reason
            time.sleep(LOOK_S)
        return ""

    def _give_work(self) -> None:
        """A request of one token, whose answer nobody waits for."""
        try:
            if not self._model:
                self._model = self._client.get("/v1/models").json()["data"][0]["id"]
            body = {"model": self._model, "prompt": "a", "max_tokens": 1}
            self._client.post("/v1/completions", json=body, timeout=2 * LOOK_S)
        except (httpx.TransportError, ValueError, LookupError, TypeError):
            return


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("fault", "replica", "rank", "end")
    for outcome in outcomes:
        table.add_row(outcome.kind, str(outcome.replica), str(outcome.rank), outcome.end)
    return table
