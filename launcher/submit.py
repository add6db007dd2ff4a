"""`phalanx submit`: the checkout as a job of a cluster, followed until it serves."""

import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from launcher.config import ConfigError, DeploymentConfig
from launcher.environment import ROOT
from launcher.job_environment import job_environment
from launcher.job_logs import LogFollower, LostContact
from launcher.jobs import Job, RayJobs, Submission, Unreachable, job_server, new_id
from launcher.package import collect, mib
from launcher.terminal import Terminal

MAX_REASON = 2000  # characters of Ray's explanation of a job that never ran


@dataclass(frozen=True)
class Wish:
    """What the command line asks for. `arguments` go to `serve` behind the configuration."""

    config: Path | None
    arguments: tuple[str, ...]
    address: str | None
    job_id: str | None
    env: tuple[str, ...]
    wait: bool
    follow: bool


def submit(wish: Wish, deployment: DeploymentConfig, terminal: Terminal) -> int:
    """Submit and follow; returns the exit code. Whatever can be refused here is refused before anything travels.

    The server's URL goes to stdout, or the job's id if nobody waits; the job's log and all else goes to stderr.
    """
    environment = job_environment(os.environ, wish.env)
    package = collect(ROOT, wish.config)
    address = job_server(wish.address)
    for warning in model_warnings(deployment.model, address):
        terminal.warning(warning)
    jobs = RayJobs(address)
    job_id = wish.job_id or new_id()
    command = ("python", "-m", "launcher", "serve", *([package.config] if package.config else []), *wish.arguments)
    try:
        if jobs.exists(job_id):
            raise ConfigError(f"the cluster at {address} has a job {job_id!r} already; choose another --id")
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "working_dir.zip"
            package.write(archive)
            terminal.stage(f"uploading {mib(package.size)} in {len(package.files)} files")
            jobs.submit(Submission(job_id, command, archive, environment))
    except Unreachable as error:
        raise ConfigError(str(error)) from None
    terminal.stage(f"job {job_id} at {address}, with the variables {', '.join(sorted(environment))}")
    if not wish.wait:
        print(job_id, flush=True)
        return 0
    return _follow(jobs, job_id, wish.follow, terminal)


def _follow(jobs: RayJobs, job_id: str, to_the_end: bool, terminal: Terminal) -> int:
    follower = LogFollower(jobs, job_id, terminal.text, terminal.stage)
    try:
        job = follower.until_ready()
        if follower.url is not None:
            print(follower.url, flush=True)
        if not job.final and to_the_end:
            job = follower.until_over()
        if job.final:
            return report_end(job, terminal)
    except KeyboardInterrupt:
        terminal.stage(f"job {job_id} goes on; `phalanx logs {job_id} -f` follows it, `phalanx stop {job_id}` ends it")
        return 0 if follower.url is not None else 1
    except LostContact as error:
        terminal.error(str(error))
        return 1
    return 0


def report_end(job: Job, terminal: Terminal) -> int:
    """Say how a job ended; returns the exit code of a command that stands for it."""
    code = f", exit code {job.exit_code}" if job.exit_code else ""
    text = f"job {job.id}: {job.status}{code}, after {job.age(time.time()):.0f} s"
    if job.outcome == 0:
        terminal.stage(text)
        return 0
    if job.status == "FAILED" and job.exit_code is None and job.message:  # it never ran, so no log says why
        text = f"{text}: {job.message[:MAX_REASON]}"
    terminal.error(text)
    return job.outcome


def model_warnings(model: str, address: str) -> Iterable[str]:
    """What is likely to be missing on the cluster. Checkpoints do not travel with a job."""
    here = urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1")
    path = Path(model).expanduser()
    if model == "demo":
        if not here:
            yield "the demo model is built on the head node; ranks on other nodes need it in their own cache"
    elif not path.is_absolute():
        yield f"model {model!r} is a relative path, and checkpoints do not travel: give its path on the nodes"
    elif not here and path.is_dir():
        yield f"model {model!r} is on this machine; every node needs it at the same path"
