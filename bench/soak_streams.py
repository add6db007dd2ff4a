"""Streams of a soak: what is asked, what came back, and whether that is what an undisturbed server says."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

RETRY_S = 0.1  # after a refusal with 429 or 503: the server asks for patience
KINDS = ("ok", "altered", "lost", "failed")


@dataclass
class Answer:
    """What came back for one request. `failure`: the server's own words; `broken`: how a stream broke off without any;
    `arrivals`: of its pieces, time.monotonic().
    """

    text: str = ""
    tokens: int = 0
    failure: str = ""
    broken: str = ""
    refusals: int = 0
    arrivals: list[float] = field(default_factory=list)

    def verdict(self, reference: "Answer") -> str:
        """One of KINDS: as it should be; another text; ended without a word; ended with a reason."""
        if self.failure:
            return "failed"
        if self.broken:
            return "lost"
        return "ok" if (self.text, self.tokens) == (reference.text, reference.tokens) else "altered"


def make_bodies(
    model: str, count: int, *, seeded: bool, seed: int, token_ids: range, prompts: range, lengths: range
) -> list[dict[str, Any]]:
    """Requests of random token ids; their answers are a function of the model and of these arguments alone."""
    rng = random.Random(seed)
    return [
        {
            "model": model,
            "prompt": rng.choices(token_ids, k=rng.choice(prompts)),
            "max_tokens": rng.choice(lengths),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"temperature": 0.8, "seed": rng.getrandbits(32)} if seeded else {"temperature": 0}),
        }
        for _ in range(count)
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], patience_s: float) -> Answer:
    """One stream to its end, of whatever kind. A refusal before it begins is patiently tried again."""
    answer, deadline = Answer(), time.monotonic() + patience_s
    while await _try(client, body, answer):
        if time.monotonic() > deadline:
            answer.failure = f"refused for {patience_s:g} s"
            break
        answer.refusals += 1
        await asyncio.sleep(RETRY_S)
    return answer


async def _try(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> bool:
    """True: refused for the time being, nothing has begun."""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code in (429, 503):
                return True
            if reply.status_code != 200:
                answer.failure = f"status {reply.status_code}: {(await reply.aread())[:300].decode(errors='replace')}"
                return False
            ended = False
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    _read(json.loads(line[6:]), answer)
            if not ended and not answer.failure:
                answer.broken = "the stream ended without [DONE]"
    except (httpx.HTTPError, ValueError) as error:
        answer.broken = f"{type(error).__name__}: {error}"
    return False


def _read(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        answer.failure = str(event["error"].get("message", event["error"]))
        return
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        answer.text += choice["text"]
        answer.arrivals.append(time.monotonic())


async def ask_all(
    client: httpx.AsyncClient,
    bodies: Sequence[dict[str, Any]],
    *,
    concurrency: int,
    patience_s: float,
    on_answer: Callable[[int, Answer], None],
    enough: Callable[[], bool] = lambda: True,
) -> None:
    """Run all streams, `concurrency` at a time, over and over until `enough`; each at least once."""
    following = 0

    async def work() -> None:
        nonlocal following
        while following < len(bodies) or not enough():
            number, following = following, following + 1
            on_answer(number % len(bodies), await ask(client, bodies[number % len(bodies)], patience_s))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
