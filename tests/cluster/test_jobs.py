"""The checkout as a job of a real cluster in token mode: by Ray's own command, and by ours."""

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cluster.head import BIN, Head
from tests.serve.server import ROOT, wait_until

KEY = "sk-of-this-test"
PROMPT = {"model": "tiny", "prompt": [5, 9, 40, 200, 17], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Following:
    """`phalanx submit --follow` in the background, as in a terminal of its own."""

    def __init__(self, head: Head, *args: str) -> None:
        command = [str(BIN / "python"), "-m", "launcher", "submit", *args, "--follow"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=head.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.output: list[str] = []
        self.log: list[str] = []
        streams = ((self.process.stdout, self.output), (self.process.stderr, self.log))
        for stream, lines in streams:
            threading.Thread(target=lambda stream=stream, lines=lines: lines.extend(stream), daemon=True).start()  # type: ignore[misc]

    def wait(self) -> int:
        code = self.process.wait(120)
        time.sleep(0.5)  # for the last lines
        return code


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with Head() as head:
        yield head


@pytest.fixture(scope="module")
def plain(head: Head, checkpoint: Path) -> str:
    """A job submitted by Ray's own command, as the docs have it."""
    command = ["python", "-m", "launcher", "serve", "--model", str(checkpoint), "--port", "0"]
    options = ["--submission-id", "plain", "--no-wait", "--working-dir", "."]
    done = head.ask("ray", "job", "submit", *options, "--", *command, RAY_AUTH_MODE="token")
    assert done.returncode == 0, done.stderr
    return "plain"


@pytest.fixture(scope="module")
def wrong(head: Head) -> Iterator[Following]:
    """A job that ends by itself. It starts beside the others."""
    following = Following(head, "--model", "/no/such/model", "--id", "wrong")
    yield following
    following.process.kill()


@pytest.fixture(scope="module")
def ours(
    head: Head, checkpoint: Path, plain: str, wrong: Following, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Following]:
    """A job of `phalanx submit`, with a configuration from outside the checkout and an API key; both jobs start."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "key").write_text(KEY)
    (folder / "mine.yaml").write_text(f"server: {{port: 0, api_key_file: {folder / 'key'}}}\n")
    arguments = [str(folder / "mine.yaml"), "--model", str(checkpoint), "--set", "engine.block_size=32", "--id", "ours"]
    following = Following(head, *arguments, "--env", "HELLO=there")
    try:
        wait_until(lambda: following.output or following.process.poll() is not None, 120, "the URL")
        assert following.output, "".join(following.log)
        yield following
    finally:
        following.process.kill()


def url_of(head: Head, job: str) -> str:
    def ready() -> list[str]:
        log = head.job_server("GET", f"/api/jobs/{job}/logs").json()["logs"]
        return re.findall(r"^ready  (\S+)  model tiny  2 ranks", log, re.MULTILINE)

    wait_until(ready, 120, f"job {job} is ready")
    return ready()[0]


def ranks() -> list[psutil.Process]:
    """Of both jobs: those that run in a job's working directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if "RankActor" in " ".join(process.cmdline()) and "working_dir_files" in process.cwd():
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_token_that_ray_was_not_told_of_is_explained(head: Head) -> None:
    done = head.phalanx("status", RAY_AUTH_MODE="disabled")
    assert done.returncode == 2
    assert f"{head.url} wants a token, but RAY_AUTH_MODE is 'disabled' in this shell: make it `token`" in done.stderr
    reply = httpx.get(f"{head.url}/api/version")
    assert reply.status_code == 401, "otherwise this proves nothing"


def test_both_serve_from_their_working_directory(head: Head, plain: str, ours: Following) -> None:
    url, plain_url = ours.output[0].strip(), url_of(head, plain)
    node = head.address.rsplit(":", 1)[0]
    assert url.startswith(f"http://{node}:") and plain_url.startswith(f"http://{node}:"), "the node's own address"
    assert httpx.post(f"{url}/v1/completions", json=PROMPT).status_code == 401
    with_key = httpx.post(f"{url}/v1/completions", json=PROMPT, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    answer = httpx.post(f"{plain_url}/v1/completions", json=PROMPT, timeout=60).json()["choices"][0]["text"]
    assert with_key.json()["choices"][0]["text"] == answer
    niceness = [process.nice() for process in ranks()]  # of two jobs, and of what waits for their next lives
    assert len(niceness) >= 4 and set(niceness) == {0}, "Ray starts its workers at 15"


def test_what_submit_says(head: Head, ours: Following) -> None:
    log = "".join(ours.log)
    assert "with the variables HELLO, RAY_JOB_STOP_WAIT_TIME_S" in log and "there" not in log
    assert "python -m launcher serve submitted.yaml --set engine.block_size=32 --model" in log
    assert log.count("\nready  ") == 1 and "\r" not in log and "\x1b" not in log and KEY not in log
    assert "error" not in log


def test_status_lists_the_jobs(head: Head, plain: str, ours: Following) -> None:
    lines = head.phalanx("status").stdout.splitlines()
    assert lines[0].split() == ["job", "state", "age", "url", "command"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert rows["ours"][1] == rows["plain"][1] == "RUNNING"
    assert rows["ours"][3] == ours.output[0].strip()


def test_an_id_that_is_taken_is_refused(head: Head, plain: str) -> None:
    done = head.phalanx("submit", "--id", plain, "--no-wait")
    assert done.returncode == 2 and done.stdout == ""
    assert f"has a job '{plain}' already; choose another --id" in done.stderr


def test_stopped_jobs_leave_nothing_and_count_as_failed(head: Head, plain: str, ours: Following) -> None:
    running = ranks()
    done = head.phalanx("stop", "ours")
    assert done.returncode == 0, done.stderr
    assert "job ours: STOPPED" in done.stderr and "nothing of it is left" in done.stderr
    assert ours.wait() == 1, "Ray's own command exits with 0"
    log = "".join(ours.log)
    assert "s  stopping\n" in log and "error: job ours: STOPPED" in log and "Traceback" not in log

    head.job_server("POST", f"/api/jobs/{plain}/stop")  # what `ray job stop` does
    followed = head.phalanx("logs", plain, "-f")
    assert followed.returncode == 1 and "s  stopping\n" in followed.stdout, followed.stdout
    again = head.phalanx("stop", plain)
    assert again.returncode == 0 and "is over already: STOPPED" in again.stderr
    wait_until(lambda: not [process for process in running if process.is_running()], 20, "the ranks are gone")


def test_a_job_that_fails_says_why(head: Head, wrong: Following) -> None:
    assert wrong.wait() == 1 and wrong.output == []
    log = "".join(wrong.log)
    assert "phalanx: error: model directory /no/such/model does not exist\n" in log
    assert "error: job wrong: FAILED, exit code 2" in log
    shown = head.phalanx("status", "wrong")
    assert shown.returncode == 0 and "FAILED" in shown.stdout and "/no/such/model does not exist" in shown.stdout


def test_a_job_that_is_not_there(head: Head) -> None:
    done = head.phalanx("stop", "nobody")
    assert done.returncode == 2
    assert done.stderr == f"phalanx: error: the cluster at {head.url} has no job 'nobody'; see `phalanx status`\n"
