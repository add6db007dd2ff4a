"""A replica's lives: a real router and fake ranks, and gangs that the test ends."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dp_engine.messages import Diagnosis, Sampling, encode
from launcher.config import ConfigError, DeploymentConfig, SupervisionConfig
from launcher.death import Death
from launcher.ends import GangEnd, RankEnd
from launcher.errors import DeploymentFailed
from launcher.gang_link import GangLink
from launcher.keys import LaunchKeys
from launcher.router import GangDown, Router
from launcher.supervisor import Home, Supervisor, backoff, judge
from launcher.ticket import RequestPoisoned
from tests.fake_gang import collect, run, until
from tests.fake_rank import FakeRank


class FakePlacement:
    def __init__(self, config: Any, replica: int) -> None:
        self.held = False

    async def reserve(self) -> None:
        self.held = True

    async def release(self) -> None:
        self.held = False


class FakeGang:
    """Ranks are threads that speak the wire protocol. `troubles`: what the next lives do instead of coming up."""

    lives: ClassVar[list["FakeGang"]] = []
    troubles: ClassVar[list[Exception | str]] = []

    def __init__(
        self, config: DeploymentConfig, model_dir: Path, epoch: int, placement: FakePlacement, on_log: Any
    ) -> None:
        assert placement.held
        self.size, self.epoch, self.ranks = config.dp, epoch, list[FakeRank]()
        self.ended: asyncio.Future[GangEnd] = asyncio.get_running_loop().create_future()
        self.killed = self.placed = False
        self.answers = True
        FakeGang.lives.append(self)

    async def place(self) -> None:
        self.trouble = FakeGang.troubles.pop(0) if FakeGang.troubles else None
        if isinstance(self.trouble, Exception):
            raise self.trouble
        self.placed = True

    async def waits(self) -> bool:
        return self.answers

    def on_node(self, node_id: str) -> bool:
        return True

    async def launch(self, endpoint: str, keys: Any) -> None:
        assert self.placed and not self.ranks
        if isinstance(self.trouble, str):
            self.end(self.trouble, 0)
            return
        for rank in range(self.size):
            self.ranks.append(FakeRank(endpoint, keys, rank, self.size, epoch=self.epoch, tick_s=0.002))
            self.ranks[-1].__enter__()

    async def wait_end(self) -> GangEnd:
        return await asyncio.shield(self.ended)

    def end(self, reason: str, rank: int, kind: str = "raised") -> None:
        self.ended.set_result(GangEnd(f"rank {rank} {reason}", (RankEnd(rank, reason, False, kind),)))

    async def kill(self) -> None:
        self.killed = True
        for rank in self.ranks:
            await asyncio.to_thread(rank.__exit__)
        self.ranks = []


class Ear:
    """A terminal that keeps what it hears."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.errors: list[str] = []
        self.reports: list[str] = []
        self.stage, self.error, self.report = self.stages.append, self.errors.append, self.reports.append


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.supervisor.Gang", FakeGang)
    monkeypatch.setattr("launcher.supervisor.Placement", FakePlacement)
    monkeypatch.setattr("launcher.supervisor.Watch.wait", lambda self: asyncio.sleep(3600))
    monkeypatch.setattr("launcher.supervisor.last_sight", lambda link: {})
    FakeGang.lives, FakeGang.troubles = [], []


@asynccontextmanager
async def supervised(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Router, Ear, "asyncio.Task[str]"]]:
    """A replica of two ranks that serves."""
    options = {"backoff_s": 0.01, "crash_dir": str(tmp_path), **settings}
    config = DeploymentConfig(dp=2, supervision=SupervisionConfig(**options))
    router, ear = Router(2), Ear()
    supervisor = Supervisor(0, config, tmp_path, router, Home("n", "127.0.0.1"), ear)  # type: ignore[arg-type]
    await supervisor.start()
    await supervisor.ready()
    lives = asyncio.create_task(supervisor.run())
    try:
        yield router, ear, lives
    finally:
        lives.cancel()
        with suppress(asyncio.CancelledError):
            await lives
        await supervisor.kill()
        await router.close()


def reports(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("gang-*/report.json"))]


@pytest.mark.parametrize(("failures", "seconds"), [(0, 0), (1, 1), (2, 2), (3, 4), (5, 16), (6, 30), (999, 30)])
def test_backoff(failures: int, seconds: float) -> None:
    assert backoff(failures, 1.0, 30.0) == seconds


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_no_link_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Also when the supervisor leaves while a life is being buried."""
    monkeypatch.setattr("launcher.crashes.CrashReports.write", lambda *_: time.sleep(0.5))
    links: list[GangLink] = []

    async def test() -> None:
        async with supervised(tmp_path) as (router, _, _):
            link = router.replicas[0].link
            assert link is not None
            links.append(link)
            FakeGang.lives[0].end("died: killed", 1, "killed")
            await until(lambda: router.replicas[0].link is not link)
            await asyncio.sleep(seconds / 2)
            if (second := router.replicas[0].link) is not None:
                links.append(second)

    run(test)
    assert all(link._link._context.closed for link in links)


def test_a_gang_that_ends_is_started_again_and_its_requests_go_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as (router, ear, _):
            tickets = [router.submit([5], Sampling(max_tokens=60)) for _ in range(6)]
            await until(lambda: all(ticket.emitted for ticket in tickets))
            FakeGang.lives[0].end("died: killed", 1, "killed")
            for ticket in tickets:
                assert (await collect(ticket))[1] == "length"
                assert len(ticket.emitted) == 60
            await until(lambda: router.ready and bool(reports(tmp_path)))
            assert [life.epoch for life in FakeGang.lives] == [1, 2]
            assert FakeGang.lives[0].killed
            assert router.replicas[0].restarts == 1
            assert ear.errors == ["the gang (epoch 1) has ended: rank 1 died: killed; 6 requests will go on"]
            [report] = reports(tmp_path)
            assert (report["culprits"], report["requests_carried_over"], report["epoch"]) == ([1], 6, 1)

    run(test)


def test_the_ranks_own_diagnosis_is_told_and_kept(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as (router, ear, _):
            life = FakeGang.lives[0]
            life.ranks[0].send_raw(encode(Diagnosis(0, "lockstep broken: rank 1 hangs\nits table", [1], True)))
            await until(lambda: router.replicas[0].restarts == 1)
            await until(lambda: bool(reports(tmp_path)))
            assert ear.reports == ["lockstep broken: rank 1 hangs\nits table"]
            assert ear.errors == ["the gang (epoch 1) has ended: lockstep broken: rank 1 hangs"]
            [report] = reports(tmp_path)
            assert (report["culprits"], report["requests_suspected"]) == ([1], False)
            assert next(tmp_path.glob("*/diagnosis.txt")).read_text().startswith("lockstep broken")

    run(test)


def test_a_gang_that_does_not_come_up_is_tried_again_and_then_given_up(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path, max_failures=4) as (router, ear, lives):
            ticket = router.submit([5], Sampling(max_tokens=100_000))
            FakeGang.troubles = [ConfigError("they do not fit"), "failed: OSError: disk", DeploymentFailed("no word")]
            FakeGang.lives[0].end("died", 0)
            reason = await lives
            assert reason == "the gang was given up after 4 bad lives in a row: no word"
            with pytest.raises(GangDown, match="given up after 4"):
                await collect(ticket)
            assert not router.ready
            assert ear.errors[1:] == [
                f"the gang did not come up again: {words}"
                for words in ("they do not fit", "rank 0 failed: OSError: disk", "no word")
            ]
            assert all(life.killed for life in FakeGang.lives)

    run(test)


def test_it_comes_up_after_some_failures(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as (router, _, lives):
            ticket = router.submit([5], Sampling(max_tokens=50))
            await until(lambda: bool(ticket.emitted))
            FakeGang.troubles = [ConfigError("not yet"), "failed: not yet"]
            FakeGang.lives[0].end("lost its host", 0, "lost")
            assert (await collect(ticket))[1] == "length"
            assert router.replicas[0].restarts == 1
            assert not lives.done()

    run(test)


@pytest.mark.parametrize("answers", [True, False])
def test_the_next_life_takes_the_spare_if_that_still_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr("launcher.supervisor.SPARE_AFTER_S", 0)

    async def test() -> None:
        async with supervised(tmp_path) as (router, _, _lives):
            await until(lambda: len(FakeGang.lives) == 2 and FakeGang.lives[1].placed)
            spare = FakeGang.lives[1]
            assert spare.epoch == 2 and not spare.ranks
            spare.answers = answers
            FakeGang.lives[0].end("died", 0)
            await until(lambda: router.replicas[0].restarts == 1)
            assert bool(spare.ranks) is answers and spare.killed is not answers
        assert all(life.killed for life in FakeGang.lives)

    run(test)


def test_without_restart_the_first_end_is_the_last(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path, restart=False) as (router, ear, lives):
            ticket = router.submit([5], Sampling(max_tokens=100_000))
            FakeGang.lives[0].end("died", 1)
            assert await lives == "rank 1 died"
            with pytest.raises(GangDown, match="rank 1 died"):
                await collect(ticket)
            assert ear.errors == [] and len(reports(tmp_path)) == 1

    run(test)


def test_a_poisoned_request_fails_and_the_others_finish(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as (router, _, _lives):
            poison = router.submit([13], Sampling(max_tokens=100_000))
            others = [router.submit([number], Sampling(max_tokens=300)) for number in range(5)]
            for epoch in (1, 2):
                heard = len(poison.emitted)
                await until(lambda epoch=epoch: poison.link is not None and poison.link.epoch == epoch)  # type: ignore[misc]
                await until(lambda heard=heard: len(poison.emitted) > heard)  # type: ignore[misc]
                [life] = (life for life in FakeGang.lives if life.epoch == epoch)  # the last one may be a spare
                life.end("failed: ValueError: poison", poison.rank)
            with pytest.raises(RequestPoisoned, match="ValueError: poison"):
                await collect(poison)
            for ticket in others:
                assert (await collect(ticket))[1] == "length"
                assert len(ticket.emitted) == 300

    run(test)


def test_only_so_many_crash_reports_are_kept(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path, crash_reports=2, max_failures=9) as (router, _, _lives):
            for death in range(4):
                await until(lambda death=death: len(FakeGang.lives) == death + 1 and router.ready)  # type: ignore[misc]
                FakeGang.lives[-1].end("died", 0)
            await until(lambda: len(FakeGang.lives) == 5 and router.ready)
            await until(lambda: [report["epoch"] for report in reports(tmp_path)] == [3, 4])

    run(test)


CULPRITS = Diagnosis(0, "lockstep broken\n...", [2], True)
NOBODY = Diagnosis(0, "lockstep broken\n...", [], False)
RAISED = RankEnd(1, "failed: OSError", False, "raised")
NOTICED = RankEnd(0, "lockstep broken", True, "raised")
CUT_OFF = Diagnosis(0, "lockstep broken\n...", [3], False)
LOST = RankEnd(3, "is lost with its node", False, "lost")


@pytest.mark.parametrize(
    ("diagnosis", "ends", "reason", "culprits", "innocent"),
    [
        (CULPRITS, None, "lockstep broken", {2}, True),
        (CULPRITS, (NOTICED,), "lockstep broken", {2}, True),
        (CULPRITS, (NOTICED, RankEnd(2, "died", False, "killed")), "the end", {2}, True),
        (NOBODY, (NOTICED, RAISED), "the end", {1}, False),
        (None, (RAISED,), "the end", {1}, False),
        (None, (LOST,), "the end", {3}, True),
        (None, (LOST, RAISED), "the end", {1, 3}, False),
        (None, (NOTICED,), "the end", None, False),
        (None, None, "what the router saw", None, False),
        (CUT_OFF, (NOTICED, LOST), "the end", {3}, True),
    ],
)
def test_judge(
    diagnosis: Diagnosis | None,
    ends: tuple[RankEnd, ...] | None,
    reason: str,
    culprits: set[int] | None,
    innocent: bool,
) -> None:
    link: GangLink = Router(4).open(0, LaunchKeys.generate(), 1)
    link.diagnosis, link.down = diagnosis, "what the router saw"
    death = judge(link, GangEnd("the end", ends) if ends is not None else None, None)
    assert (death.reason, death.culprits, death.innocent) == (reason, culprits, innocent)


def test_a_connection_that_was_lost_is_nobodys_fault() -> None:
    link = Router(4).open(0, LaunchKeys.generate(), 1)
    link._on_lost(2)
    assert judge(link, None, None) == Death("rank 2 is not connected any more", frozenset({2}), innocent=True)
    died = GangEnd("rank 2 died", (RankEnd(2, "died", False, "killed"),))
    assert judge(link, died, None) == Death("rank 2 died", frozenset({2}))
