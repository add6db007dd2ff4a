"""Processes are ended for certain, and only those that are meant."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from launcher.processes import ProcessId, end_processes, start_time, this_process


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def identity(process: subprocess.Popen[bytes]) -> ProcessId:
    return ProcessId(process.pid, start_time(process.pid))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_is_ended_even_if_it_is_stopped(child: subprocess.Popen[bytes], stopped: bool) -> None:
    if stopped:
        os.kill(child.pid, signal.SIGSTOP)
    assert end_processes([identity(child)], 0.05, 30) == []
    assert child.wait(30) == -signal.SIGKILL


def test_one_that_ends_by_itself_is_not_killed(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.close()
    child.stdin = None
    assert end_processes([identity(child)], 60, 0) == []
    assert child.wait(30) == 0


def test_another_process_of_that_number_is_left_alone(child: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    assert end_processes([ProcessId(child.pid, "1"), ProcessId(2**22 + 1, "1")], 0, 0) == []
    assert child.poll() is None and time.monotonic() - began < 30


def test_what_stays_is_told(monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]) -> None:
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda fd, number: None)
    assert end_processes([identity(child)], 0, 0.05) == [child.pid]


def test_start_times() -> None:
    assert this_process().started == start_time(os.getpid()) != ""
    assert start_time(2**22 + 1) == ""
