"""What is told of loading: by a rank, to those who wait for it, and on the terminal."""

import asyncio
import io
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from dp_engine import loading
from dp_engine.loading import LoadingReports, num_reports
from dp_engine.messages import Loading, decode_to_router, encode
from launcher.loading import LoadingBar
from launcher.terminal import Terminal
from tests.fake_gang import StubGang
from vote.errors import RanksMissing
from vote.settings import wait_for_keys


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_a_rank_reports_a_few_times_a_second_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(loading, "time", clock)
    sent: list[Any] = []
    store = dist.HashStore()
    reports = LoadingReports(SimpleNamespace(rank=3, send=sent.append), store)  # type: ignore[arg-type]
    for done in range(101):
        reports.on_bytes(done, 110)
        clock.now += 1 / 100
    assert sent[0] == Loading(3, 0, 110)
    assert [report.done_bytes for report in sent] == [0, 25, 50, 75, 100]
    reports.close()
    assert sent[-1] == Loading(3, 110, 110)
    reports.close()
    assert len(sent) == num_reports(store) == 6
    assert decode_to_router(encode(sent[0])) == sent[0]


def test_those_who_wait_count_silence_and_not_work() -> None:
    store, signs, started = dist.HashStore(), iter(range(20)), time.monotonic()
    with pytest.raises(RanksMissing, match="the end of loading"):
        wait_for_keys(store, {1: "loaded/1"}, 0.1, "the end of loading", lambda: next(signs, None))
    assert time.monotonic() - started > 0.4
    with pytest.raises(RanksMissing):
        wait_for_keys(store, {1: "loaded/1"}, 0.05, "the end of loading", lambda: 7)


def test_the_launcher_waits_as_long_as_a_rank_loads() -> None:
    async def test() -> None:
        stub = StubGang(2, present=0)
        link = stub.router.replicas[0].link
        assert link is not None
        started = time.monotonic()
        waiting = asyncio.create_task(link.wait_ready(0.2))
        for done in range(5):
            await asyncio.sleep(0.1)
            stub.say(1, Loading(1, done, 10))
        with pytest.raises(TimeoutError, match="no word from ranks 0, 1 within"):
            await waiting
        assert time.monotonic() - started > 0.65

    asyncio.run(test())


def test_nobody_says_how_far_another_rank_is() -> None:
    told: list[tuple[int, int, Loading]] = []
    stub = StubGang(2, present=1, on_loading=lambda *words: told.append(words))
    link = stub.router.replicas[0].link
    assert link is not None
    stub.say(1, Loading(1, 5, 10))
    stub.say(0, Loading(1, 6, 10))
    stub.say(1, Loading(2, 6, 10))
    assert told == [(0, 1, Loading(1, 5, 10))]
    assert link.bad_messages == 2


def bar(ranks: int, terminal: bool = False) -> tuple[LoadingBar, io.StringIO]:
    voice, text = Terminal(False), io.StringIO()
    voice.console = Console(file=text, force_terminal=terminal, width=100, soft_wrap=True)
    return LoadingBar(voice, ranks), text


def test_lines_at_every_quarter_where_there_is_no_terminal() -> None:
    loading_bar, text = bar(2)
    loading_bar.on_loading(0, 1, Loading(0, 0, 1_000_000_000))
    loading_bar.on_loading(0, 1, Loading(0, 500_000_000, 1_000_000_000))
    assert text.getvalue() == ""
    for done in range(0, 1_000_000_001, 10_000_000):
        loading_bar.on_loading(0, 1, Loading(1, done, 1_000_000_000))
    loading_bar.on_loading(0, 1, Loading(0, 1_000_000_000, 1_000_000_000))
    lines = text.getvalue().splitlines()
    assert [line.split("s  ")[1] for line in lines] == [
        f"loading the model: {percent} % of 2.0 GB" for percent in (0, 25, 50, 75, 100)
    ]
    for rank in (0, 1):
        loading_bar.on_loading(0, 2, Loading(rank, 0, 1_000_000_000))
    assert len(text.getvalue().splitlines()) == 6  # the next life begins anew


def test_one_bar_on_a_terminal() -> None:
    loading_bar, text = bar(2, terminal=True)
    for done in (0, 30, 100):
        for rank in (0, 1):
            loading_bar.on_loading(0, 1, Loading(rank, 10 * done, 1000))
    assert "2.0/2.0 kB" in text.getvalue()
    assert text.getvalue().endswith("\x1b[?25h")  # the cursor is back
    shown = len(text.getvalue())
    loading_bar.close()
    assert len(text.getvalue()) == shown


def test_a_bar_that_ends_early_gives_the_terminal_back() -> None:
    loading_bar, text = bar(1, terminal=True)
    loading_bar.on_loading(0, 1, Loading(0, 10, 1000))
    loading_bar.close()
    assert text.getvalue().endswith("\x1b[?25h")
