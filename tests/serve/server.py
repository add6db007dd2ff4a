"""A real server for tests: `python -m launcher serve` in a process of its own, and a look at what it leaves behind."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
READY = re.compile(r"^ready\s+(http://\S+)\s+model (\S+)\s+(?:\d+ x )?(\d+) ranks?")


class Server:
    """Context manager around one `phalanx serve`. `args` go to the command line, `prefix` comes before it."""

    def __init__(
        self, *args: str, timeout_s: float = 120.0, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        self._state = tempfile.TemporaryDirectory(prefix="phalanx-test-")
        self.crash_dir = Path(self._state.name)
        kept = ("--set", f"supervision.crash_dir={self.crash_dir}")
        self._command = [*prefix, sys.executable, "-m", "launcher", "serve", "--port", "0", *kept, *args]
        self._timeout_s = timeout_s
        self._env = env or {}
        self.lines: list[str] = []
        self.url = ""
        self.model = ""

    def __enter__(self) -> Self:
        # a session of its own, so that a Ctrl-C can be sent to its whole process group as a terminal does
        self.process = subprocess.Popen(
            self._command, cwd=ROOT, env=os.environ | self._env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self._reader.join(5)
            self._state.cleanup()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if match := READY.match(line):
                    self.url, self.model = match[1], match[2]
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError("the server did not become ready:\n" + self.output)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def wait(self, timeout_s: float) -> int:
        """The exit code; AssertionError if it has not ended by then."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None
        self._reader.join(5)
        return code

    def rank_pids(self) -> list[int]:
        """Processes of the ranks that run, by the name Ray gives them; not those that wait for the next life."""
        return sorted(p.pid for p in self.family() if "RankActor.run" in " ".join(p.cmdline()))

    def pid_of(self, rank: int) -> int:
        """The process of a rank, as its observer tells."""
        answer = httpx.get(f"{self.url}/debug/doctor", timeout=30).json()
        return int(re.findall(rf"rank {rank}: pid (\d+)", answer["text"])[0])

    def family(self) -> list[psutil.Process]:
        """All processes below the launcher that are alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def post(self, path: str, body: Any, timeout_s: float = 120.0) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=timeout_s)

    def complete(self, prompt: str | list[int], max_tokens: int = 16, **params: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **params}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of a streamed answer; ends at [DONE], AssertionError if it ends otherwise."""
        with httpx.stream("POST", f"{self.url}{path}", json=body | {"stream": True}, timeout=120.0) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line[6:])
        raise AssertionError("the stream ended without [DONE]")

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by `name{labels}`."""
        text = httpx.get(f"{self.url}/metrics").text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


@contextlib.contextmanager
def keep_busy(server: Server, streams: int = 4) -> Iterator[None]:
    """Long requests that have begun when the body starts, and others after them; they are given up after it, however
    far they are."""
    over = threading.Event()

    def ask(max_tokens: int) -> None:
        url = f"{server.url}/v1/completions"
        body = {"model": server.model, "prompt": [5] * 8, "ignore_eos": True, "stream": True, "max_tokens": max_tokens}
        while not over.is_set():
            with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", url, json=body, timeout=60) as reply:
                for _ in reply.iter_bytes():
                    if over.is_set():
                        return

    def started() -> float:
        return sum(value for name, value in server.metrics().items() if name.startswith("phalanx_requests_started"))

    before = started()
    lengths = range(4000, 4000 - 300 * streams, -300)  # so that they do not all end in one step
    threads = [threading.Thread(target=ask, args=(length,), daemon=True) for length in lengths]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: started() >= before + streams, 30, "all of them at the ranks")
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(20)


def ask_phalanx(*args: str) -> subprocess.CompletedProcess[str]:
    """Another phalanx command, to its end."""
    command = [sys.executable, "-m", "launcher", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def alive(processes: list[psutil.Process]) -> list[str]:
    """Those that still run (a zombie has ended)."""
    left = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
    return left


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))
