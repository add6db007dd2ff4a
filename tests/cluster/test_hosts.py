"""One gang over two hosts that have two networks."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, MixtralForCausalLM

from tests.cluster.hosts import ENVIRONMENT, TwoHosts, two_hosts
from tests.serve.server import Server

PROMPT = "the capital of"
ASK = """import sys, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=90).read().decode())"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as hosts:
        yield hosts
    assert not hosts.head.pids() and not hosts.worker.pids()


def on_both(hosts: TwoHosts, tiny: Path, *args: str) -> list[str]:
    """Arguments of `phalanx serve` on the head for a gang over both hosts."""
    address = ["--ray-address", hosts.ray_address, "--host", hosts.head.address]
    return ["--model", str(tiny), *address, "--set", "ranks.cpus=0.5", "--set", "ray.strategy=SPREAD", *args]


def failing(hosts: TwoHosts, tiny: Path, network: str) -> str:
    """The error of a gang of two that is told to use this network; it must not have loaded anything."""
    args = on_both(hosts, tiny, "--dp", "2", "--port", "0", "--verbose", "--set", f"ranks.interface={network}")
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


def test_a_gang_over_two_hosts_answers_as_one(hosts: TwoHosts, tiny: Path) -> None:
    """Two ranks on each, and all that is between ranks goes over the network it was told to use."""
    args = on_both(hosts, tiny, "--dp", "4", "--set", "ranks.interface=10.78.0.0/16", "--verbose")
    with Server(*args, prefix=hosts.head.wrap([]), env=ENVIRONMENT, timeout_s=200) as server:
        nodes = re.findall(r"rank (\d) \| on node (10\.77\.0\.\d) ", server.output)
        assert nodes == [("0", "10.77.0.1"), ("1", "10.77.0.1"), ("2", "10.77.0.2"), ("3", "10.77.0.2")]
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        ask = [sys.executable, "-c", ASK, f"{server.url}/v1/completions", json.dumps(body)]
        asked = hosts.run_on(hosts.worker, ask)
        assert asked.returncode == 0, asked.stderr
        assert json.loads(asked.stdout)["choices"][0]["text"] == greedy(tiny, PROMPT, 12)
        pids = {int(pid) for pid in re.findall(r"rank \d \| on node \S+ \S+ pid (\d+)", server.output)}
        assert len(pids) == 4 and pids <= set(hosts.head.pids()) | set(hosts.worker.pids())


def test_a_network_without_a_way_between_hosts_is_said_before_anything_loads(hosts: TwoHosts, tiny: Path) -> None:
    hosts.move_address(hosts.worker, "eth2", "10.78.1.2/24")
    try:
        error = failing(hosts, tiny, "10.78.0.0/16")
    finally:
        hosts.move_address(hosts.worker, "eth2", f"{hosts.worker.data_address}/24")
    assert "rank 1 (node 10.77.0.2, eth2 10.78.1.2) cannot reach rank 0 at 10.78.0.1 port" in error
    assert "node 10.77.0.1 has eth1 (10.77.0.1" in error


def test_a_network_that_a_host_lacks_is_named_with_those_it_has(hosts: TwoHosts, tiny: Path) -> None:
    error = failing(hosts, tiny, "10.78.0.2/32")
    assert "node 10.77.0.1: no interface for the ranks: tried one with an address in 10.78.0.2/32; there are" in error
    assert "eth1 (10.77.0.1" in error and "node 10.77.0.2:" not in error
