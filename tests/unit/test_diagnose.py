"""`phalanx doctor` and `phalanx trace`, and the endpoints they ask, over fake ranks and what is seen of them."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from launcher.cli import main
from launcher.client import ServerError
from launcher.diagnose import run_doctor, run_trace
from launcher.keys import LaunchKeys
from launcher.router import GangDown, Router
from tests.fake_gang import link_of
from tests.front_server import FrontServer
from vote.recorder import Recorder
from vote.report import Sighting, sight

WAITING = "the model is not available: waiting for ranks 0, 1"


class FakeObservers:
    """Two ranks; rank 1 does what `rank_1` says, rank 0 waits in ballot 7."""

    def __init__(self) -> None:
        self.recorders = [Recorder(rank, 2) for rank in range(2)]
        for recorder in self.recorders:
            for step in range(6):
                recorder.control.step = step
                recorder.control.leave(recorder.control.enter(b"first ballot", ordinal=step + 1))
        self.recorders[0].control.enter(b"first ballot", ordinal=7)
        self.rank_1 = "running"
        self.stacks = 0

    def look(self, last: int = 10, *, stack: bool = False) -> dict[int, Sighting | None]:
        self.stacks += stack
        if self.rank_1 == "running":
            self.recorders[0].control.enter(b"first ballot", ordinal=int(time.monotonic() * 1e6))
        shown = "Thread 1" if stack else ""
        states = ("running", self.rank_1)
        return {
            rank: sight(recorder.read(), state=state, host="here", now=time.time(), last=last, stack=shown)
            for rank, (recorder, state) in enumerate(zip(self.recorders, states, strict=True))
        }


@pytest.fixture
def observers() -> FakeObservers:
    return FakeObservers()


@pytest.fixture
def url(observers: FakeObservers, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("launcher.front.admin.STUCK_S", 0.05)
    with FrontServer() as server:
        link_of(server.router).observers = lambda: observers  # type: ignore[method-assign, assignment, return-value]
        yield server.url


def test_doctor_of_a_running_gang(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 ranks in lockstep at step 5"
    assert [line[:9] for line in lines[1:]] == ["  rank 0:", "  rank 1:"]


def test_doctor_of_a_gang_with_a_stopped_rank(
    url: str, observers: FakeObservers, capsys: pytest.CaptureFixture[str]
) -> None:
    observers.rank_1 = "stopped"
    assert run_doctor(url + "/") == 1
    text = capsys.readouterr().out
    assert text.startswith("out of lockstep: rank 1 hangs: its process")
    assert text.count("Thread 1") == 1, "of the one to blame"
    answer = httpx.get(f"{url}/debug/doctor").json()
    assert (answer["lockstep"], [rank["rank"] for rank in answer["culprits"]]) == (False, [1])


def test_trace(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "trace.json"
    assert run_trace(url, target, None) == 0
    trace = json.loads(target.read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    assert f"{len(slices)} slices written to {target}" in capsys.readouterr().err
    assert run_trace(url, target, 2) == 0
    few = [event for event in json.loads(target.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["step"] for event in few} == {4, 5}


@pytest.mark.parametrize("query", ["steps=0", "steps=x", "stips=4"])
def test_wrong_query(url: str, query: str) -> None:
    reply = httpx.get(f"{url}/debug/trace?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == query.split("=")[0]


def test_a_file_that_cannot_be_written(url: str, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"cannot write .*/no/trace.json: No such file"):
        run_trace(url, tmp_path / "no" / "trace.json", None)


@pytest.mark.parametrize("command", ["doctor", "trace"])
def test_no_server_is_one_line_and_exit_code_2(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["phalanx", command, "--url", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("phalanx: error: no answer from http://127.0.0.1:9: ")


def test_a_server_of_another_kind(url: str) -> None:
    with pytest.raises(ServerError, match="/elsewhere/debug/doctor answers 404"):
        run_doctor(f"{url}/elsewhere")


def test_before_all_ranks_are_there() -> None:
    link = Router(2).open(0, LaunchKeys.generate(), 1)
    with pytest.raises(GangDown, match="waiting for ranks 0, 1"):
        link.observers()
    with FrontServer() as server:
        link_of(server.router).observers = link.observers  # type: ignore[method-assign]
        for path in ("doctor", "trace"):
            reply = httpx.get(f"{server.url}/debug/{path}")
            assert (reply.status_code, reply.json()["error"]["message"]) == (503, WAITING)
