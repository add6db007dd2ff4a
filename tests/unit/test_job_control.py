"""What the job commands say of a server and a cluster, and their exit codes, over small HTTP servers."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from launcher import job_control
from launcher.cli import main
from launcher.client import ServerError
from launcher.job_control import drain_server, duration, replica_rows, show_server, stop_job
from launcher.jobs import DEFAULT_ADDRESS, Job, Unreachable, job_server
from launcher.submit import model_warnings, report_end
from launcher.terminal import Terminal

Answers = dict[tuple[str, str], tuple[int, Any]]


@contextmanager
def serving(answers: Answers) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server with fixed answers: its URL, and what ends it."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            status, body = answers.get((self.command, self.path), (404, {"error": {"message": "there is nothing"}}))
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = answer

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()

    try:
        yield f"http://127.0.0.1:{server.server_port}", end
    finally:
        end()


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["phalanx", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    code = caught.value.code
    assert isinstance(code, int)
    return code


REPLICA = {"replica": 0, "state": "serving", "epoch": 3, "ranks": 4, "restarts": 2, "inflight": 7, "reason": None}


def test_the_replicas_of_a_server_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    down = {"replica": 1, "state": "restarting", "reason": "rank 2 died: [killed]", "new": 1}
    status = {"replicas": [REPLICA, down], "waiting": 2, "inflight": 7, "draining": True}
    with serving({("GET", "/status"): (200, status)}) as (url, _):
        assert show_server(url + "/v1") == 0
    head, first, second, summary = capsys.readouterr().out.splitlines()
    assert head.split() == list(REPLICA)
    assert first.split() == ["0", "serving", "3", "4", "2", "7", "-"]
    assert second.split(maxsplit=6) == ["1", "restarting", "-", "-", "-", "-", "rank 2 died: [killed]"]
    assert summary == "7 in flight, 2 waiting, draining"


def test_what_a_server_does_not_tell_is_left_out() -> None:
    assert replica_rows({}) == []
    assert replica_rows({"replicas": [{}]}) == [("-",) * 7]


@pytest.mark.parametrize("body", [b"<html>", [], {"replicas": 5}, {"replicas": [5]}, "text", None])
def test_a_status_that_makes_no_sense(body: Any) -> None:
    with serving({("GET", "/status"): (200, body)}) as (url, _), pytest.raises(ServerError, match="no phalanx server"):
        show_server(url)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (200, "3m20s"), (18420, "5h07m"), (187200, "2d04h")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_drain_waits_until_the_server_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    with serving({("POST", "/drain"): (202, {}), ("GET", "/health"): (200, {})}) as (url, end):
        began = time.monotonic()
        threading.Timer(1.0, end).start()
        assert drain_server(url, 60) == 0
        assert time.monotonic() - began > 0.9
    assert "has ended" in capsys.readouterr().err


def test_drain_gives_up(capsys: pytest.CaptureFixture[str]) -> None:
    with serving({("POST", "/drain"): (202, {}), ("GET", "/health"): (200, {})}) as (url, _):
        assert drain_server(url, 0.1) == 1
    assert "has not ended within 0.1 s; it goes on draining" in capsys.readouterr().err


def test_a_server_that_cannot_drain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving({}) as (url, _):
        assert run(monkeypatch, "drain", url) == 2
    assert "/drain answers 404: there is nothing" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["status"], ["logs", "j"], ["stop", "j"], ["drain", "j"], ["submit"]])
def test_no_cluster_is_one_line_and_exit_code_2(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *args, "--address", "127.0.0.1:9") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("phalanx: error: no Ray job server answers at http://127.0.0.1:9: ")


def test_submit_refuses_wrong_settings_before_it_looks_for_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, words in (
        (["--set", "engine.depth=1"], "unknown setting 'engine.depth'"),
        (["/no/such.yaml"], "cannot read config /no/such.yaml"),
        (["--dp", "0"], "'dp'"),
        (["--env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
    ):
        assert run(monkeypatch, "submit", *args, "--address", "127.0.0.1:9") == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job", "code", "words"),
    [
        (Job("j", "SUCCEEDED", ""), 0, "job j: SUCCEEDED"),
        (Job("j", "STOPPED", "", "Job was intentionally stopped."), 1, "job j: STOPPED"),
        (Job("j", "FAILED", "", "Job entrypoint ...", exit_code=2), 1, "job j: FAILED, exit code 2"),
        (Job("j", "FAILED", "", "runtime_env: no space left"), 1, "runtime_env: no space left"),
    ],
)
def test_the_exit_code_comes_from_the_final_status(
    job: Job, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_end(job, Terminal(False)) == code
    text = capsys.readouterr().err
    assert words in text and "entrypoint" not in text and "intentionally" not in text


class FakeCluster:
    """A job that ends after some looks, and what is left of it after some more."""

    def __init__(self, looks: int, left: int = 0) -> None:
        self.looks, self.leftovers, self.stopped = looks, left, 0

    def info(self, job_id: str) -> Job:
        self.looks -= bool(self.stopped)
        if self.looks == 1:
            raise Unreachable("cut")
        return Job(job_id, "RUNNING" if self.looks > 0 else "STOPPED", "", driver_job="01")

    def stop(self, job_id: str) -> None:
        self.stopped += 1

    def left(self, job: Job) -> list[str]:
        self.leftovers -= 1
        return ["RankActor (pid 7)"] if self.leftovers > 0 else []


@pytest.mark.parametrize(
    ("cluster", "code", "words"),
    [
        (FakeCluster(0), 0, "is over already: STOPPED"),
        (FakeCluster(3), 0, "nothing of it is left"),
        (FakeCluster(3, left=3), 0, "nothing of it is left"),
        (FakeCluster(3, left=10**9), 1, "left behind by job j: RankActor (pid 7)"),
        (FakeCluster(10**9), 1, "is still RUNNING after"),
    ],
)
def test_stop(
    cluster: FakeCluster, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("POLL_S", 0.001), ("STOP_S", 0.2), ("GONE_S", 0.2)):
        monkeypatch.setattr(job_control, name, value)
    monkeypatch.setattr(job_control, "RayJobs", lambda url: cluster)
    assert stop_job("j", None) == code
    assert words in capsys.readouterr().err
    assert cluster.stopped == (0 if "already" in words else 1)


@pytest.mark.parametrize(
    ("given", "environ", "url"),
    [
        (None, {}, DEFAULT_ADDRESS),
        ("http://head:8265/", {"RAY_API_SERVER_ADDRESS": "http://other:1"}, "http://head:8265"),
        ("head:8265", {}, "http://head:8265"),
        (None, {"RAY_API_SERVER_ADDRESS": "http://api:1", "RAY_ADDRESS": "http://ray:1"}, "http://api:1"),
        (None, {"RAY_ADDRESS": "https://ray:1"}, "https://ray:1"),
        (None, {"RAY_ADDRESS": "10.0.0.1:6379"}, DEFAULT_ADDRESS),
    ],
)
def test_where_the_job_server_is(
    given: str | None, environ: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert job_server(given) == url


def test_models_that_will_not_be_found() -> None:
    far, near = "http://10.0.0.1:8265", "http://127.0.0.1:8265"
    assert "relative path" in "".join(model_warnings("checkpoints/tiny", near))
    assert "every node needs it" in "".join(model_warnings("/tmp", far))
    assert "head node" in "".join(model_warnings("demo", far))
    assert not list(model_warnings("/tmp", near)) and not list(model_warnings("demo", near))
    assert not list(model_warnings("/models/on/the/cluster", far))
