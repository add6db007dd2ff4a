"""From the first line to the last process: what a start refuses, and what every kind of end leaves behind: nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serve.server import ROOT, Server, alive, keep_busy, port_is_free, shared_memory, wait_until


def start(checkpoint: Path, *args: str, **options: Any) -> Server:
    return Server("--model", str(checkpoint), *args, **options)


def assert_nothing_left(server: Server, family: list[psutil.Process], shm: set[str]) -> None:
    wait_until(lambda: not alive(family), 10, f"processes left: {alive(family)}")
    assert port_is_free(server.port)
    assert shared_memory() <= shm


def test_orderly_stop_under_load(checkpoint: Path) -> None:
    shm = shared_memory()
    with start(checkpoint) as server:
        family = server.family()
        assert len(server.rank_pids()) == 2
        with keep_busy(server):
            started = time.monotonic()
            os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: the whole process group
            assert server.wait(15) == 0, server.output
            assert time.monotonic() - started < 10
        assert_nothing_left(server, family, shm)
        assert "Traceback" not in server.output, server.output


def test_killed_launcher_leaves_nothing(checkpoint: Path) -> None:
    shm = shared_memory()
    with start(checkpoint) as server:
        family = server.family()
        os.kill(server.rank_pids()[0], signal.SIGSTOP)  # not even a rank that cannot notice
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not alive(family), 30, f"processes left: {alive(family)}")
        assert port_is_free(server.port)
        assert shared_memory() <= shm


def test_interrupted_start(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "launcher", "serve", "--model", str(checkpoint), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    process.stderr.readline()  # "starting Ray"
    time.sleep(1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    wait_until(lambda: not alive(family), 10, "gone")


def refused(*args: str, timeout_s: float = 60) -> str:
    """The one line of a start that is refused."""
    process = subprocess.run(
        [sys.executable, "-m", "launcher", *args], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )
    assert process.returncode == 2, process.stderr
    lines = [line for line in process.stderr.splitlines() if "error" in line]
    assert len(lines) == 1 and "Traceback" not in process.stderr, process.stderr
    assert process.stdout == ""
    return lines[0]


def test_missing_model_directory() -> None:
    assert "model directory /no/such/model does not exist" in refused("serve", "--model", "/no/such/model")


def test_model_directory_without_config(tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.json" in refused("serve", "--model", str(tmp_path))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--set", "engine.blocksize=4"], "unknown setting 'engine.blocksize'"),
        (["--set", "engine.block_size=many"], "engine.block_size"),
        (["--dp", "0"], "dp"),
        (["/no/such/config.yaml"], "cannot read config /no/such/config.yaml"),
    ],
)
def test_wrong_settings(args: list[str], words: str) -> None:
    assert words in refused("serve", *args)


def test_port_in_use(checkpoint: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = refused("serve", "--model", str(checkpoint), "--port", str(port))
        assert f"port {port} of 127.0.0.1 is in use" in line


def test_more_ranks_than_ray_can_place(checkpoint: Path) -> None:
    cores = os.cpu_count() or 1
    line = refused("serve", "--model", str(checkpoint), "--dp", str(cores + 1), "--port", "0")
    assert f"wanted {cores + 1} CPU" in line and f"of {cores} CPU" in line


def test_broken_checkpoint_names_what_is_wrong(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    process = subprocess.run(
        [sys.executable, "-m", "launcher", "serve", "--model", str(tmp_path), "--port", "0"],
        cwd=ROOT, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert process.returncode == 1
    error = [line for line in process.stderr.splitlines() if "error" in line][-1]
    assert "model.layers.2." in error and "Traceback" not in process.stderr, process.stderr


@pytest.mark.slow
def test_another_number_of_ranks_gives_the_same_tokens(checkpoint: Path, server: Server) -> None:
    """And the end of a gang that is not to be started again, though idle, is the server's."""
    prompts = [[5, 9, 40, 200, 17], list(range(30, 75)), [300 - i for i in range(90)]]
    args = ["--dp", "3", "--set", "ranks.cpus=0.5", "--set", "engine.max_num_batched_tokens=32"]
    args += ["--set", "supervision.restart=false"]
    with start(checkpoint, *args) as other:
        for prompt in prompts:
            mine = other.complete(prompt, 12, ignore_eos=True)["choices"][0]["text"]
            assert mine == server.complete(prompt, 12, ignore_eos=True)["choices"][0]["text"]
        os.kill(other.rank_pids()[0], signal.SIGKILL)
        assert other.wait(20) == 1
        assert "was killed" in other.output


def test_generate(checkpoint: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests = [{"id": i, "prompt": "capital " * (i + 1), "max_tokens": 4, "temperature": 0} for i in range(9)]
    source.write_text("\n".join(json.dumps(request) for request in requests))
    command = [sys.executable, "-m", "launcher", "generate", str(source), str(target), "--model", str(checkpoint)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == list(range(9))
    assert all(answer["finish_reason"] in ("length", "stop") for answer in answers)


def test_generate_refuses_bad_lines_before_anything_runs(checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "fine"}\n{"prompt": 7}\n')
    assert "line 2" in refused("generate", str(source), str(tmp_path / "out.jsonl"), "--model", str(checkpoint))
