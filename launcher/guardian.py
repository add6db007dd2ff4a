"""Nothing outlives its launcher: a small process that ends everything of a launch when the launcher is gone.

Ray ends most of what it started when its driver is killed, but its agents stay for a minute, a stopped rank for ever.
Every process of a launch carries the launch's mark in its environment; the guardian waits for the end of a pipe that
only the launcher holds, and then kills what carries the mark (Linux; elsewhere Ray's own rules apply).
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "PHALANX_LAUNCH_MARK"
_GRACE_S = 1.0  # for what ends on its own
_GIVE_UP_S = 20.0


class Guardian:
    """Held by the launcher while it runs. Start it before Ray, so that Ray's processes inherit the mark."""

    def __init__(self) -> None:
        mark = secrets.token_hex(8)
        os.environ.pop(MARK, None)
        self._process = subprocess.Popen(
            [sys.executable, __file__, mark], stdin=subprocess.PIPE, start_new_session=True, stdout=subprocess.DEVNULL
        )
        os.environ[MARK] = mark

    def release(self) -> None:
        """The launcher is about to end in order: sweep what is left now, and wait for that."""
        assert self._process.stdin is not None
        os.environ.pop(MARK, None)
        self._process.stdin.close()
        self._process.wait()


def marked(mark: str) -> list[int]:
    """Processes that carry the mark."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def sweep(mark: str) -> None:
    """Kill what carries the mark until nothing does."""
    deadline = time.monotonic() + _GIVE_UP_S
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _GRACE_S
    while marked(sys.argv[1]) and time.monotonic() < deadline:
        time.sleep(0.1)
    sweep(sys.argv[1])


if __name__ == "__main__":
    main()
