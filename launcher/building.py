"""What building files in the user's cache needs: one kind of error, progress, locks, checksums, room."""

import fcntl
import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn


class DemoModelError(RuntimeError):
    """The demo model cannot be built; the message is one line: what happened and what to do."""


class Report(Protocol):
    """Where progress goes: the stage's name and the share of it that is done, 0 to 1."""

    def __call__(self, stage: str, share: float) -> None: ...


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(folder: Path, wanted: int) -> None:
    """Raise DemoModelError unless `wanted` bytes are free on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise DemoModelError(
            f"the demo model needs {wanted / 1e9:.1f} GB in {folder}, {free / 1e9:.1f} GB are free: "
            "make room, or let PHALANX_CACHE name a folder on another disk"
        )


@contextmanager
def exclusive(lock: Path, progress: Report) -> Iterator[None]:
    """Hold an advisory lock on the file `lock`; the kernel drops it when the process ends, however it ends."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another process that builds the same", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def progress_bars() -> Iterator[Report]:
    """One bar per stage on a terminal; one line per stage where stderr is none."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, share: float) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    bars.update(earlier, completed=1.0)
                tasks[stage] = bars.add_task(stage, total=1.0)
                if not console.is_terminal:
                    print(f"{stage} ...", file=sys.stderr, flush=True)
            bars.update(tasks[stage], completed=share)

        yield report
