"""A connection to Ray: a local one started for this launch, or a running cluster. Ray's own noise stays away."""

import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from launcher.config import ConfigError, RayConfig

# Before ray is imported, and inherited by what it starts.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # Ray starts its workers at 15; a rank that is put off holds up all others
}
_OBJECT_STORE_BYTES = 80 << 20  # Ray's least; only the ranks' specs and errors go through it


class RaySession:
    """Context manager. `local` tells whether Ray was started by, and ends with, this process."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self.local = config.address is None
        self._ray: Any = None

    def __enter__(self) -> Self:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self._config.address is not None:
            _choose_authentication(self._config.address)
        import ray

        self._ray = ray
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "phalanx"}
        if self.local:
            os.environ.pop("RAY_ADDRESS", None)  # "start a local one" means it, whatever the shell says
            options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES, "address": "local"}
        else:
            options["address"] = self._config.address
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


def _choose_authentication(address: str) -> None:
    """Use the token of this user if the cluster at an explicit address wants one; must come before ray is imported.

    Ray itself neither finds that out nor forgives a token where none is wanted. Raises ConfigError when there is none.
    """
    if "RAY_AUTH_MODE" in os.environ or not _wants_token(address):
        return
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not given and not (Path.home() / ".ray" / "auth_token").exists():
        raise ConfigError(
            f"the Ray cluster at {address} wants an authentication token: put the cluster's token into "
            "~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    os.environ["RAY_AUTH_MODE"] = "token"


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
