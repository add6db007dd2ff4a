"""POST /debug/chaos and the way of a fault to its rank, over fake ranks."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dp_engine.messages import Fault, Sampling, Wake, Welcome
from launcher.router import GangDown, RankBusy
from tests.fake_gang import StubGang
from tests.front_server import FrontServer, until
from tests.lives import Lives


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with FrontServer(3, chaos=True) as server:
        yield server


@pytest.fixture
def client(server: FrontServer) -> Iterator[httpx.Client]:
    for rank in server.ranks:
        rank.faults.clear()
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"kind": "kill"}, Fault(0, "kill")),
        ({"kind": "raise", "after_steps": 7}, Fault(0, "raise", after_steps=7)),
        ({"kind": "stop", "replica": 0}, Fault(0, "stop")),
        ({"kind": "hang"}, Fault(0, "hang")),
        ({"kind": "slow", "seconds": 1, "steps": 5}, Fault(0, "slow", seconds=1.0, steps=5)),
        ({"kind": "drop", "messages": 2, "direction": "to_rank"}, Fault(0, "drop", messages=2, direction="to_rank")),
        ({"kind": "full"}, Fault(0, "full", steps=100)),
        ({"kind": "poison", "tokens": [5, 6], "how": "kill"}, Fault(0, "poison", tokens=(5, 6), how="kill")),
    ],
)
def test_a_fault_reaches_its_rank_and_wakes_all(
    client: httpx.Client, server: FrontServer, body: dict[str, Any], fault: Fault
) -> None:
    reply = client.post("/debug/chaos", json=body | {"rank": 1})
    assert (reply.status_code, reply.json()) == (200, {"kind": body["kind"], "replica": 0, "ranks": [1]})
    until(lambda: len(server.ranks[1].faults) == 1 and len({max(rank.wakes, default=0) for rank in server.ranks}) == 1)
    [arrived] = server.ranks[1].faults
    assert Fault(0, *[getattr(arrived, name) for name in Fault.__struct_fields__[1:]]) == fault
    assert arrived.wake == server.ranks[0].wakes[-1] == server.ranks[2].wakes[-1]
    assert server.ranks[0].faults == server.ranks[2].faults == []


def test_all_ranks_and_any_rank(client: httpx.Client, server: FrontServer) -> None:
    assert client.post("/debug/chaos", json={"kind": "full", "rank": "all"}).json()["ranks"] == [0, 1, 2]
    until(lambda: all(len(rank.faults) == 1 for rank in server.ranks))
    struck = {client.post("/debug/chaos", json={"kind": "full"}).json()["ranks"][0] for _ in range(60)}
    assert struck == {0, 1, 2}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "kind"),
        ({"kind": "flood"}, "kind"),
        ({"kind": ["kill"]}, "kind"),
        ({"kind": "kill", "rank": 3}, "rank"),
        ({"kind": "kill", "rank": -1}, "rank"),
        ({"kind": "kill", "rank": "some"}, "rank"),
        ({"kind": "kill", "rank": True}, "rank"),
        ({"kind": "kill", "rank": 1.0}, "rank"),
        ({"kind": "kill", "replica": 1}, "replica"),
        ({"kind": "kill", "after_steps": -1}, "after_steps"),
        ({"kind": "kill", "seconds": 1}, "seconds"),
        ({"kind": "slow", "seconds": 0}, "seconds"),
        ({"kind": "slow", "steps": "3"}, "steps"),
        ({"kind": "drop", "direction": "up"}, "direction"),
        ({"kind": "full", "steps": 0}, "steps"),
        ({"kind": "poison"}, "tokens"),
        ({"kind": "poison", "tokens": []}, "tokens"),
        ({"kind": "poison", "tokens": [1], "how": "hang"}, "how"),
        ({"kind": "poison", "tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_wrong_parameters(client: httpx.Client, server: FrontServer, body: dict[str, Any], param: str) -> None:
    reply = client.post("/debug/chaos", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert not any(rank.faults for rank in server.ranks)


def test_kinds_are_listed(client: httpx.Client) -> None:
    told = client.get("/debug/chaos").json()
    assert told["enabled"] is True
    assert {kind: entry["parameters"] for kind, entry in told["kinds"].items()} == {
        **{kind: ["after_steps"] for kind in ("kill", "stop", "raise", "hang")},
        "slow": ["seconds", "steps"],
        "drop": ["messages", "direction"],
        "full": ["steps"],
        "poison": ["tokens", "how"],
    }


def test_faults_are_off_unless_asked_for() -> None:
    with FrontServer(1) as server, httpx.Client(base_url=server.url) as client:
        reply = client.post("/debug/chaos", json={"kind": "kill"})
        assert reply.status_code == 403
        assert "chaos.enabled=true" in reply.json()["error"]["message"]
        assert reply.json()["error"]["code"] == "chaos_disabled"
        assert client.get("/debug/chaos").json()["enabled"] is False
        assert server.ranks[0].faults == []


def test_a_gang_that_is_down_takes_no_faults() -> None:
    with FrontServer(1, chaos=True) as server, httpx.Client(base_url=server.url) as client:
        server.call(server.router.fail, "rank 0 died")
        until(lambda: not server.router.ready)
        reply = client.post("/debug/chaos", json={"kind": "kill"})
        assert reply.status_code == 503 and "rank 0 died" in reply.json()["error"]["message"]


# ---- the router's part


def test_a_full_queue_refuses_a_fault_and_uses_up_no_wake_number() -> None:
    stub = StubGang(2)
    stub.full = {1}
    with pytest.raises(RankBusy, match="queue to rank 1 is full"):
        stub.router.inject(0, 1, Fault(0, "kill"))
    assert (stub.link.roster.wake, stub.take()) == (0, [])
    stub.full = set()
    stub.router.inject(0, 1, Fault(0, "kill"))
    assert stub.take() == [(1, Fault(1, "kill")), (0, Wake(1))]


def test_poison_goes_to_every_life_of_the_gang_and_before_any_request() -> None:
    lives = Lives(2)
    lives.router.inject(0, 1, Fault(0, "poison", tokens=(7,)))
    lives.router.inject(0, 0, Fault(0, "slow", seconds=1.0))
    waiting = lives.router.submit([5], Sampling(max_tokens=3))
    lives.die({0}, innocent=True)
    with pytest.raises(GangDown, match="being started again"):
        lives.router.inject(0, 0, Fault(0, "kill"))
    lives.sent.clear()
    lives.begin()
    sent = [(rank, message) for _, _, rank, message in lives.sent if not isinstance(message, Welcome | Wake)]
    assert sent[0] == (1, Fault(1, "poison", tokens=(7,)))
    assert [message.request_id for _, message in sent[1:]] == [waiting.request_id]
