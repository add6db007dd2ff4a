"""`phalanx status`, `logs`, `stop` and `drain`: jobs of a cluster, and the servers in them."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.client import ServerError, ask, open_client
from launcher.config import ConfigError
from launcher.job_environment import STOP_WAIT_S
from launcher.job_logs import LogFollower, LostContact, ready_url, server_url
from launcher.jobs import Job, RayJobs, Unreachable, job_server
from launcher.submit import report_end
from launcher.terminal import Terminal

ANSWER_S = 30.0  # for one request to a server
STOP_S = STOP_WAIT_S + 40.0  # a job's end, Ray's own book-keeping included
GONE_S = 15.0  # for Ray to end the actors of a killed driver
POLL_S = 0.5
WIDE = 500  # columns of a table that no terminal shows: nothing is folded
T = TypeVar("T")
REPLICA_COLUMNS = ("replica", "state", "epoch", "ranks", "restarts", "inflight", "reason")


def show_jobs(address: str | None) -> int:
    """A line for each job, the newest first."""
    jobs = RayJobs(job_server(address))
    _print_jobs([(job, _url(jobs, job)) for job in jobs.all()])
    return 0


def show_job(job_id: str, address: str | None) -> int:
    """The job's line, why it ended, and what its server says if that can be reached from here."""
    jobs = RayJobs(job_server(address))
    job = jobs.info(job_id)
    url = _url(jobs, job)
    _print_jobs([(job, url)])
    if job.final and job.message:
        print(job.message)
    if url is not None:
        try:
            show_server(url)
        except ServerError as error:
            Terminal(False).warning(str(error))
    return 0


def show_server(url: str) -> int:
    """What a server's replicas do, as a table."""
    try:
        status = ask("GET", url, "/status", timeout_s=ANSWER_S).json()
        rows = replica_rows(status)
    except (ValueError, TypeError, AttributeError):
        raise ServerError(f"{url} is no phalanx server: its /status makes no sense") from None
    _print_table(REPLICA_COLUMNS, rows)
    print(f"{status.get('inflight', '?')} in flight, {status.get('waiting', '?')} waiting", end="")
    print(", draining" if status.get("draining") else "")
    return 0


def show_log(job_id: str, follow: bool, address: str | None) -> int:
    """Print a job's log so far, or to its end."""
    jobs, terminal = RayJobs(job_server(address)), Terminal(False)
    if not follow:
        jobs.info(job_id)
        print(jobs.log(job_id), end="", flush=True)
        return 0
    follower = LogFollower(jobs, job_id, lambda text: print(text, end="", flush=True), terminal.stage)
    try:
        return report_end(follower.until_over(), terminal)
    except KeyboardInterrupt:
        terminal.stage(f"job {job_id} goes on")
        return 0
    except LostContact as error:
        terminal.error(str(error))
        return 1


def stop_job(job_id: str, address: str | None) -> int:
    """Ask for the end and wait for it. Idempotent: a job that is over is fine. 1 if it does not end."""
    jobs, terminal = RayJobs(job_server(address)), Terminal(False)
    job = jobs.info(job_id)
    if job.final:
        terminal.stage(f"job {job_id} is over already: {job.status}")
        return 0
    jobs.stop(job_id)
    job = _wait(lambda: jobs.info(job_id), lambda job: job.final, STOP_S)
    if not job.final:
        terminal.error(f"job {job_id} is still {job.status} after {STOP_S:g} s; stop it again, or end its node")
        return 1
    terminal.stage(f"job {job_id}: {job.status}")
    if left := _wait(lambda: jobs.left(job), lambda left: not left, GONE_S):
        terminal.error(f"left behind by job {job_id}: {', '.join(left)}")
        return 1
    terminal.stage("nothing of it is left")
    return 0


def drain_server(url: str, timeout_s: float) -> int:
    """Ask a server to finish and end, and wait until nobody answers there. 1 on time-out."""
    terminal = Terminal(False)
    ask("POST", url, "/drain", timeout_s=ANSWER_S)
    terminal.stage(f"{url} takes no new requests and finishes the others")
    if not _wait(lambda: _is_gone(url), bool, timeout_s):
        terminal.error(f"{url} has not ended within {timeout_s:g} s; it goes on draining")
        return 1
    terminal.stage(f"{url} has ended")
    return 0


def drain_job(job_id: str, timeout_s: float, address: str | None) -> int:
    """The same for the server of a job; then the job's own end decides."""
    jobs, terminal = RayJobs(job_server(address)), Terminal(False)
    if code := drain_server(server_url(jobs, jobs.info(job_id)), timeout_s):
        return code
    job = _wait(lambda: jobs.info(job_id), lambda job: job.final, STOP_S)
    if not job.final:
        terminal.error(f"the server of job {job_id} has ended, but the job is still {job.status}")
        return 1
    return report_end(job, terminal)


def replica_rows(status: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows of the table; what a server does not tell is a dash."""
    return [
        tuple("-" if replica.get(name) is None else str(replica[name]) for name in REPLICA_COLUMNS)
        for replica in status.get("replicas", [])
    ]


def duration(seconds: float) -> str:
    """`59s`, `3m20s`, `5h07m`, `2d04h`."""
    whole = int(seconds)
    for unit, part, size, small in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // small:02}{part}"
    return f"{whole}s"


def _url(jobs: RayJobs, job: Job) -> str | None:
    """Where a running job's server is; None as well while its log cannot be read."""
    if job.status != "RUNNING":
        return None
    try:
        return ready_url(jobs.log(job.id))
    except (Unreachable, ConfigError):
        return None


def _print_jobs(jobs: list[tuple[Job, str | None]]) -> None:
    now = time.time()
    _print_table(
        ("job", "state", "age", "url", "command"),
        [(job.id, job.status, duration(job.age(now)), url or "-", job.entrypoint) for job, url in jobs],
    )


def _print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column not in ("command", "reason"), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDE).print(table)


def _is_gone(url: str) -> bool:
    try:
        with open_client(url, timeout=ANSWER_S) as client:
            client.get("/health")
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:
        return False  # it may be about to go
    return False


def _wait(look: Callable[[], T], enough: Callable[[T], bool], timeout_s: float) -> T:
    """Look until it is enough or the time is over; a job server that does not answer meanwhile is asked again."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = look()
            if enough(found) or time.monotonic() > deadline:
                return found
        except Unreachable:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)
