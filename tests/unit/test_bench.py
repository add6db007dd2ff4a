"""The benchmark's own arithmetic and its client: a wrong answer must never become a figure."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench import dispatch
from bench.client import Exchange, burst
from bench.serve import parse_arguments, ratios, request_bodies
from bench.stats import BadAnswer, Summary, Timeline, median_of, percentile, summarise, timeline
from bench.vote import ballot_row, failures, share_row
from bench.vote import table as vote_table
from bench.vote_curves import Run as CurveRun
from bench.vote_curves import draw, verdicts, write_csv
from bench.vote_gang import BallotCost
from bench.vote_share import Share, vote_share
from bench.vote_simulation import (
    DECISIONS,
    WARM_UP_S,
    Costs,
    Figures,
    Load,
    Outcome,
    simulate,
    weighted_percentile,
)

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


# ---- the vote


def ballot(rank: int, ordinal: int, step: int, ts: float, dur: float, name: str = "first ballot") -> dict[str, Any]:
    args = {"step": step, "size": 0, "ordinal": ordinal}
    return {"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": ts, "dur": dur, "args": args}


def computed(rank: int, step: int, ts: float, dur: float, name: str = "DECODE") -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": rank, "tid": 1, "ts": ts, "dur": dur, "args": {"step": step, "size": 1}}


def gang_trace() -> list[dict[str, Any]]:
    """A prefill step and four decode steps of two ranks, of which rank 1 waits for rank 0 by turns."""
    names = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}}
    events = [names, ballot(0, 1, 0, 0, 10), ballot(1, 1, 0, 0, 10)]
    events += [ballot(rank, 2, 0, 20, 10, "second ballot") for rank in (0, 1)]
    events += [computed(rank, 0, 40, 400, "PREFILL") for rank in (0, 1)]
    for step in range(1, 5):
        begin = 500.0 + 1000 * (step - 1)
        events += [ballot(0, 2 + step, step, begin, 10), ballot(1, 2 + step, step, begin - 100, 110)]
        events += [computed(rank, step, begin + 50, 900) for rank in (0, 1)]
    return events


def test_a_vote_costs_what_its_last_rank_spends_in_it() -> None:
    assert vote_share(gang_trace()) == Share(steps=3, votes_us=10, step_us=1000, share=0.01)


def test_a_ballot_that_not_all_ranks_show_is_left_out() -> None:
    events = [event for event in gang_trace() if not (event["pid"] == 0 and event["args"].get("ordinal") == 3)]
    assert vote_share(events).steps == 2
    unfinished = ballot(0, 7, 5, 4500, 10) | {"args": {"step": 5, "size": 0, "ordinal": 7, "unfinished": True}}
    assert vote_share([*gang_trace(), unfinished]).steps == 3


def test_a_trace_without_decode_steps_has_no_share() -> None:
    with pytest.raises(ValueError, match="no two decode steps"):
        vote_share([event for event in gang_trace() if event["name"] != "DECODE"])


@pytest.mark.parametrize(
    ("ratios", "recorder", "share", "wanted"),
    [
        ([1.1, 1.3, 1.2], 999, 0.02, []),
        ([1.1, 1.31, 1.4], 999, 0.02, ["a ballot of 2 ranks"]),
        ([1.0], 1001, 0.021, ["recorder entry", "decode step"]),
        ([1.0], 500, None, []),
    ],
)
def test_what_a_vote_may_cost(ratios: list[float], recorder: float, share: float | None, wanted: list[str]) -> None:
    row = ballot_row(BallotCost(2, "star", [100 * ratio for ratio in ratios], [100.0] * len(ratios)))
    report = {
        "ballots": [row],
        "recorder_ns": {"median": recorder, "rounds": [recorder]},
        "share": share if share is None else share_row([Share(9, 100.0, 5000.0, share)]),
    }
    found = failures(report)
    assert len(found) == len(wanted) and all(words in line for words, line in zip(wanted, found, strict=True))
    assert len(vote_table(report).rows) == 2 + (share is not None)


# ---- simulated load


@pytest.mark.parametrize("values", [[3.0], [1.0, 1.0, 2.0], list(map(float, range(1, 101))), [5.0] * 99 + [7.0]])
def test_percentile_of_counted_values_is_that_of_the_values(values: list[float]) -> None:
    counts = {value: values.count(value) for value in values}
    for share in (0.5, 0.9, 0.99, 1.0):
        assert weighted_percentile(counts, share) == percentile(values, share)


def test_every_decision_meets_the_same_arrivals() -> None:
    load = Load(3, "lonely", 2.0, 60.0)
    first, again = load.arrivals(), load.arrivals()
    assert first == again != Load(3, "lonely", 2.0, 60.0, seed=1).arrivals()
    assert [len(arrivals) > 40 for arrivals in first] == [True, True, False]
    assert all(a.at_ms < b.at_ms for row in first for a, b in pairwise(row))
    assert Load(3, "hot", 2.0, 60.0).rates() == [2.0, 0.25, 0.25]


def test_a_simulated_gang_serves_what_arrives_and_counts_it() -> None:
    load, costs = Load(2, "equal", 1.0, WARM_UP_S + 20), Costs()
    arrived = [arrival for row in load.arrivals() for arrival in row if arrival.at_ms >= 1e3 * WARM_UP_S]
    outcome = simulate(load, DECISIONS["ANY every step"], costs)
    assert outcome.all.requests == len(arrived) and outcome.all.unserved <= 1
    assert costs.step < outcome.all.interval_mean < 1.2 * costs.step
    assert outcome.all.ttft_p50 < 2 * (costs.step + costs.prompt_token * 512)
    assert 0 < outcome.prefill_steps < outcome.prefill_time < 0.2
    assert outcome == simulate(load, DECISIONS["ANY every step"], costs)


def test_the_lonely_rank_waits_for_cadence_and_not_for_adaptive() -> None:
    load = Load(2, "lonely", 4.0, WARM_UP_S + 160)
    theirs, ours = (simulate(load, DECISIONS[name]) for name in ("cadence", "adaptive"))
    assert theirs.lonely.requests == ours.lonely.requests > 8
    assert ours.lonely.ttft_mean <= 0.2 * theirs.lonely.ttft_mean
    assert ours.all.interval_p99 <= 1.1 * theirs.all.interval_p99


def outcome(ttft: float, interval: float) -> Outcome:
    one = Figures(9, ttft, ttft, ttft, interval, interval, 100.0, 0)
    return Outcome([one, one], one, one, 0.01, 0.05)


def test_curves_say_what_holds_and_how_they_were_made(tmp_path: Path) -> None:
    figures = {"cadence": (1000, 20), "cadence + fast path": (400, 20), "adaptive": (200, 22)}
    figures |= {"ANY every step": (40, 60), "ALL only": (9000, 20)}
    runs = [
        CurveRun(name, Load(2, skew, rate, 60.0), outcome(*pair))
        for skew in ("equal", "lonely")
        for rate in (1.0, 4.0)
        for name, pair in figures.items()
    ]
    stated = [one for one in runs if one.load.skew == "lonely" and one.load.rate == 4.0]
    published, fast = verdicts(stated)
    assert (published["ttft"], published["interval"], published["holds"]) == pytest.approx((0.2, 1.1, True))
    assert (fast["ttft"], fast["holds"]) == (0.5, False)
    write_csv(tmp_path / "curves.csv", runs, "python -m bench.vote_curves here")
    first, names, *rows = (tmp_path / "curves.csv").read_text().splitlines()
    assert first == "# python -m bench.vote_curves here" and len(rows) == len(runs)
    assert names.startswith("ranks,skew,rate,seconds,decision,ttft_of")
    assert rows[0].startswith("2,equal,1.0,60,cadence,all")
    draw(tmp_path / "curves.png", runs, "python -m bench.vote_curves here")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def dispatch_report(shm_us: float) -> dict[str, Any]:
    costs = {"alltoall": 400.0, "allgather": 500.0, "shm": shm_us}
    rows = [
        {"ranks": 2, "hidden": 576, "tokens": 8, "backend": backend, "us": us, "ratio": us / 400}
        for backend, us in costs.items()
    ]
    return {"auto": "shm", "costs": rows}


def test_dispatch_says_where_auto_takes_another_backend_than_the_fastest() -> None:
    assert not dispatch.failures(dispatch_report(40.0)) and not dispatch.failures(dispatch_report(430.0))
    (words,) = dispatch.failures(dispatch_report(450.0))
    assert words == "auto takes shm, which needs 450 µs for 8 tokens of 576 on 2 ranks; another backend 400 µs"
    assert [cell for column in dispatch.table(dispatch_report(40.0)).columns for cell in column.cells] == [
        "2", "576", "8", "400 (1.00)", "500 (1.25)", "40 (0.10)",
    ]  # fmt: skip
