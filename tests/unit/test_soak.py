"""The soak's own judgement: what is lost or altered must show, and so must how long nobody spoke."""

import asyncio
import random
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.soak import Outcome, _samples
from bench.soak_faults import Blow, SoakFailed, recovery, strike_all
from bench.soak_streams import Answer, ask, ask_all, make_bodies
from tests.front_server import MODEL, FrontServer

BODY = {"model": MODEL, "prompt": [5, 6], "max_tokens": 9, "ignore_eos": True, "stream": True, "temperature": 0}
BODY["stream_options"] = {"include_usage": True}


def blow(struck: float, serving: float) -> Blow:
    return Blow("kill", 0, 0, 0, struck, serving)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (Answer("abc", 3), "ok"),
        (Answer("abd", 3), "altered"),
        (Answer("abc", 4), "altered"),
        (Answer("ab", 2, broken="the stream ended without [DONE]"), "lost"),
        (Answer("ab", 2, failure="rank 1 died"), "failed"),
    ],
)
def test_verdicts(answer: Answer, verdict: str) -> None:
    outcome = Outcome()
    outcome.take(answer, Answer("abc", 3))
    assert outcome.verdicts == {verdict: 1}
    assert bool(outcome.troubles) == (verdict != "ok")


def test_every_kind_of_trouble_is_told() -> None:
    outcome = Outcome(books={"x": 2.0}, processes=["7 python"], segments=["psm_1"], stopped="too long")
    assert outcome.report()["troubles"] == outcome.troubles
    assert len(outcome.troubles) == 4


@pytest.mark.parametrize(
    ("arrivals", "seconds"),
    [
        ([0, 1, 2, 9, 10], 9 - 1.5),  # one more token under way, then silence
        ([0, 1, 7, 8], 7 - 1.5),
        ([0, 1, 2, 6, 20], 6 - 1.5),  # what is silent later is no part of it
        ([0, 1], None),
        ([], None),
    ],
)
def test_recovery_is_the_end_of_the_silence(arrivals: list[float], seconds: float | None) -> None:
    assert recovery(arrivals, blow(1.5, 5.0)) == seconds


@given(st.lists(st.floats(0, 100), max_size=30), st.floats(0, 100), st.floats(0, 50))
def test_a_recovery_ends_with_a_token_after_the_fault(arrivals: list[float], struck: float, lasted: float) -> None:
    seconds = recovery(sorted(arrivals), blow(struck, struck + lasted))
    later = [at for at in arrivals if at > struck]
    assert (seconds is None) == (not later)
    assert seconds is None or any(at - struck == seconds for at in later)


def test_prompts_repeat_with_the_seed() -> None:
    options: dict[str, Any] = {"token_ids": range(5, 9), "prompts": range(2, 4), "lengths": range(3, 6)}
    one, same, other = (make_bodies("m", 20, seeded=True, seed=seed, **options) for seed in (1, 1, 2))
    assert one == same != other
    assert all(len(body["prompt"]) in (2, 3) and body["max_tokens"] in (3, 4, 5) for body in one)
    assert {body["temperature"] for body in make_bodies("m", 3, seeded=False, seed=1, **options)} == {0}


def test_books() -> None:
    metrics = (
        '# HELP x\nphalanx_requests_inflight{rank="0"} 0.0\nphalanx_kv_blocks_used{rank="1"} 3.0\nphalanx_kv_blocks 9\n'
    )
    assert _samples(metrics) == {'phalanx_kv_blocks_used{rank="1"}': 3.0}


# ---- over fake ranks


async def asked(server: FrontServer, body: dict[str, Any], patience_s: float = 20.0) -> Answer:
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        return await ask(client, body, patience_s)


def test_streams() -> None:
    with FrontServer(2, tick_s=0.0) as server:
        answer = asyncio.run(asked(server, BODY))
        assert answer.text and (answer.tokens, answer.failure, answer.broken) == (9, "", "")
        assert answer.arrivals == sorted(answer.arrivals) and answer.arrivals
        assert asyncio.run(asked(server, BODY)).verdict(answer) == "ok"
        assert asyncio.run(asked(server, BODY | {"max_tokens": 8})).verdict(answer) == "altered"
        assert asyncio.run(asked(server, BODY | {"n": 0})).failure.startswith("status 400")
        server.router._down = "starting"
        server.call(lambda: server.loop.call_later(0.3, setattr, server.router, "_down", None))
        patient = asyncio.run(asked(server, BODY))
        assert patient.verdict(answer) == "ok" and patient.refusals > 0
        server.router._down = "for ever"
        assert asyncio.run(asked(server, BODY, 0.2)).failure == "refused for 0.2 s"


def test_a_stream_that_fails_and_one_that_breaks_off() -> None:
    with FrontServer(1, tick_s=0.05) as server:
        server.call(lambda: server.loop.call_later(0.5, server.router.fail, "rank 0 died"))
        assert "rank 0 died" in asyncio.run(asked(server, BODY | {"max_tokens": 400})).failure

    def breaks_off(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=b'data: {"choices": [{"text": "a"}]}\n\n')

    async def read() -> Answer:
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(breaks_off)) as client:
            return await ask(client, BODY, 1.0)

    assert asyncio.run(read()).broken == "the stream ended without [DONE]"


def test_streams_go_on_until_it_is_enough() -> None:
    numbers: list[int] = []
    with FrontServer(1, tick_s=0.0) as server:

        async def run(enough: Any) -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
                bodies, note = [BODY] * 5, lambda number, _: numbers.append(number)
                await ask_all(client, bodies, concurrency=3, patience_s=9.0, on_answer=note, enough=enough)

        asyncio.run(run(lambda: True))
        assert sorted(numbers) == [0, 1, 2, 3, 4]
        asyncio.run(run(lambda: len(numbers) > 16))
        assert set(numbers[5:]) == {0, 1, 2, 3, 4} and len(numbers) >= 17


# ---- faults


class Lives:
    """A server whose gang is down for two looks after each fault, and under suspicion for two more."""

    def __init__(self) -> None:
        self.epoch = 1
        self.looks_since = 9
        self.faults: list[tuple[dict[str, Any], int]] = []  # with the looks since the one before

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/debug/chaos":
            self.faults.append((httpx.Response(200, content=request.content).json(), self.looks_since))
            self.looks_since = 0
            return httpx.Response(200, json={})
        self.looks_since += 1
        self.epoch += self.looks_since == 2
        state, suspects = ("starting" if self.looks_since in (1, 2) else "serving"), int(self.looks_since < 5)
        replica = {"replica": 0, "state": state, "epoch": self.epoch, "ranks": 3}
        return httpx.Response(200, json={"replicas": [replica], "suspects": suspects})


def test_faults_come_one_after_the_other_when_nobody_is_under_suspicion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.soak_faults.LOOK_S", 0.0)
    monkeypatch.setattr("bench.soak_faults.CALM_S", (0.0, 0.0))
    blows, lives = list[Blow](), Lives()

    async def run(answer: Any, count: int) -> None:
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(answer)) as client:
            rng = random.Random(3)
            await strike_all(client, ["kill", "stop"], count, rng, limit_s=5.0, on_blow=blows.append)

    asyncio.run(run(lives, 12))
    assert [(b.kind, b.rank, b.after_steps) for b in blows] == [
        (fault["kind"], fault["rank"], fault["after_steps"]) for fault, _ in lives.faults
    ]
    assert {b.kind for b in blows} == {"kill", "stop"} and {b.rank for b in blows} == {0, 1, 2}
    assert all(looks >= 5 for _, looks in lives.faults)
    assert all(b.struck <= b.serving for b in blows)

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(SoakFailed, match="the server has ended: refused"):
        asyncio.run(run(gone, 1))
    with pytest.raises(SoakFailed, match="/status answers 404"):
        asyncio.run(run(lambda request: httpx.Response(404), 1))
