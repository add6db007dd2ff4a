"""Jobs of a Ray cluster, over its job server's HTTP API."""

import logging
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from launcher.config import ConfigError
from launcher.ray_token import MODE, WHERE, use_token

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
TIMEOUT_S = 60.0  # of one call: the head may be busy unpacking
FINAL = ("SUCCEEDED", "FAILED", "STOPPED")


class Unreachable(Exception):
    """The job server did not answer, or not as it should; it may do so later. The message is one line."""


@dataclass(frozen=True)
class Job:
    """What a cluster knows of a job. Times are Unix seconds; `message` explains the state."""

    id: str
    status: str
    entrypoint: str
    message: str = ""
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    driver_job: str | None = None  # Ray's own number of it

    @property
    def final(self) -> bool:
        return self.status in FINAL

    @property
    def outcome(self) -> int:
        """Exit code of a command that stands for the job; Ray's own client says 0 for a stopped one."""
        return 0 if self.status == "SUCCEEDED" else 1

    def age(self, now: float) -> float:
        """Seconds it has run."""
        return max(0.0, (self.ended or now) - (self.started or now))


class Jobs(Protocol):
    """A cluster's jobs. All raise Unreachable, and ConfigError for a job that is not there or a refused token."""

    def info(self, job_id: str) -> Job: ...

    def log(self, job_id: str) -> str:
        """Everything the job has written so far; less, or nothing, while its node cannot be asked."""


@dataclass(frozen=True)
class Submission:
    """A job to be. `archive` is its working directory as a zip file."""

    id: str
    command: tuple[str, ...]
    archive: Path
    environment: dict[str, str]


def job_server(address: str | None) -> str:
    """URL of the job server: as given, else from Ray's own variables, else this machine's."""
    ray_address = os.environ.get("RAY_ADDRESS", "")
    usual = ray_address if ray_address.startswith("http") else None
    url = address or os.environ.get("RAY_API_SERVER_ADDRESS") or usual or DEFAULT_ADDRESS
    return (url if "://" in url else f"http://{url}").rstrip("/")


class RayJobs:
    """Jobs of the cluster whose job server is at `url`. Raises ConfigError when there is none, or no token for it."""

    def __init__(self, url: str) -> None:
        self.url = url
        wanted = _wants_token(url)
        use_token(f"the Ray cluster at {url}", lambda: wanted)
        for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):  # Ray's client would prefer them to what it is given
            os.environ.pop(name, None)
        from ray.job_submission import JobSubmissionClient

        logging.getLogger("ray").setLevel(logging.ERROR)
        logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.ERROR)  # has a level of its own

        class Client(JobSubmissionClient):
            """Ray's own waits for ever for an answer."""

            def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
                return super()._do_request(method, endpoint, timeout=TIMEOUT_S, **options)

        try:
            self._client = self._call("", lambda: Client(url))
        except Unreachable as error:
            raise ConfigError(str(error)) from None

    def all(self) -> list[Job]:
        """All submitted jobs that the cluster remembers, the newest first."""
        found = [_job(details) for details in self._call("", self._client.list_jobs) if details.submission_id]
        return sorted(found, key=lambda job: -(job.started or 0))

    def info(self, job_id: str) -> Job:
        return _job(self._call(job_id, lambda: self._client.get_job_info(job_id)))

    def log(self, job_id: str) -> str:
        return self._call(job_id, lambda: self._client.get_job_logs(job_id)) or ""

    def exists(self, job_id: str) -> bool:
        return any(job.id == job_id for job in self.all())

    def submit(self, submission: Submission) -> None:
        environment = {"env_vars": submission.environment, "working_dir": str(submission.archive)}
        self._call(
            submission.id,
            lambda: self._client.submit_job(
                entrypoint=shlex.join(submission.command), submission_id=submission.id, runtime_env=environment
            ),
        )

    def stop(self, job_id: str) -> None:
        """Ask for the job's end: SIGTERM, then Ray's own grace period, then SIGKILL."""
        self._call(job_id, lambda: self._client.stop_job(job_id))

    def left(self, job: Job) -> list[str]:
        """Actors of an ended job that are not gone yet."""
        if job.driver_job is None:
            return []
        from ray.util.state import list_actors

        filters = [("job_id", "=", job.driver_job), ("state", "!=", "DEAD")]
        actors = self._call(job.id, lambda: list_actors(address=self.url, filters=filters, timeout=int(TIMEOUT_S)))
        return [f"{actor.class_name} (pid {actor.pid})" for actor in actors]

    def _call(self, job_id: str, question: Any) -> Any:
        """Ray raises bare errors with the answer's text in them."""
        from ray.exceptions import AuthenticationError
        from requests.exceptions import RequestException

        try:
            return question()
        except AuthenticationError as error:
            raise ConfigError(_explain_refusal(self.url, str(error))) from None
        except (RequestException, ConnectionError, OSError) as error:
            raise Unreachable(f"the job server at {self.url} does not answer: {_brief(error)}") from None
        except Exception as error:  # RuntimeError mostly; the state API has its own
            text = _brief(error)
            if "status code 404" in text:
                raise ConfigError(f"the cluster at {self.url} has no job {job_id!r}; see `phalanx status`") from None
            raise Unreachable(f"the job server at {self.url}: {text}") from None


def _wants_token(url: str) -> bool:
    """The first call of all, without a token; it also finds out whether there is a job server. Raises ConfigError."""
    try:
        reply = httpx.get(f"{url}/api/version", timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        hint = "name the head's dashboard with --address http://HEAD:8265"
        raise ConfigError(f"no Ray job server answers at {url}: {_brief(error)}; {hint}") from None
    return reply.status_code in (401, 403)


def _explain_refusal(url: str, error: str) -> str:
    mode = os.environ.get(MODE)
    if "Forbidden" in error:
        return f"the Ray cluster at {url} refuses the token in {WHERE}: it is another cluster's"
    if mode != "token":
        return f"the Ray cluster at {url} wants a token, but {MODE} is {mode!r} in this shell: make it `token`"
    return f"the Ray cluster at {url} wants a token and none was found in {WHERE}"


def _job(details: Any) -> Job:
    return Job(
        id=details.submission_id or details.job_id,
        status=str(getattr(details.status, "value", details.status)),
        entrypoint=details.entrypoint,
        message=details.message or "",
        started=details.start_time / 1000 if details.start_time else None,
        ended=details.end_time / 1000 if details.end_time else None,
        exit_code=details.driver_exit_code,
        driver_job=details.job_id,
    )


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def new_id() -> str:
    """A submission id that is readable, sorts by time, and is unlikely to be taken."""
    return f"phalanx-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
