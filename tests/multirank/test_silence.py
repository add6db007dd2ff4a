"""Real processes that fall silent: a rank whose router is gone ends, a router whose rank is gone says so; short silence
is no death.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from dp_engine.config import EngineConfig
from dp_engine.link import Link, RankKeys, RouterLost
from dp_engine.messages import PROTOCOL_VERSION, Hello
from dp_engine.rank import run_rank
from dp_engine.spec import RankSpec
from ep.config import ExpertConfig
from launcher.keys import LaunchKeys
from launcher.router import Router
from tests.fake_gang import open_link
from tests.multirank.gang import Gang
from vote.config import VoteConfig

SILENCE_S = 2.0
START_S = 60.0
ROUTER, RANK = 0, 1  # processes


def keep_router(process: int, keys: LaunchKeys, notes: Path) -> None:
    """Serve one rank for ever; `notes` get the endpoint, and `asleep` when the rank sleeps."""
    del process

    async def run() -> None:
        router = Router(1, silence_s=SILENCE_S)
        link = await open_link(router, keys)
        note(notes / "endpoint", link.endpoint)
        await link.wait_ready(START_S)
        while not link.reports:  # the first one comes with the first sleep
            await asyncio.sleep(0.01)
        note(notes / "asleep", "")
        await link.wait_down()

    asyncio.run(run())


def note(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def noted(path: Path) -> str:
    deadline = time.monotonic() + START_S
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.02)
    return path.read_text()


def be_rank(process: int, keys: RankKeys, notes: Path, model: Path) -> tuple[str, float]:
    """A whole rank; how it ended, and when."""
    del process
    spec = RankSpec(
        0, 1, 1, noted(notes / "endpoint"), keys, str(model), EngineConfig(num_blocks=20),
        VoteConfig(control_timeout_s=SILENCE_S / 2), ExpertConfig(), START_S, threads=1, host="127.0.0.1",
    )  # fmt: skip
    try:
        run_rank(spec, None)
    except RouterLost as error:
        return str(error), time.time()
    return "served", time.time()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sleeping_rank_ends_when_its_router_is_gone(how: signal.Signals, tmp_path: Path) -> None:
    from tests.checkpoints import write_mixtral  # imports more than the processes need

    keys, model = LaunchKeys.generate(), write_mixtral(tmp_path / "tiny")
    with Gang() as gang:
        gang.start(ROUTER, keep_router, keys, tmp_path)
        gang.start(RANK, be_rank, keys.for_rank(), tmp_path, model)
        noted(tmp_path / "asleep")
        if how is signal.SIGSTOP:  # for a moment only
            os.kill(gang.pid(ROUTER), signal.SIGSTOP)
            time.sleep(SILENCE_S / 4)
            os.kill(gang.pid(ROUTER), signal.SIGCONT)
            time.sleep(SILENCE_S)
        gone = time.time()
        os.kill(gang.pid(ROUTER), how)
        error, ended = gang.results([RANK])[RANK]
        assert error.startswith("rank 0 has no router any more")
        assert 0 < ended - gone < 30


def be_silent(process: int, keys: RankKeys, endpoint: str) -> None:
    """The socket of a rank that has nothing to say."""
    del process
    link = Link(endpoint, 0, keys)
    link.send(Hello(PROTOCOL_VERSION, keys.launch_id, 1, 0, 1, 1, 100, 512, ""))
    link.wait_welcome(START_S)
    link.wait()


def test_a_router_notices_a_rank_that_is_stopped_though_nobody_asks_it() -> None:
    async def run() -> None:
        keys = LaunchKeys.generate()
        router = Router(1, silence_s=SILENCE_S)
        link = await open_link(router, keys)
        with Gang() as gang:
            gang.start(0, be_silent, keys.for_rank(), link.endpoint)
            await link.wait_ready(START_S)
            with pytest.raises(TimeoutError):  # it has nothing to say for longer than that
                await asyncio.wait_for(link.wait_down(), 2 * SILENCE_S)
            os.kill(gang.pid(0), signal.SIGSTOP)
            reason = await asyncio.wait_for(link.wait_down(), 30)
            assert reason == "rank 0: its connection was closed, or nothing was heard of it for 2 s"
        await router.close()

    asyncio.run(run())
