"""A connection to Ray: a local one started for this launch, or a running cluster. Ray's own noise stays away."""

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from launcher.config import ConfigError, DeploymentConfig, RayConfig
from launcher.ray_token import use_token

_NICENESS = "RAY_worker_niceness"  # Ray starts its workers at 15; a rank that is put off holds up all others
# Before ray is imported, and inherited by what it starts.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    _NICENESS: "0",
}
_OBJECT_STORE_BYTES = 80 << 20  # Ray's least; only the ranks' specs and errors go through it
_JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets a variable of this name for the entrypoint of a job
LOOPBACK = "127.0.0.1"


class RaySession:
    """Context manager. `local` tells whether Ray was started by, and ends with, this process."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self.local = config.address is None
        self._ray: Any = None

    def __enter__(self) -> Self:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "phalanx"}
        if self._config.address is None:
            os.environ.pop("RAY_ADDRESS", None)  # "start a local one" means it, whatever the shell says
            options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES, "address": "local"}
        else:
            options["address"] = address = cluster_address(self._config.address)
            options["runtime_env"] = {"env_vars": {_NICENESS: "0"}}  # no conflict: Ray drops a job's own value
            use_token(f"the Ray cluster at {address}", lambda: _wants_token(address))
        import ray

        self._ray = ray
        try:
            ray.init(**options)
        except Exception as error:  # Ray raises bare ones too
            what = "start a local Ray" if self.local else f"join the Ray cluster at {self._config.address}"
            raise ConfigError(f"cannot {what}: {' '.join(str(error).split())[:400]}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.shutdown()

    def session_dir(self) -> str:
        """Ray's folder of this session on this node: logs and sockets."""
        return self._ray._private.worker.global_worker.node.get_session_dir_path()

    def node_id(self) -> str:
        """Of the node this process is on."""
        return self._ray.get_runtime_context().get_node_id()

    def node_ip(self) -> str:
        """This node's address as the cluster knows it."""
        return self._ray.util.get_node_ip_address()


def join_own_cluster(config: DeploymentConfig, environ: Mapping[str, str] = os.environ) -> DeploymentConfig:
    """Inside a Ray job the ranks belong on the job's cluster, unless the configuration names another."""
    address = environ.get("RAY_ADDRESS")
    if config.ray.address is not None or not address or _JOB_MARK not in environ:
        return config
    return config.model_copy(update={"ray": config.ray.model_copy(update={"address": address})})


def cluster_address(address: str) -> str:
    """`auto` resolved as Ray does it: RAY_ADDRESS, else the cluster whose node runs on this machine.

    Raises ConfigError when there is none.
    """
    if address != "auto":
        return address
    if given := os.environ.get("RAY_ADDRESS"):
        return given
    try:
        return (Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        raise ConfigError(
            "ray.address is auto, but no Ray node runs on this machine: start one with `ray start`, or give its address"
        ) from None


def node_address(config: RayConfig) -> str:
    """Where this process can be reached: loopback with a local Ray, else this machine's address towards the cluster.

    Known before Ray is joined, from the route to the cluster's head. Raises ConfigError.
    """
    if config.address is None:
        return LOOPBACK
    address = cluster_address(config.address)
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # nothing is sent
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        raise ConfigError(f"no way to the Ray cluster at {address!r}: give its head as HOST:PORT") from None


def _wants_token(address: str) -> bool:
    """One call that any cluster answers, without a token; what else may be wrong is left for `ray.init` to say."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            ask(b"", timeout=5)
        except grpc.RpcError as error:
            return error.code() == grpc.StatusCode.UNAUTHENTICATED
    return False
