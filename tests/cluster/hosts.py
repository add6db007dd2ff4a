"""Two hosts on one machine: network namespaces with two networks between them, and a real Ray cluster over one."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.serve.server import ROOT

BIN = Path(sys.executable).parent
PORT = 6379
JOBS = "http://127.0.0.1:8265"  # on the head
HEALTH = {"initial_delay_ms": 0, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
# A cluster of its own, whatever this user's other ones are like; its nodes have the requirements on their path.
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_API_SERVER_ADDRESS": JOBS,
    "PYTHONPATH": str(ROOT),
    "PATH": f"{BIN}:{os.environ['PATH']}",
}
# Ray's defaults take a minute to notice that a host has gone.
QUICK = json.dumps({f"health_check_{name}": value for name, value in HEALTH.items()})
_START_S = 120.0
_STOP_S = 20.0


@dataclass(frozen=True)
class Host:
    """A namespace. `address`: on the network that Ray uses; `data_address`: on the second one."""

    namespace: str
    address: str
    data_address: str

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command as it has to be called to run on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def pids(self) -> list[int]:
        """All processes on this host."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]


class TwoHosts:
    """`head` and `worker`, joined by eth1 (10.77.0.0/24, Ray's) and eth2 (10.78.0.0/24)."""

    def __init__(self, name: str, folder: Path) -> None:
        self.head = Host(f"{name}-a", "10.77.0.1", "10.78.0.1")
        self.worker = Host(f"{name}-b", "10.77.0.2", "10.78.0.2")
        self._folder = folder

    @property
    def ray_address(self) -> str:
        return f"{self.head.address}:{PORT}"

    def run_on(self, host: Host, command: Sequence[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command to its end, from the checkout's root."""
        return subprocess.run(
            host.wrap(command), cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def link_down(self, interface: str = "eth1") -> None:
        """Cut a network: nothing gets through, and nobody is told."""
        _ip("-n", self.worker.namespace, "link", "set", interface, "down")

    def link_up(self, interface: str = "eth1") -> None:
        _ip("-n", self.worker.namespace, "link", "set", interface, "up")

    def move_address(self, host: Host, interface: str, address: str) -> None:
        """Give an interface this address (with the prefix's length) instead of the one it has."""
        _ip("-n", host.namespace, "addr", "flush", "dev", interface)
        _ip("-n", host.namespace, "addr", "add", address, "dev", interface)

    def start_network(self) -> None:
        for host in (self.head, self.worker):
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        for interface in ("eth1", "eth2"):
            _ip(
                "link", "add", interface, "netns", self.head.namespace, "type", "veth",
                "peer", "name", interface, "netns", self.worker.namespace,
            )  # fmt: skip
        for host in (self.head, self.worker):
            for interface, address in (("eth1", host.address), ("eth2", host.data_address)):
                _ip("-n", host.namespace, "addr", "add", f"{address}/24", "dev", interface)
                _ip("-n", host.namespace, "link", "set", interface, "up")

    def start_ray(self, cpus: int) -> None:
        """A head and a node with `cpus` each."""
        self._start_node(self.head, "--head", "--port", str(PORT), "--system-config", QUICK, cpus=cpus)
        self._start_node(self.worker, "--address", self.ray_address, cpus=cpus)

    def _start_node(self, host: Host, *args: str, cpus: int) -> None:
        command = [
            "ray", "start", *args, "--node-ip-address", host.address, "--num-cpus", str(cpus),
            "--object-store-memory", str(80 << 20), "--disable-usage-stats",
            "--temp-dir", str(self._folder / host.namespace[-1]),
        ]  # fmt: skip
        started = self.run_on(host, command, _START_S)
        assert started.returncode == 0, started.stdout + started.stderr

    def stop(self) -> None:
        """End all processes on both hosts and remove the hosts."""
        deadline = time.monotonic() + _STOP_S
        for host in (self.head, self.worker):
            while (pids := host.pids()) and time.monotonic() < deadline:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.1)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def two_hosts(*, cpus: int = 2) -> Iterator[TwoHosts]:
    """Hosts with a running Ray cluster; leaves no process, namespace or folder. Skips where there may be none."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and the `ip` command")
    folder = Path(tempfile.mkdtemp(prefix="px", dir="/tmp"))  # short: sockets' paths are limited
    hosts = TwoHosts(folder.name, folder)
    try:
        try:
            hosts.start_network()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not to be had here: {error.stderr.strip()}")
        hosts.start_ray(cpus)
        yield hosts
    finally:
        hosts.stop()


def _ip(*args: Any) -> None:
    subprocess.run(["ip", *args], capture_output=True, text=True, check=True)
