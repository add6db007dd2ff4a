"""A Ray cluster of several nodes on this machine."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.server import ROOT


class RayCluster:
    """Three raylets of this machine with 2 CPUs each: the head, one with 2 GPUs that are not there, and `last`."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
        common: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}
        head = {"include_dashboard": False, "_system_config": quick, "resources": {"head": 2, "slot": 100}}
        self._cluster = Cluster(initialize_head=True, head_node_args=common | head)
        self.gpu_node = self._cluster.add_node(wait=False, num_gpus=2, resources={"far": 2, "slot": 3}, **common)
        self.last = self._cluster.add_node(wait=False, **common)
        self._cluster.wait_for_nodes()
        self.address: str = self._cluster.address

    def lose(self, node: Any) -> None:
        """Kill a raylet, as a host that goes down does. One that is lost already stays so."""
        if node in self._cluster.list_all_nodes():
            self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        for node in reversed(self._cluster.list_all_nodes()):  # the head last
            self.lose(node)
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A cluster that asks for no token, whatever this user's other ones do, with this process as a driver in it."""
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    before = dict(os.environ)
    os.environ.update(environment)
    from launcher.config import RayConfig
    from launcher.ray_session import RaySession

    cluster = RayCluster()
    try:
        with RaySession(RayConfig(address=cluster.address)):
            yield cluster
    finally:
        cluster.close()
        os.environ.clear()
        os.environ.update(before)
