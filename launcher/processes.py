"""Ending a rank's process for certain, also one that is stopped, and never one that only has its number."""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """`started`: the kernel's start time of the process, which tells it from a later one with the same number."""

    pid: int
    started: str


def this_process() -> ProcessId:
    return ProcessId(os.getpid(), start_time(os.getpid()))


def start_time(pid: int) -> str:
    """Empty if there is no such process (or no /proc)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def end_processes(processes: Iterable[ProcessId], grace_s: float, timeout_s: float) -> list[int]:
    """Wait `grace_s` for processes of this machine to end, kill the others, and wait `timeout_s` until they are gone.

    Returns the numbers of those that are not by then. Linux only; elsewhere it is left to Ray and does nothing.
    """
    if sys.platform != "linux":
        return []
    with contextlib.ExitStack() as stack:
        held = {}
        for process in processes:
            try:
                fd = os.pidfd_open(process.pid)  # from here on the number cannot pass to another process
            except OSError:
                continue
            stack.callback(os.close, fd)
            if start_time(process.pid) == process.started:
                held[process.pid] = fd
        left = _that_stay(held, grace_s)
        for fd in left.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        return list(_that_stay(left, timeout_s))


def _that_stay(held: Mapping[int, int], timeout_s: float) -> dict[int, int]:
    """Processes, by number with their descriptors, that have not ended after this time."""
    deadline = time.monotonic() + timeout_s
    left = {}
    for pid, fd in held.items():
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            left[pid] = fd
    return left
