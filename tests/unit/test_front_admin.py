"""The operator's endpoints, over fake ranks."""

import time
from collections.abc import Iterator

import httpx
import pytest

from launcher.link import Congested
from tests.fake_gang import link_of
from tests.front_server import MODEL, FrontServer, until


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with FrontServer() as server:
        yield server


@pytest.fixture
def client(server: FrontServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client
        client.post("/resume")


def test_pause_and_resume(client: httpx.Client, server: FrontServer) -> None:
    for rank in server.ranks:
        rank.pauses.clear()
    assert client.get("/pause").json() == {"mode": "none"}
    assert client.get("/ready").json() == {"status": "ready", "ranks": 2}
    for body, mode in ((None, "all"), ({"mode": "new"}, "new"), ({}, "all")):
        reply = client.post("/pause", json=body) if body is not None else client.post("/pause")
        assert (reply.status_code, reply.json()) == (200, {"mode": mode})
        assert client.get("/pause").json() == {"mode": mode}
        ready = client.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready", "ranks": 2, "paused": mode})
        assert f'phalanx_paused{{mode="{mode}"}} 1.0' in client.get("/metrics").text
    assert client.post("/resume").json() == {"mode": "none"}
    assert "paused" not in client.get("/ready").json()
    for rank in server.ranks:
        until(lambda rank=rank: [pause.mode for pause in rank.pauses] == ["all", "new", "all", "none"])  # type: ignore[misc]
    assert len({tuple(pause.wake for pause in rank.pauses) for rank in server.ranks}) == 1


def test_requests_are_taken_while_paused_and_answered_after(client: httpx.Client, server: FrontServer) -> None:
    client.post("/pause")
    begin = time.monotonic()
    server.call(server.loop.call_later, 0.1, server.router.pause, "none")
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 3}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
    assert time.monotonic() - begin > 0.09


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"mode": "none"}', "mode"),
        (b'{"mode": "some"}', "mode"),
        (b'{"mode": null}', "mode"),
        (b'{"mode": 1}', "mode"),
        (b'{"mood": "all"}', "mood"),
        (b'"all"', None),
        (b"{", None),
    ],
)
def test_wrong_mode(client: httpx.Client, body: bytes, param: str | None) -> None:
    reply = client.post("/pause", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert client.get("/pause").json() == {"mode": "none"}


def test_reset_prefix_cache(client: httpx.Client, server: FrontServer) -> None:
    assert client.post("/reset_prefix_cache").status_code == 200
    until(lambda: all(len(rank.resets) == 1 for rank in server.ranks))
    assert len({rank.resets[0].wake for rank in server.ranks}) == 1


@pytest.mark.parametrize("path", ["/pause", "/resume", "/reset_prefix_cache"])
def test_only_a_post_changes_anything(client: httpx.Client, path: str) -> None:
    assert client.request("DELETE", path).status_code == 405
    if path != "/pause":
        assert client.get(path).status_code == 405


@pytest.mark.parametrize("path", ["/pause", "/reset_prefix_cache"])
def test_a_full_queue_is_a_503(path: str) -> None:
    with FrontServer(1) as server, httpx.Client(base_url=server.url) as client:
        send = link_of(server.router)._link.send

        def full(identity: bytes, payload: bytes) -> None:
            raise Congested

        link_of(server.router)._link.send = full  # type: ignore[method-assign]
        reply = client.post(path)
        link_of(server.router)._link.send = send  # type: ignore[method-assign]
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert (reply.json()["error"]["code"], reply.json()["error"]["type"]) == ("rank_busy", "server_error")
        assert "rank 0" in reply.json()["error"]["message"]
        assert client.get("/pause").json() == {"mode": "none"}
        assert client.post(path).status_code == 200


def test_a_gang_that_is_down_is_a_503() -> None:
    with FrontServer(1) as server, httpx.Client(base_url=server.url) as client:
        server.call(server.router.fail, "rank 0 died")
        until(lambda: not server.router.ready)
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            reply = client.post(path)
            assert reply.status_code == 503
            assert "rank 0 died" in reply.json()["error"]["message"]
