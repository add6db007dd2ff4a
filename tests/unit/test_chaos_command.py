"""`phalanx chaos`: one fault, and drills, at a server whose ranks are fake."""

import threading
from collections.abc import Iterator

import httpx
import pytest

from launcher import chaos
from launcher.chaos import Server, run_drill, run_fault
from launcher.cli import main
from launcher.client import ServerError
from tests.fake_gang import link_of
from tests.front_server import FrontServer, until


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "LOOK_S", 0.001)


@pytest.fixture
def server() -> Iterator[FrontServer]:
    with FrontServer(2, chaos=True) as server:
        yield server


def phalanx(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["phalanx", *args])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_one_fault(server: FrontServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    args = "chaos", "slow", "--rank", "1", "--seconds", "0.5", "--steps", "3", "--url", server.url
    assert phalanx(monkeypatch, *args) == 0
    assert capsys.readouterr().out == "slow at rank 1\n"
    until(lambda: len(server.ranks[1].faults) == 1)
    [fault] = server.ranks[1].faults
    assert (fault.kind, fault.seconds, fault.steps) == ("slow", 0.5, 3)
    assert phalanx(monkeypatch, "chaos", "poison", "--tokens", "5,6", "--url", server.url) == 0
    assert capsys.readouterr().out == "poison at ranks 0, 1\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["kill", "--rank", "7"], "there is no rank 7"),
        (["kill", "--rank", "some"], "`rank`: must be the number of a rank"),
        (["drop", "--direction", "up"], "`direction`"),
        (["poison", "--tokens", "a"], "--tokens wants token ids"),
        (["drill", "--kinds", "kill,flood"], "not flood"),
    ],
)
def test_wrong_input_is_one_line(
    server: FrontServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    words: str,
) -> None:
    assert phalanx(monkeypatch, "chaos", *args, "--url", server.url) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_server_that_allows_no_faults() -> None:
    with FrontServer(1) as server, pytest.raises(ServerError, match=r"403: .*chaos\.enabled=true"):
        run_fault(server.url, "kill", "0", {})


# ---- drills


def test_a_drill_that_the_server_survives(server: FrontServer, capsys: pytest.CaptureFixture[str]) -> None:
    """The gang here is back by itself a moment after each fault."""
    stop, struck = threading.Event(), [0, 0]

    def live() -> None:
        place, link = server.router.replicas[0], link_of(server.router)
        while not stop.wait(0.005):
            if (now := [len(rank.faults) for rank in server.ranks]) != struck:
                struck[:] = now
                place.state = "restarting"
                stop.wait(0.1)
                place.state, link.epoch = "serving", link.epoch + 1

    life = threading.Thread(target=live)
    life.start()
    try:
        assert run_drill(server.url, ["kill", "raise"], count=4, every_s=0.0, seed=3) == 0
    finally:
        stop.set()
        life.join()
    said = capsys.readouterr()
    assert sum(struck) == 4
    assert said.err.count("ready again after") == 4 and "4 of 4" in said.err
    assert said.out.count("ready again after") == 4, said.out


def test_a_drill_after_which_the_server_is_gone(server: FrontServer, capsys: pytest.CaptureFixture[str]) -> None:
    def end() -> None:
        until(lambda: any(rank.faults for rank in server.ranks))
        server.call(server._stop.set)

    threading.Thread(target=end).start()
    assert run_drill(server.url, ["kill"], count=9, every_s=0.0, seed=0) == 1
    assert "never ready again: the server has ended" in capsys.readouterr().out


def test_a_server_that_is_not_ready_is_not_drilled(server: FrontServer) -> None:
    server.router.restarting(0, "rank 1 is dead")
    with pytest.raises(ServerError, match="is not ready: restarting"):
        run_drill(server.url, ["kill"], count=1, every_s=0.0, seed=0)


class Told:
    """A server that is in these states, one after the other, the last for ever; time passes with every look.

    A state is "gone", or the epoch of each replica, 0 for one that is starting.
    """

    def __init__(self, *states: str | tuple[int, ...]) -> None:
        self.states = list(states)
        self.now = 0.0
        self.work = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/status":
            self.now += 10
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            if isinstance(state, str):
                raise httpx.ConnectError("refused")
            return self.status(state)
        self.work += request.url.path == "/v1/completions"
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    def status(self, epochs: tuple[int, ...]) -> httpx.Response:
        replicas = [
            {
                "replica": number,
                "state": "serving" if epoch else "starting",
                "reason": None if epoch else f"gang {number} is starting",
                "epoch": epoch,
                "ranks": 2,
            }
            for number, epoch in enumerate(epochs)
        ]
        return httpx.Response(200, json={"replicas": replicas})

    def recovers(self, *, falls: bool) -> str:
        server = Server(httpx.Client(transport=httpx.MockTransport(self), base_url="http://x"), lambda: self.now)
        return server.recovers(server.look(), falls=falls)


def test_what_a_recovery_is() -> None:
    told = Told((1,), (1,), (1,), (0,), (0,), (2,))
    assert told.recovers(falls=True) == ""
    assert told.work == 2, "work for a gang that may sleep"
    assert Told((1,)).recovers(falls=False) == ""
    assert Told((1,)).recovers(falls=True) == "nobody noticed the fault within 120 s"
    assert Told((1,), (0,)).recovers(falls=True) == "gang 0 is starting"
    assert Told((1,), (0,), "gone").recovers(falls=True) == "the server has ended (refused)"


def test_a_replica_that_falls_while_others_serve_is_seen() -> None:
    assert Told((1, 1), (1, 1), (1, 0), (1, 2)).recovers(falls=True) == ""
    assert Told((1, 1), (1, 2)).recovers(falls=True) == "", "back before anybody looked"
    assert Told((1, 1), (1, 0)).recovers(falls=True) == "gang 1 is starting"
    assert Told((1, 1)).recovers(falls=True).startswith("nobody noticed")
