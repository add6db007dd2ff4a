"""The benchmark's own arithmetic and its client: a wrong answer must never become a figure."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bench.client import Exchange, burst
from bench.serve import parse_arguments, ratios, request_bodies
from bench.stats import BadAnswer, Summary, Timeline, median_of, percentile, summarise, timeline

TOKEN = {"choices": [{"text": "a", "finish_reason": None}]}
HELD_BACK = {"choices": [{"text": "", "finish_reason": None}]}
LAST = {"choices": [{"text": "", "finish_reason": "length"}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


def sse(*events: Any, done: bool = True) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n" * done


def test_arrivals_are_when_events_were_complete() -> None:
    first, second = sse(TOKEN, done=False), sse(TOKEN, LAST, usage(2))
    pieces = [(1.0, first[:5]), (2.0, first[5:]), (3.0, second)]
    assert timeline(Exchange(0.5, 200, pieces), 2) == Timeline(0.5, [2.0, 3.0], 2)


def test_a_token_without_text_counts_as_an_arrival() -> None:
    assert timeline(Exchange(0.0, 200, [(1.0, sse(HELD_BACK, TOKEN, LAST, usage(2)))]), 2).arrivals == [1.0, 1.0]


@pytest.mark.parametrize(
    ("exchange", "wanted"),
    [
        (Exchange(error="cannot connect"), "cannot connect"),
        (Exchange(status=429, pieces=[(1.0, b"queue full")]), "status 429: queue full"),
        (Exchange(status=200, pieces=[(1.0, sse(TOKEN, usage(1), done=False))]), "without"),
        (Exchange(status=200), "without"),
        (Exchange(status=200, pieces=[(1.0, sse(TOKEN, {"error": {"message": "gang died"}}))]), "gang died"),
        (Exchange(status=200, pieces=[(1.0, sse(TOKEN, LAST, usage(3)))]), "wanted 2 tokens, usage says 3"),
        (Exchange(status=200, pieces=[(1.0, sse(TOKEN, TOKEN, LAST))]), "usage says None"),
    ],
)
def test_bad_answers_are_refused(exchange: Exchange, wanted: str) -> None:
    with pytest.raises(BadAnswer, match=wanted):
        timeline(exchange, 2)


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [([], 0.5, 0.0), ([3], 0.99, 3), ([4, 1, 3, 2], 0.5, 2), (range(1, 101), 0.99, 99), (range(1, 33), 0.99, 32)],
)
def test_percentile_is_nearest_rank(values: Any, share: float, wanted: float) -> None:
    assert percentile(values, share) == wanted


def test_a_burst_is_summed_from_first_request_to_last_token() -> None:
    lines = [Timeline(10.0, [10.5, 10.6, 10.8], 3), Timeline(10.1, [10.3, 11.3, 12.0], 3)]
    summary = summarise(lines)
    assert summary.tok_s == pytest.approx(6 / 2.0)
    assert (summary.ttft_p50, summary.ttft_p99) == pytest.approx((200, 500))
    assert (summary.itl_p50, summary.itl_p99) == pytest.approx((200, 1000))


def test_medians_are_taken_figure_by_figure() -> None:
    bursts = [Summary(1, 30, 3, 3, 3), Summary(3, 10, 3, 3, 3), Summary(2, 20, 3, 3, 9)]
    assert median_of(bursts) == Summary(2, 20, 3, 3, 3)


def test_every_server_gets_the_same_prompts_and_every_burst_new_ones() -> None:
    arguments = parse_arguments(["--prompt-tokens", "7", "--token-ids", "5,9"])
    prompts = [[json.loads(body)["prompt"] for body in request_bodies(arguments, "m", 3, burst)] for burst in (0, 0, 1)]
    assert prompts[0] == prompts[1] != prompts[2]
    assert all(len(prompt) == 7 and set(prompt) <= {5, 6, 7, 8} for prompt in prompts[0])


def test_ratio_needs_both_engines() -> None:
    ours, theirs = {"bursts": {8: Summary(30, 0, 0, 0, 0)}}, {"bursts": {8: Summary(20, 0, 0, 0, 0)}}
    assert ratios({"phalanx": ours, "vllm": theirs}) == {"8": 1.5}
    assert ratios({"phalanx": ours}) == {}


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def against(handler: Handler, requests: int, timeout_s: float = 5.0) -> list[Exchange]:
    """A burst against a small server."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await burst(f"http://127.0.0.1:{port}/v1/completions", [b'{"n": 1}'] * requests, timeout_s)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n") and b"Content-Length: 8\r\n" in head
    return await reader.readexactly(8)


def test_a_burst_is_in_flight_all_at_once_and_reads_chunked_streams() -> None:
    arrived = 0
    everybody = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        assert await read_request(reader) == b'{"n": 1}'
        arrived += 1
        if arrived == 8:
            everybody.set()
        await everybody.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in (sse(TOKEN, done=False), sse(LAST, usage(1))):
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    exchanges = asyncio.run(against(handler, 8))
    lines = [timeline(exchange, 1) for exchange in exchanges]
    assert len(lines) == 8 and all(line.arrivals[0] > line.sent for line in lines)


def test_a_connection_that_breaks_is_a_failure() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n")
        await writer.drain()
        writer.close()

    assert "connection was lost" in (asyncio.run(against(handler, 1))[0].error or "")


def test_a_server_that_hangs_is_a_failure() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    assert "no complete answer" in (asyncio.run(against(handler, 2, timeout_s=0.2))[1].error or "")


def test_nobody_listening_is_a_failure() -> None:
    exchange = asyncio.run(burst("http://127.0.0.1:9/v1/completions", [b"{}"], 1.0))[0]
    assert "cannot connect" in (exchange.error or "")
