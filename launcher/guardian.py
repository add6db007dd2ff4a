"""Nothing outlives its launcher: a small process that ends everything of a launch when the launcher is gone.

Ray ends most of what it started when its driver is killed, but its agents stay for a minute, a stopped rank for ever.
Every process of a launch inherits the launch's mark in its environment; those that Ray renames may lose it by that, but
have files of the Ray session's folder open. The guardian waits for the end of a pipe that only the launcher holds,
and then kills what carries either (Linux; elsewhere Ray's own rules apply).
"""

import contextlib
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

    def watch_session(self, session_dir: str) -> None:
        """Ray is up; whatever has a file open in this folder belongs to the launch."""
        assert self._process.stdin is not None
        self._process.stdin.write(session_dir.encode() + b"\n")
        self._process.stdin.flush()

    def release(self) -> None:
        """The launcher is about to end in order: sweep what is left now, and wait for that."""
        assert self._process.stdin is not None
        os.environ.pop(MARK, None)
        self._process.stdin.close()
        self._process.wait()


def members(mark: str, session_dirs: list[str]) -> list[int]:
    """Processes of the launch."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            marked = needle in (entry / "environ").read_bytes().split(b"\0")
            if marked or (_renamed(entry) and _has_open(entry, session_dirs)):
                found.append(int(entry.name))
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def _renamed(entry: Path) -> bool:
    """Ray writes this over the beginning of a process' memory, command line and environment."""
    return (entry / "cmdline").read_bytes().startswith(b"ray::")


def _has_open(entry: Path, folders: list[str]) -> bool:
    for link in (entry / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(link)
            if any(target.startswith(folder + "/") for folder in folders):
                return True
    return False


def sweep(mark: str, session_dirs: list[str]) -> None:
    """Kill the processes of the launch until there are none."""
    deadline = time.monotonic() + _GIVE_UP_S
    while (pids := members(mark, session_dirs)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark, session_dirs = sys.argv[1], [line.strip() for line in sys.stdin]
    deadline = time.monotonic() + _GRACE_S
    while members(mark, session_dirs) and time.monotonic() < deadline:
        time.sleep(0.1)
    sweep(mark, session_dirs)


if __name__ == "__main__":
    main()
