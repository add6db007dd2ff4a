"""Servers under measurement: started, awaited, and always stopped, one at a time."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent


class ServerFailed(RuntimeError):
    """The server did not become ready; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Command:
    """How a server is started: arguments, additions to the environment, the path that answers 200 when it is ready."""

    name: str
    argv: list[str]
    env: dict[str, str]
    ready_path: str


@dataclass(frozen=True)
class Running:
    """A server that is ready."""

    name: str
    url: str
    start_s: float
    pid: int


def phalanx(model: Path | None, port: int, config: Path, settings: list[str]) -> Command:
    argv = [sys.executable, "-m", "launcher", "serve", str(config), "--port", str(port)]
    argv += ["--model", str(model)] if model else []
    argv += [part for setting in settings for part in ("--set", setting)]
    return Command("phalanx", argv, {}, "/ready")


def vllm(python: str, model: Path, port: int, max_model_len: int) -> Command:
    """vLLM's OpenAI server on the CPU: one engine process with a thread on every core.

    Left alone it keeps one core for its HTTP front, which costs it half its throughput on two.
    """
    cores = sorted(os.sched_getaffinity(0))
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "bfloat16"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len)]
    env = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Command("vllm", argv, env, "/health")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Command, port: int, timeout_s: float) -> Iterator[Running]:
    """Start the server in a session of its own, wait until it is ready, stop it at the end. Raises ServerFailed."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(
            command.argv,
            cwd=ROOT,
            env={**os.environ, **command.env},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while not answers(url + command.ready_path):
                if process.poll() is not None:
                    raise ServerFailed(f"{command.name} ended with status {process.returncode}: {tail(log)}")
                if time.monotonic() - began > timeout_s:
                    raise ServerFailed(f"{command.name} was not ready after {timeout_s:.0f} s: {tail(log)}")
                time.sleep(0.1)
            yield Running(command.name, url, time.monotonic() - began, process.pid)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt, then terminate, then kill the server's whole session."""
    for number, patience_s in ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def answers(url: str) -> bool:
    """Whether a GET is answered 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def served_model(url: str) -> str:
    """The name of the first model the server offers."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise ServerFailed(f"{url}/v1/models does not name a model: {error}") from None


def tail(log: IO[bytes], lines: int = 8) -> str:
    log.seek(0)
    return "\n" + "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
