"""One gang over two hosts that have two networks."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, MixtralForCausalLM

from tests.cluster.hosts import ENVIRONMENT, Host, TwoHosts, two_hosts
from tests.serve.server import wait_until

PROMPT = "the capital of"
CUT_CONFIG = """
model: {model}
dp: 4
server: {{port: 0}}
ranks: {{cpus: 0.5}}
ray: {{strategy: SPREAD, placement_timeout_s: 120}}
vote: {{control_timeout_s: 5}}
supervision: {{crash_dir: {state}/crashes}}
"""
GET = """import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"""
STREAMS = """import json, sys, threading, urllib.request
url, model, prompt = sys.argv[1:]
texts, begun = {}, threading.Barrier(7)
def follow(number):
    body = {"model": model, "prompt": f"{prompt} {number}", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    texts[number] = ""
    for line in urllib.request.urlopen(request, timeout=180):
        if line.startswith(b"data: {"):
            if not texts[number]:
                begun.wait()
            texts[number] += json.loads(line[6:])["choices"][0]["text"]
threads = [threading.Thread(target=follow, args=(number,)) for number in range(6)]
for thread in threads:
    thread.start()
begun.wait()
print("begun")
for thread in threads:
    thread.join()
print(json.dumps(texts))"""
ASK = """import sys, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=90).read().decode())"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as hosts:
        yield hosts
    assert not hosts.head.pids() and not hosts.worker.pids()


def on_both(hosts: TwoHosts, checkpoint: Path, *args: str) -> list[str]:
    """Arguments of `phalanx serve` on the head for a gang over both hosts."""
    address = ["--ray-address", hosts.ray_address, "--host", hosts.head.address]
    return ["--model", str(checkpoint), *address, "--set", "ranks.cpus=0.5", "--set", "ray.strategy=SPREAD", *args]


def failing(hosts: TwoHosts, checkpoint: Path, network: str) -> str:
    """The error of a gang of two that is told to use this network; it must not have loaded anything."""
    args = on_both(hosts, checkpoint, "--dp", "2", "--port", "0", "--verbose", "--set", f"ranks.interface={network}")
    started = hosts.run_on(hosts.head, [sys.executable, "-m", "launcher", "serve", *args], timeout_s=200)
    assert started.returncode == 1 and "loaded" not in started.stderr, started.stderr
    [error] = [line for line in started.stderr.splitlines() if "error" in line]
    return error


def greedy(model_dir: Path, prompt: str, max_tokens: int) -> str:
    """What a single process answers: Hugging Face's own model."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = torch.tensor([tokenizer.encode(prompt)])
    model = MixtralForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def job_log(hosts: TwoHosts, job: str) -> str:
    return hosts.run_on(hosts.head, ["python", "-m", "launcher", "logs", job]).stdout


def wait_log(hosts: TwoHosts, job: str, words: str, timeout_s: float) -> str:
    """The job's log, as soon as it has these words."""
    wait_until(lambda: words in job_log(hosts, job), timeout_s, f"{words!r} in the log of {job}")
    return job_log(hosts, job)


def status(hosts: TwoHosts, url: str) -> dict[str, Any]:
    asked = hosts.run_on(hosts.head, ["python", "-c", GET, f"{url}/status"])
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


def places(log: str) -> list[tuple[str, str]]:
    """Rank and node of all ranks so far, as the log has them."""
    return re.findall(r"rank (\d) \| on node (10\.77\.0\.\d) ", log)


def test_ray_job_submit_serves_one_gang_over_two_hosts(hosts: TwoHosts, checkpoint: Path) -> None:
    """Two ranks on each, and all that is between ranks goes over the network it was told to use."""
    settings = ["ranks.cpus=0.5", "ray.strategy=SPREAD", "ranks.interface=10.78.0.0/16", "server.port=0"]
    serve = [
        "python",
        "-m",
        "launcher",
        "serve",
        "configs/two-node-cpu.yaml",
        "--model",
        str(checkpoint),
        "--dp",
        "4",
        "-v",
    ]
    serve += [word for setting in settings for word in ("--set", setting)]
    options = ["--submission-id", "plain", "--no-wait", "--working-dir", "."]
    done = hosts.run_on(hosts.head, ["ray", "job", "submit", *options, "--", *serve], 120)
    assert done.returncode == 0, done.stderr
    log = wait_log(hosts, "plain", "ready  http", 200)
    assert places(log) == [("0", "10.77.0.1"), ("1", "10.77.0.1"), ("2", "10.77.0.2"), ("3", "10.77.0.2")]
    [url] = re.findall(r"^ready  (http://10\.77\.0\.1:\d+) ", log, re.MULTILINE)
    body = {"model": checkpoint.name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    asked = hosts.run_on(hosts.worker, ["python", "-c", ASK, f"{url}/v1/completions", json.dumps(body)])
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["choices"][0]["text"] == greedy(checkpoint, PROMPT, 12)
    stopped = hosts.run_on(hosts.head, ["python", "-m", "launcher", "stop", "plain"], 90)
    assert stopped.returncode == 0, stopped.stderr
    wait_until(lambda: ranks_on(hosts.head) + ranks_on(hosts.worker) == 0, 20, "all ranks have ended")


def ranks_on(host: Host) -> int:
    commands = []
    for pid in host.pids():
        with contextlib.suppress(OSError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return sum(b"RankActor" in command for command in commands)


@pytest.mark.slow
def test_a_network_without_a_way_between_hosts_is_said_before_anything_loads(hosts: TwoHosts, checkpoint: Path) -> None:
    hosts.move_address(hosts.worker, "eth2", "10.78.1.2/24")
    try:
        error = failing(hosts, checkpoint, "10.78.0.0/16")
    finally:
        hosts.move_address(hosts.worker, "eth2", f"{hosts.worker.data_address}/24")
    assert "rank 1 (node 10.77.0.2, eth2 10.78.1.2) cannot reach rank 0 at 10.78.0.1 port" in error
    assert "node 10.77.0.1 has eth1 (10.77.0.1" in error


@pytest.mark.slow
def test_a_network_that_a_host_lacks_is_named_with_those_it_has(hosts: TwoHosts, checkpoint: Path) -> None:
    error = failing(hosts, checkpoint, "10.78.0.2/32")
    assert "node 10.77.0.1: no interface for the ranks: tried one with an address in 10.78.0.2/32; there are" in error
    assert "eth1 (10.77.0.1" in error and "node 10.77.0.2:" not in error


@pytest.mark.slow
def test_phalanx_submit_and_a_host_that_is_cut_off_under_load(
    hosts: TwoHosts, checkpoint: Path, tmp_path: Path
) -> None:
    """The ranks of the host that is left go on with all requests, on twice as much of it."""
    config = tmp_path / "mine.yaml"
    config.write_text(CUT_CONFIG.format(model=checkpoint, state=tmp_path))
    submitted = hosts.run_on(hosts.head, ["python", "-m", "launcher", "submit", str(config), "--id", "ours"], 200)
    assert submitted.returncode == 0, submitted.stderr
    url = submitted.stdout.strip()
    assert re.fullmatch(r"http://10\.77\.0\.1:\d+", url)
    command = hosts.head.wrap(["python", "-u", "-c", STREAMS, url, checkpoint.name, PROMPT])
    client = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None and client.stdout.readline() == "begun\n"
        hosts.link_down()
        said, _ = client.communicate(timeout=200)
    finally:
        client.kill()
        hosts.link_up()
    texts = json.loads(said)
    assert texts == {str(n): greedy(checkpoint, f"{PROMPT} {n}", 400) for n in range(len(texts))} and len(texts) == 6
    log = job_log(hosts, "ours")
    assert re.search(r"rank 2 is out of reach: its host does not answer; rank 3 is out of reach", log), log
    now = status(hosts, url)
    assert now["suspects"] == now["inflight"] == 0, "no request puts a host out of reach"
    assert now["replicas"][0]["state"] == "serving" and now["replicas"][0]["restarts"] >= 1
    assert ranks_on(hosts.head) >= 4
