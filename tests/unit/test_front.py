"""The front on a real socket: errors, clients that leave, gangs that fail."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dp_engine.messages import Add
from launcher.books import Load
from tests.fake_gang import link_of
from tests.fake_rank import count_up
from tests.front_server import MODEL, FrontServer, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
MAX_BODY = 100_000


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with FrontServer(max_body=MAX_BODY) as server:
        yield server


@pytest.fixture
def client(server: FrontServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": MODEL, "prompt": "hi"} | fields


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": MODEL, "messages": [USER]} | fields


def without(request: tuple[str, dict[str, Any]], name: str) -> tuple[str, dict[str, Any]]:
    return request[0], {key: value for key, value in request[1].items() if key != name}


def schema(name: str, content: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": content}}


BAD_REQUESTS = [
    # prompts
    (completion(prompt=""), 400, "prompt"),
    (completion(prompt=[]), 400, "prompt"),
    (completion(prompt=[[]]), 400, "prompt"),
    (completion(prompt=["a", ""]), 400, "prompt"),
    (completion(prompt=None), 400, "prompt"),
    (completion(prompt=7), 400, "prompt"),
    (completion(prompt={"text": "a"}), 400, "prompt"),
    (completion(prompt=[1, "a"]), 400, "prompt"),
    (completion(prompt=[1.5]), 400, "prompt"),
    (completion(prompt=[True]), 400, "prompt"),
    (completion(prompt=[1, -1]), 400, "prompt"),
    (completion(prompt=[320]), 400, "prompt"),
    (completion(prompt=[2**70]), 400, "prompt"),
    (completion(prompt=[5] * 512), 400, "prompt"),
    (completion(prompt="word " * 5000), 400, "prompt"),
    (completion(prompt="x" * 90_000), 400, "prompt"),
    (completion(prompt="\ud800"), 400, "prompt"),
    (completion(prompt=["a", "\udfff"]), 400, "prompt"),
    (without(completion(), "prompt"), 400, "prompt"),
    # numbers
    (completion(max_tokens=0), 400, "max_tokens"),
    (completion(max_tokens=-1), 400, "max_tokens"),
    (completion(max_tokens="5"), 400, "max_tokens"),
    (completion(max_tokens=True), 400, "max_tokens"),
    (completion(max_tokens=1.5), 400, "max_tokens"),
    (completion(temperature=-0.1), 400, "temperature"),
    (completion(temperature=2.1), 400, "temperature"),
    (completion(temperature="hot"), 400, "temperature"),
    (completion(top_p=1.1), 400, "top_p"),
    (completion(top_k=-2), 400, "top_k"),
    (completion(n=0), 400, "n"),
    (completion(n=129), 400, "n"),
    (completion(prompt=["a"] * 100, n=100), 400, "n"),
    (completion(seed=1.5), 400, "seed"),
    (completion(seed=2**64), 400, "seed"),
    (completion(stream="yes"), 400, "stream"),
    (completion(ignore_eos=1), 400, "ignore_eos"),
    (completion(priority="high"), 400, "priority"),
    (completion(priority=1.0), 400, "priority"),
    (completion(priority=True), 400, "priority"),
    (completion(priority=2**31), 400, "priority"),
    (chat(priority=-(2**31) - 1), 400, "priority"),
    # salts
    (completion(cache_salt=5), 400, "cache_salt"),
    (completion(cache_salt=["a"]), 400, "cache_salt"),
    (completion(cache_salt="a" * 513), 400, "cache_salt"),
    (completion(cache_salt="\ud800"), 400, "cache_salt"),
    (chat(cache_salt=""), 400, "cache_salt"),
    # stops
    (completion(stop=""), 400, "stop"),
    (completion(stop=["a", ""]), 400, "stop"),
    (completion(stop=["a"] * 5), 400, "stop"),
    (completion(stop=5), 400, "stop"),
    (completion(stop="\ud800"), 400, "stop"),
    (completion(stop_token_ids=[400]), 400, "stop_token_ids"),
    (completion(stop_token_ids="1"), 400, "stop_token_ids"),
    # log-probabilities
    (completion(logprobs=6), 400, "logprobs"),
    (completion(logprobs=-1), 400, "logprobs"),
    (completion(logprobs=True), 400, "logprobs"),
    (completion(top_logprobs=1), 400, "top_logprobs"),
    (chat(logprobs=3), 400, "logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (chat(top_logprobs=2), 400, "top_logprobs"),
    (chat(logprobs=False, top_logprobs=2), 400, "top_logprobs"),
    # the answer's form
    (chat(response_format="json"), 400, "response_format"),
    (chat(response_format={"type": "xml"}), 400, "response_format.type"),
    (chat(response_format={"type": "json_schema"}), 400, "response_format"),
    (chat(response_format={"type": "text", "json_schema": {"name": "x"}}), 400, "response_format"),
    (chat(response_format=schema("x y", {})), 400, "response_format.json_schema.name"),
    (chat(response_format=schema("x", "{}")), 400, "response_format.json_schema.schema"),
    (chat(response_format=schema("x", {"type": "objekt"})), 400, "response_format"),
    (chat(response_format=schema("x", {"properties": {"\ud800": {}}, "type": "object"})), 400, "response_format"),
    (chat(response_format=schema("x", {}), structured_outputs={"regex": "a"}), 400, "response_format"),
    (chat(response_format=schema("x", {}), ignore_eos=True), 400, "ignore_eos"),
    (completion(response_format=schema("x", {})), 400, "response_format"),
    (completion(structured_outputs={}), 400, "structured_outputs"),
    (completion(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "structured_outputs"),
    (completion(structured_outputs={"regex": "[a"}), 400, "structured_outputs"),
    (completion(structured_outputs={"regex": "\ud800"}), 400, "structured_outputs.regex"),
    (completion(structured_outputs={"regex": "a" * 70_000}), 400, "structured_outputs"),
    (completion(structured_outputs={"choice": []}), 400, "structured_outputs.choice"),
    (completion(structured_outputs={"choice": [1]}), 400, "structured_outputs.choice[0]"),
    (completion(structured_outputs={"json": 5}), 400, "structured_outputs.json"),
    (completion(structured_outputs={"json": "{"}), 400, "structured_outputs"),
    (completion(structured_outputs={"json_object": False}), 400, "structured_outputs.json_object"),
    (completion(structured_outputs={"grammar": "nonsense"}), 400, "structured_outputs"),
    # what is not served
    (completion(echo=True), 400, "echo"),
    (completion(suffix="x"), 400, "suffix"),
    (completion(best_of=2), 400, "best_of"),
    (completion(frequency_penalty=0.5), 400, "frequency_penalty"),
    (completion(logit_bias={"5": 1}), 400, "logit_bias"),
    (completion(nonsense=1), 400, "nonsense"),
    (completion(**{"\ud800": 1}), 400, None),
    (completion(messages=[USER]), 400, "messages"),
    (completion(stream_options={"include_usage": True}), 400, None),
    (completion(stream=True, stream_options={"other": True}), 400, "stream_options.other"),
    (chat(tools=[{"type": "function"}]), 400, "tools"),
    (chat(presence_penalty=-1), 400, "presence_penalty"),
    (chat(modalities=["audio"]), 400, "modalities"),
    (chat(prompt="a"), 400, "prompt"),
    # messages
    (without(chat(), "messages"), 400, "messages"),
    (chat(messages=[]), 400, "messages"),
    (chat(messages="hi"), 400, "messages"),
    (chat(messages=["hi"]), 400, "messages[0]"),
    (chat(messages=[USER, {"role": "user"}]), 400, "messages[1].content"),
    (chat(messages=[{"content": "hi"}]), 400, "messages[0].role"),
    (chat(messages=[{"role": "king", "content": "hi"}]), 400, "messages[0].role"),
    (chat(messages=[USER | {"content": None}]), 400, "messages[0].content"),
    (chat(messages=[USER | {"content": []}]), 400, "messages[0].content"),
    (chat(messages=[USER | {"content": [{"type": "image_url", "image_url": {}}]}]), 400, "messages[0].content"),
    (chat(messages=[USER | {"content": [{"type": "text"}]}]), 400, "messages[0].content"),
    (chat(messages=[USER | {"content": "\ud800"}]), 400, "messages[0].content"),
    (chat(messages=[USER | {"color": "red"}]), 400, "messages[0].color"),
    (chat(messages=[USER | {"tool_calls": [{}]}]), 400, "messages[].tool_calls"),
    (chat(messages=[USER | {"content": "word " * 5000}]), 400, "messages"),
    (chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    # models
    (completion(model="other"), 404, "model"),
    (chat(model="\ud800"), 404, "model"),
    (chat(model=None), 400, "model"),
    (without(chat(), "model"), 400, "model"),
]


@pytest.mark.parametrize(("request_", "status", "param"), BAD_REQUESTS)
def test_bad_request(
    client: httpx.Client, server: FrontServer, request_: tuple[str, dict[str, Any]], status: int, param: str | None
) -> None:
    """A 4xx in OpenAI's shape that names the parameter; no rank hears of it."""
    path, body = request_
    received = sum(len(rank.adds) for rank in server.ranks)
    reply = client.post(path, content=json.dumps(body))
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert len(reply.content) < 2000
    assert sum(len(rank.adds) for rank in server.ranks) == received
    assert server.router.inflight == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b"\xff\xfe\xfd", 400),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400),
        (b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 6000 + b"}", 400),
        (b"[" * 50_000, 400),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', 400),
        (b'{"x": "' + b"a" * MAX_BODY + b'"}', 413),
        (b"a" * 10_000_000, 413),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_bad_body(client: httpx.Client, body: bytes, status: int, chunked: bool) -> None:
    pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
    reply = client.post(CHAT if status == 413 else COMPLETIONS, content=pieces if chunked else body)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/metrics", 405),
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", CHAT + "/", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/a/b", 404),
    ],
)
def test_wrong_path_or_method(client: httpx.Client, method: str, path: str, status: int) -> None:
    reply = client.request(method, path)
    assert reply.status_code == status
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}


def test_prompts_are_not_echoed_in_errors(client: httpx.Client) -> None:
    reply = client.post(COMPLETIONS, json={"model": MODEL, "prompt": ["my secret", 5], "stop": 5})
    assert reply.status_code == 400
    assert "secret" not in reply.text


def test_long_max_tokens_are_cut_to_the_model_length(client: httpx.Client, server: FrontServer) -> None:
    reply = post(client, completion(prompt=[5] * 500, max_tokens=10**6))
    assert reply.json()["usage"]["completion_tokens"] == 12
    assert reply.json()["choices"][0]["finish_reason"] == "length"


def post(client: httpx.Client, request: tuple[str, dict[str, Any]]) -> httpx.Response:
    return client.post(request[0], json=request[1])


def test_small_pool_limits_the_length() -> None:
    """What the KV pool of a rank can never hold is refused at the door, and answers without a limit are cut to fit."""
    with FrontServer(1, num_blocks=4) as server, httpx.Client(base_url=server.url) as client:
        assert post(client, completion(prompt=[5] * 64)).json()["error"]["code"] == "context_length_exceeded"
        assert post(client, chat(messages=[USER])).json()["usage"]["total_tokens"] == 64


# ---- clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [completion, chat])
def test_client_that_leaves_is_aborted(stream: bool, make: Any) -> None:
    with FrontServer(tick_s=0.02) as server:
        path, body = make(stream=stream, max_tokens=480, n=2)
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
            connection.sendall(head + payload)
            until(lambda: sum(len(rank.running) for rank in server.ranks) == 2)
            if stream:
                assert connection.recv(1000)
        left = time.monotonic()
        until(lambda: sum(len(rank.aborted) for rank in server.ranks) == 2)
        assert time.monotonic() - left < 1
        assert server.router.inflight == 0
        assert link_of(server.router).books.loads == [Load(0, 0)] * 2
        assert sum(counter["abort"] for counter in server.router.replicas[0].finished) == 2


def test_client_that_leaves_while_sending_costs_nothing(server: FrontServer, client: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode())
        time.sleep(0.05)
    assert post(client, completion()).status_code == 200


# ---- gangs that fail


@pytest.mark.parametrize("make", [completion, chat])
def test_stream_that_fails_midway_ends_with_an_error_event(make: Any) -> None:
    with FrontServer(tick_s=0.01) as server, httpx.Client(base_url=server.url) as client:
        path, body = make(stream=True, max_tokens=480)
        events = []
        with client.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                if len(events) == 3:
                    server.call(server.router.give_up, 0, "rank 1 failed: out of memory")
        assert "rank 1 failed: out of memory" in json.loads(events[-1])["error"]["message"]
        assert "[DONE]" not in events
        assert all("error" not in json.loads(event) for event in events[:-1])


def test_gang_failure_answers_503_everywhere() -> None:
    with FrontServer(tick_s=0.01) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        server.loop.call_soon_threadsafe(lambda: server.loop.call_later(0.2, server.router.fail, "rank 0 died"))
        reply = post(client, completion(max_tokens=480))
        assert reply.status_code == 503
        assert reply.json()["error"]["type"] == "server_error"
        assert "rank 0 died" in reply.json()["error"]["message"]
        assert post(client, chat(stream=True)).status_code == 503
        ready = client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "rank 0 died")
        assert client.get("/health").status_code == 200
        assert "phalanx_ready 0.0" in client.get("/metrics").text


def test_rejected_request_is_a_400_even_when_streaming() -> None:
    with FrontServer(1, reply=lambda add: "it can never fit") as server, httpx.Client(base_url=server.url) as client:
        for stream in (False, True):
            reply = post(client, completion(stream=stream))
            assert reply.status_code == 400
            assert "it can never fit" in reply.json()["error"]["message"]


def test_full_router_answers_429_and_recovers() -> None:
    with FrontServer(1, max_inflight=2, tick_s=0.02) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", COMPLETIONS, json=completion(stream=True, n=2, max_tokens=480)[1]) as reply:
            assert reply.status_code == 200
            refused = post(client, completion())
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
        until(lambda: server.router.inflight == 0)
        assert post(client, completion(max_tokens=2)).status_code == 200


def test_part_of_a_request_that_finds_no_room_leaves_nothing_behind() -> None:
    with FrontServer(1, max_inflight=3, tick_s=0.02) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", COMPLETIONS, json=completion(stream=True, n=2, max_tokens=480)[1]):
            assert post(client, completion(n=2)).status_code == 429
            assert server.router.inflight == 2
        until(lambda: server.router.inflight == 0)


def test_reason_of_the_rank_is_passed_through() -> None:
    def preempted(add: Add) -> Iterator[int]:
        yield from (token for token, _ in zip(count_up(add), range(3), strict=False))

    with FrontServer(1, reply=preempted) as server, httpx.Client(base_url=server.url) as client:
        server.ranks[0].end_reason = "insufficient_system_resource"
        choice = post(client, completion()).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ('!"#', "insufficient_system_resource")


def test_open_streams_end_when_the_server_stops() -> None:
    with FrontServer(1, tick_s=0.02) as server, httpx.Client(base_url=server.url) as client:
        begin = time.monotonic()
        with client.stream("POST", COMPLETIONS, json=completion(stream=True, max_tokens=480)[1]) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.call(lambda: server.loop.create_task(server.router.shutdown(1)))
            events = [line for line in lines if line]
        assert "shutting down" in events[-1]
        assert time.monotonic() - begin < 3
