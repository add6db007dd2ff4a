"""`phalanx submit` over a pretended cluster, and Ray's client over a pretended job server."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import job_logs, submit
from launcher.config import ConfigError, DeploymentConfig
from launcher.jobs import Job, RayJobs, Submission, Unreachable
from launcher.submit import Wish
from launcher.terminal import Terminal
from tests.unit.test_job_control import serving
from tests.unit.test_job_logs import LOG, FakeJobs


class FakeCluster(FakeJobs):
    """Takes a job and then plays it."""

    def __init__(self, url: str) -> None:
        super().__init__(log=LOG, status=FakeCluster.ending, step=20)
        self.submitted: list[Submission] = []
        self.names: list[str] = []
        FakeCluster.last = self

    ending = "SUCCEEDED"
    last: "FakeCluster"

    def exists(self, job_id: str) -> bool:
        return job_id == "taken"

    def submit(self, submission: Submission) -> None:
        self.submitted.append(submission)
        with zipfile.ZipFile(submission.archive) as archive:
            self.names = archive.namelist()


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "RayJobs", FakeCluster)
    monkeypatch.setattr(job_logs, "POLL_S", 0.0)
    monkeypatch.setattr(FakeCluster, "ending", "SUCCEEDED")


def run(*, config: Path | None = None, job_id: str | None = "j", wait: bool = True, follow: bool = False) -> int:
    wish = Wish(config, ("--dp", "3"), "http://127.0.0.1:1", job_id, ("FOO=secret",), wait, follow)
    return submit.submit(wish, DeploymentConfig(model="/m"), Terminal(False))


def interrupt_when(condition: Callable[[FakeCluster], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def info(self: FakeCluster, job_id: str) -> Job:
        if condition(self):
            raise KeyboardInterrupt
        return FakeJobs.info(self, job_id)

    monkeypatch.setattr(FakeCluster, "info", info)


def test_waits_until_it_is_ready_and_prints_the_url_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("dp: 3\n")
    assert run(config=config) == 0
    out, err = capsys.readouterr()
    assert out == "http://10.0.0.1:8000\n"
    assert "with the variables FOO, RAY_JOB_STOP_WAIT_TIME_S" in err and "secret" not in err
    assert "joining Ray" in err and "rank 0 |" not in err, "the log, up to the line that says ready"
    [job] = FakeCluster.last.submitted
    assert job.id == "j" and job.environment["FOO"] == "secret"
    assert job.command == ("python", "-m", "launcher", "serve", "submitted.yaml", "--dp", "3")
    assert {"submitted.yaml", "launcher/serve.py"} <= set(FakeCluster.last.names)
    assert not job.archive.exists(), "nothing stays in the temporary directory"


def test_without_waiting_the_id_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(wait=False) == 0
    assert capsys.readouterr().out == "j\n"
    assert run(job_id=None, wait=False) == 0
    assert capsys.readouterr().out.startswith("phalanx-20")


@pytest.mark.parametrize(("ending", "code"), [("SUCCEEDED", 0), ("STOPPED", 1), ("FAILED", 1)])
def test_followed_to_the_end_the_final_status_decides(
    ending: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeCluster, "ending", ending)
    assert run(follow=True) == code
    out, err = capsys.readouterr()
    assert out == "http://10.0.0.1:8000\n"
    assert LOG in err and f"job j: {ending}" in err


def test_ctrl_c_leaves_the_job_running_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_when(lambda cluster: cluster.written >= 40, monkeypatch)
    assert run() == 1, "nobody knows yet whether it will be ready"
    out, err = capsys.readouterr()
    assert out == "" and "job j goes on; `phalanx logs j -f` follows it, `phalanx stop j` ends it" in err
    interrupt_when(lambda cluster: "try    curl" in cluster.full[: cluster.written], monkeypatch)
    assert run(follow=True) == 0
    assert capsys.readouterr().out == "http://10.0.0.1:8000\n"


def test_an_id_in_use_is_refused_before_anything_travels() -> None:
    with pytest.raises(ConfigError, match="has a job 'taken' already"):
        run(job_id="taken")
    assert FakeCluster.last.submitted == []


def test_a_head_that_goes_away_while_submitting(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: FakeCluster, submission: Submission) -> None:
        raise Unreachable("the job server does not answer")

    monkeypatch.setattr(FakeCluster, "submit", gone)
    with pytest.raises(ConfigError, match="the job server does not answer"):
        run()


VERSION = {"version": "4", "ray_version": "2.60.0", "ray_commit": "x", "session_name": "s"}
RUNNING = {"type": "SUBMISSION", "submission_id": "a", "status": "RUNNING", "entrypoint": "e", "start_time": 1000}


def test_rays_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")  # Ray's client would go there
    driver = RUNNING | {"type": "DRIVER", "submission_id": None, "job_id": "01000000"}
    stopped = RUNNING | {"submission_id": "b", "status": "STOPPED", "start_time": 2000, "end_time": 5000}
    answers = {
        ("GET", "/api/version"): (200, VERSION),
        ("GET", "/api/jobs/"): (200, [RUNNING, driver, stopped]),
        ("GET", "/api/jobs/a"): (200, RUNNING),
        ("GET", "/api/jobs/a/logs"): (200, {"logs": "one\n"}),
        ("GET", "/api/jobs/broken"): (500, b"it broke"),
        ("GET", "/api/jobs/secret"): (401, b"Unauthorized: Missing authentication token"),
        ("GET", "/api/jobs/wrong"): (403, b"Forbidden: Invalid authentication token"),
        ("GET", "/api/jobs/odd"): (200, {"status": "RUNNING"}),
    }
    with serving(answers) as (url, end):
        jobs = RayJobs(url)
        assert [(job.id, job.status) for job in jobs.all()] == [("b", "STOPPED"), ("a", "RUNNING")]
        assert jobs.all()[0].age(100.0) == 3.0 and jobs.info("a").age(100.0) == 99.0
        assert jobs.exists("b") and not jobs.exists("01000000")
        assert jobs.log("a") == "one\n"
        with pytest.raises(ConfigError, match="has no job 'c'"):
            jobs.info("c")
        with pytest.raises(Unreachable, match="500"):
            jobs.info("broken")
        with pytest.raises(Unreachable, match="validation error"):
            jobs.info("odd")
        with pytest.raises(ConfigError, match="wants a token, but RAY_AUTH_MODE is 'disabled'"):
            jobs.info("secret")
        with pytest.raises(ConfigError, match="refuses the token"):
            jobs.info("wrong")
        end()
        with pytest.raises(Unreachable, match="does not answer"):
            jobs.info("a")


def test_a_server_that_is_no_job_server() -> None:
    with serving({}) as (url, _), pytest.raises(ConfigError, match="Version check returned 404"):
        RayJobs(url)
