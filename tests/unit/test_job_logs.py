"""Following a log while connections are cut, answers are stale, and lines are half-written."""

import random
from collections.abc import Callable

import pytest

from launcher.config import ConfigError
from launcher.job_logs import LogFollower, LostContact, ready_url, server_url
from launcher.jobs import Job, Unreachable

READY = "ready  http://10.0.0.1:8000  model tiny  2 ranks  7.1 s\n"
LOG = f"Runtime env is setting up.\n   0.0s  joining Ray\n{READY}try    curl http://10.0.0.1:8000/v1\nrank 0 | é\n"


class FakeJobs:
    """A job that writes `log` a few characters at each question and then ends as `status`."""

    def __init__(self, log: str = LOG, status: str = "SUCCEEDED", step: int = 7) -> None:
        self.full, self.status, self.step = log, status, step
        self.written = 0
        self.trouble: Callable[[str], None] = lambda question: None

    def info(self, job_id: str) -> Job:
        self.trouble("info")
        self.written = min(len(self.full), self.written + self.step)
        over = self.written == len(self.full)
        return Job(job_id, self.status if over else "RUNNING", "python -m launcher serve")

    def log(self, job_id: str) -> str:
        self.trouble("log")
        return self.full[: self.written]


class Follower:
    """A follower with a clock of its own, and what it showed."""

    def __init__(self, jobs: FakeJobs, patience_s: float = 20) -> None:
        self.now = 0.0
        self.shown: list[str] = []
        self.notes: list[str] = []
        self.follower = LogFollower(
            jobs, "j", self.shown.append, self.notes.append,
            sleep=self._sleep, clock=lambda: self.now, patience_s=patience_s,
        )  # fmt: skip

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def text(self) -> str:
        return "".join(self.shown)


def cut() -> None:
    raise Unreachable("the connection is cut")


@pytest.mark.parametrize("step", [1, 3, 20, 1000])
def test_every_line_once_and_whole(step: int) -> None:
    seen = Follower(FakeJobs(step=step))
    assert seen.follower.until_over().status == "SUCCEEDED"
    assert seen.text == LOG
    assert all(part.endswith("\n") for part in seen.shown)
    assert seen.notes == []


@pytest.mark.parametrize("seed", range(20))
def test_cut_connections_and_stale_answers_lose_and_repeat_nothing(seed: int) -> None:
    chance = random.Random(seed)

    class Bad(FakeJobs):
        def log(self, job_id: str) -> str:
            text = super().log(job_id)
            return "" if seen.shown and chance.random() < 0.3 else text  # Ray's answer for a node that it cannot ask

    jobs = Bad(step=chance.randrange(1, 30))
    jobs.trouble = lambda question: cut() if chance.random() < 0.4 else None
    seen = Follower(jobs, patience_s=1000)
    ended = seen.follower.until_ready()
    assert READY in seen.text
    if not ended.final:
        seen.follower.until_over()
    assert seen.text == LOG
    assert sum("trying again" in note for note in seen.notes) == seen.notes.count("connected again")


def test_ready_is_seen_at_once_and_the_rest_follows_without_a_gap() -> None:
    seen = Follower(FakeJobs())
    assert not seen.follower.until_ready().final
    assert seen.follower.url == "http://10.0.0.1:8000"
    assert seen.text.endswith(READY), "a half-written line is no line yet"
    seen.follower.until_over()
    assert seen.text == LOG


def test_a_job_that_ends_before_it_is_ready() -> None:
    seen = Follower(FakeJobs("phalanx: error: no such model\n", "FAILED"))
    job = seen.follower.until_ready()
    assert (job.status, job.outcome, seen.follower.url) == ("FAILED", 1, None)


def test_the_last_line_may_lack_its_end() -> None:
    seen = Follower(FakeJobs("a\nkilled in the middle of"))
    seen.follower.until_over()
    assert seen.text == "a\nkilled in the middle of\n"


def test_patience_has_an_end_and_a_cut_is_noted_once() -> None:
    jobs = FakeJobs()
    jobs.trouble = lambda question: cut()
    seen = Follower(jobs)
    with pytest.raises(LostContact, match="gave up after 20 s, the job may still run"):
        seen.follower.until_over()
    assert seen.notes == ["the connection is cut; trying again"]
    assert 20 < seen.now < 30


def test_patience_starts_anew_with_every_answer() -> None:
    jobs = FakeJobs(step=1)
    seen = Follower(jobs)
    jobs.trouble = lambda question: cut() if int(seen.now) % 16 else None  # one answer in 16 s
    seen.follower.until_over()
    assert seen.text == LOG and seen.now > 1000


def test_the_end_is_known_although_its_log_is_gone() -> None:
    jobs = FakeJobs(status="STOPPED", step=1000)
    jobs.trouble = lambda question: cut() if question == "log" else None
    assert Follower(jobs).follower.until_over().status == "STOPPED"


def test_a_job_that_is_not_there_is_no_cut_connection() -> None:
    def gone(question: str) -> None:
        raise ConfigError("the cluster has no job 'j'")

    jobs = FakeJobs()
    jobs.trouble = gone
    with pytest.raises(ConfigError, match="no job 'j'"):
        Follower(jobs).follower.until_ready()


def test_a_long_log_is_asked_for_less_often() -> None:
    seen = Follower(FakeJobs("x" * (30 << 20) + "\n", step=10 << 20))
    seen.follower.until_over()
    assert seen.now > 1 + 10 + 20


@pytest.mark.parametrize(
    ("line", "url"),
    [
        ("ready  https://[fd00::2]:8000  model m  1 rank  3.0 s", "https://[fd00::2]:8000"),
        ("ready  http://a:1  model m  2 replicas  3.0 s", "http://a:1"),
        ("rank 0 | ready  http://a:1  model m", None),
        ("ready to go", None),
    ],
)
def test_the_ready_line(line: str, url: str | None) -> None:
    assert ready_url(f"before\n{line}\nafter\n") == url


def test_the_server_of_a_job() -> None:
    jobs = FakeJobs(step=1000)
    running = Job("j", "RUNNING", "")
    jobs.written = len(LOG)
    assert server_url(jobs, running) == "http://10.0.0.1:8000"
    jobs.written = 5
    with pytest.raises(ConfigError, match="is RUNNING and its server is not ready yet"):
        server_url(jobs, running)
    with pytest.raises(ConfigError, match="is over: STOPPED"):
        server_url(jobs, Job("j", "STOPPED", ""))
