"""Faults of a soak, one after the other, and how long each kept everybody waiting."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

LOOK_S = 0.05
CALM_S = (0.1, 1.0)  # between the end of one fault and the next


class SoakFailed(RuntimeError):
    """The soak cannot go on; the message is one line."""


@dataclass(frozen=True)
class Blow:
    """A fault and when it was over, time.monotonic()."""

    kind: str
    replica: int
    rank: int
    after_steps: int
    struck: float
    serving: float


async def strike_all(
    client: httpx.AsyncClient,
    kinds: Sequence[str],
    count: int,
    rng: random.Random,
    *,
    limit_s: float,
    on_blow: Callable[[Blow], None],
) -> None:
    """`count` faults at random ranks and steps; each when the server has got over the one before. Raises SoakFailed."""
    for _ in range(count):
        before = await _until(client, _calm, limit_s, "serving, with no request under suspicion")
        await asyncio.sleep(rng.uniform(*CALM_S))
        target = rng.choice(before["replicas"])
        fault = {
            "kind": rng.choice(kinds),
            "replica": target["replica"],
            "rank": rng.randrange(target["ranks"]),
            "after_steps": rng.randrange(50),
        }
        struck = time.monotonic()
        reply = await client.post("/debug/chaos", json=fault)
        if reply.status_code != 200:
            raise SoakFailed(f"/debug/chaos answers {reply.status_code}: {reply.text[:300]}")
        await _until(client, _later_than(before), limit_s, "in another life")
        await _until(client, _serving, limit_s, "serving")
        on_blow(Blow(**fault, struck=struck, serving=time.monotonic()))


def recovery(arrivals: Sequence[float], blow: Blow) -> float | None:
    """Seconds from the fault to the end of the longest silence of all streams that it made; None: nobody spoke again.

    `arrivals`: of all streams' pieces, rising.
    """
    before = [at for at in arrivals if at <= blow.struck]
    silent = before[-1] if before else blow.struck
    longest, end = -1.0, None
    for at in arrivals:
        if at <= blow.struck:
            continue
        if silent > blow.serving:
            break
        if at - silent > longest:
            longest, end = at - silent, at
        silent = at
    return None if end is None else end - blow.struck


async def status(client: httpx.AsyncClient) -> dict[str, Any]:
    """What /status says. Raises SoakFailed."""
    try:
        reply = await client.get("/status")
    except httpx.TransportError as error:
        raise SoakFailed(f"the server has ended: {error or type(error).__name__}") from None
    if reply.status_code != 200:
        raise SoakFailed(f"/status answers {reply.status_code}: this server does not tell of its gangs' lives")
    found: dict[str, Any] = reply.json()
    return found


async def _until(
    client: httpx.AsyncClient, condition: Callable[[dict[str, Any]], bool], limit_s: float, what: str
) -> dict[str, Any]:
    deadline = time.monotonic() + limit_s
    while not condition(now := await status(client)):
        if time.monotonic() > deadline:
            raise SoakFailed(f"the server is not {what} within {limit_s:g} s: {now}")
        await asyncio.sleep(LOOK_S)
    return now


def _serving(now: dict[str, Any]) -> bool:
    return all(replica["state"] == "serving" for replica in now["replicas"])


def _calm(now: dict[str, Any]) -> bool:
    return _serving(now) and now["suspects"] == 0


def _later_than(before: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    return lambda now: _lives(now) > _lives(before)


def _lives(now: dict[str, Any]) -> int:
    return sum(replica["epoch"] for replica in now["replicas"])
