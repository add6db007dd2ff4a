"""A Ray cluster of one node with its job server, in token mode, beside whatever else runs on this machine."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

import httpx

from launcher.guardian import MARK, sweep
from tests.serve.server import ROOT

ADDRESS = re.compile(r"ray start --address='([^']+)'")
JOB_SERVER = re.compile(r"RAY_API_SERVER_ADDRESS='(http://[^']+)'")
BIN = Path(sys.executable).parent


class Head:
    """Context manager around `ray start --head`. `environ` is a shell whose user has the cluster's token."""

    def __init__(self, cpus: int = 8, timeout_s: float = 120.0) -> None:
        self._cpus = cpus
        self._timeout_s = timeout_s
        self._mark = secrets.token_hex(8)
        self._lines: list[str] = []
        self.url = self.address = ""

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="phx"))  # a short path: sockets are in it
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32))
        strange = ("RAY_", "PHALANX_", "NCCL_")  # settings of the machine that runs the tests
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
        # nodes have the requirements on their path
        self.environ |= {"RAY_AUTH_TOKEN_PATH": str(token), "PATH": f"{BIN}:{os.environ['PATH']}"}
        command = [str(BIN / "ray"), "start", "--head", "--block", "--port=0", f"--num-cpus={self._cpus}"]
        command += [f"--temp-dir={self.folder / 'ray'}", "--object-store-memory=80000000", "--disable-usage-stats"]
        command += ["--dashboard-port=0", "--dashboard-agent-listen-port=0"]
        self._process = subprocess.Popen(
            command, env=self.environ | {"RAY_AUTH_MODE": "token", MARK: self._mark}, cwd="/", text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        sweep(self._mark, [str(self.folder)])
        self._reader.join(5)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(re.sub(r"\x1b\[[0-9;]*m", "", line))

    def _wait_up(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            text = "".join(self._lines)
            if (address := ADDRESS.search(text)) and (server := JOB_SERVER.search(text)):
                self.address, self.url = address[1], server[1]
                self.environ["RAY_API_SERVER_ADDRESS"] = self.url
                return
            time.sleep(0.1)
        raise AssertionError("the cluster did not start:\n" + "".join(self._lines))

    def job_server(self, method: str, path: str) -> httpx.Response:
        """A call of its API, as this user."""
        token = (self.folder / "token").read_text()
        reply = httpx.request(method, self.url + path, headers={"Authorization": f"Bearer {token}"}, timeout=60)
        reply.raise_for_status()
        return reply

    def ask(self, *command: str, timeout_s: float = 120.0, **environ: str) -> subprocess.CompletedProcess[str]:
        """A command of this Python's environment to its end, in the checkout."""
        return subprocess.run(
            [str(BIN / command[0]), *command[1:]], cwd=ROOT, env=self.environ | environ, capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip

    def phalanx(self, *args: str, timeout_s: float = 120.0, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.ask("python", "-m", "launcher", *args, timeout_s=timeout_s, **environ)
