"""Following a job's log until it is ready or over, across cut connections, without losing or repeating a line.

The whole log is asked for again and again and only what is new is shown: the one way that is certain. Ray's log stream
ends silently when a connection is cut and starts over at the first line.
"""

import re
import time
from collections.abc import Callable

from launcher.config import ConfigError
from launcher.jobs import Job, Jobs, Unreachable

READY = re.compile(r"^ready\s+(https?://\S+)\s", re.MULTILINE)  # as `phalanx serve` prints it
POLL_S = 1.0
PATIENCE_S = 180.0  # without an answer
BYTES_PER_S = 1 << 20  # a long log is asked for less often


class LostContact(Exception):
    """The job server has not answered for too long; the job may well go on. The message is one line."""


class LogFollower:
    """Shows one job's log once, in whole lines. Owns how much of it has been shown.

    `show` gets text that ends with a line's end; `note` gets a remark for people, such as a cut connection.
    """

    def __init__(
        self,
        jobs: Jobs,
        job_id: str,
        show: Callable[[str], None],
        note: Callable[[str], None],
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._jobs = jobs
        self._id = job_id
        self._show = show
        self._note = note
        self._sleep = sleep
        self._clock = clock
        self._patience = patience_s
        self._shown = 0  # characters
        self._pause = POLL_S
        self._job: Job | None = None  # as last seen
        self.url: str | None = None  # of the server, once it is ready

    def until_ready(self) -> Job:
        """Until the server is ready (`url` is set then) or the job is over. Raises LostContact, ConfigError."""
        return self._until(lambda: self.url is not None)

    def until_over(self) -> Job:
        """Until the job is over and all of its log is shown. Raises LostContact, ConfigError."""
        return self._until(lambda: False)

    def _until(self, enough: Callable[[], bool]) -> Job:
        answered, cut = self._clock(), False
        while True:
            try:
                job = self._look()
            except Unreachable as error:
                if not cut:
                    self._note(f"{error}; trying again")
                cut = True
                if self._clock() - answered > self._patience:
                    if self._job is not None and self._job.final:
                        return self._job  # the node with the log is gone; how it ended is known
                    raise LostContact(f"{error}; gave up after {self._patience:g} s, the job may still run") from None
            else:
                if cut:
                    self._note("connected again")
                answered, cut = self._clock(), False
                if job.final or enough():
                    return job
            self._sleep(self._pause)

    def _look(self) -> Job:
        """The state is asked for first: once it is final, the log that follows is the whole log."""
        job = self._job = self._jobs.info(self._id)
        text = self._jobs.log(self._id)
        if len(text) < self._shown:
            raise Unreachable("the node that has the job's log does not answer")
        end = len(text) if job.final else text.rfind("\n") + 1
        if end > self._shown:
            new = text[self._shown : end]
            self._shown = end
            self._show(new if new.endswith("\n") else new + "\n")
            if self.url is None and (found := READY.search(new)):
                self.url = found[1]
        self._pause = max(POLL_S, len(text) / BYTES_PER_S)
        return job


def server_url(jobs: Jobs, job: Job) -> str:
    """Where the server of a running job listens. Raises Unreachable, or ConfigError when it is not there."""
    if job.final:
        raise ConfigError(f"job {job.id} is over: {job.status}")
    if url := ready_url(jobs.log(job.id)):
        return url
    raise ConfigError(f"job {job.id} is {job.status} and its server is not ready yet; see `phalanx logs {job.id}`")


def ready_url(log: str) -> str | None:
    """The server's URL from a job's log, if it has become ready."""
    found = READY.search(log)
    return found[1] if found else None
