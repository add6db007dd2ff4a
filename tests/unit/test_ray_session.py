"""Which cluster is joined, with which authentication, and where this process can be reached from it."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from launcher import ray_session, ray_token
from launcher.config import ConfigError, RayConfig, load_config
from launcher.ray_session import cluster_address, join_own_cluster, node_address
from launcher.ray_token import use_token

JOB = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "x")  # so that what is set here is undone
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(ray_token.Path, "home", lambda: tmp_path)
    return tmp_path


def write_token(home: Path) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("secret")


def test_no_token_where_none_is_wanted(home: Path) -> None:
    write_token(home)
    use_token("it", lambda: False)
    assert "RAY_AUTH_MODE" not in os.environ


def test_the_users_token_where_one_is_wanted(home: Path) -> None:
    write_token(home)
    use_token("it", lambda: True)
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_missing_token_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="the cluster at X wants an authentication token"):
        use_token("the cluster at X", lambda: True)


def test_an_explicit_mode_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    use_token("it", lambda: True)
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


@pytest.mark.parametrize(
    ("code", "wanted"), [(grpc.StatusCode.UNAUTHENTICATED, True), (grpc.StatusCode.UNIMPLEMENTED, False), (None, False)]
)
def test_a_cluster_is_asked(code: grpc.StatusCode | None, wanted: bool) -> None:
    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        return b"" if code is None else context.abort(code, "no")

    class Gcs(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            assert details.method == "/ray.rpc.NodeInfoGcsService/GetClusterId"
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Gcs()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert ray_session._wants_token(f"127.0.0.1:{port}") is wanted
    finally:
        server.stop(0)


def test_a_job_joins_its_own_cluster() -> None:
    assert join_own_cluster(load_config(None), JOB).ray.address == "10.0.0.1:6379"


@pytest.mark.parametrize("environ", [{}, {"RAY_ADDRESS": "10.0.0.1:6379"}, JOB | {"RAY_ADDRESS": ""}])
def test_outside_a_job_a_local_ray_is_started_whatever_the_shell_says(environ: dict[str, str]) -> None:
    assert join_own_cluster(load_config(None), environ).ray.address is None


def test_a_cluster_that_is_named_wins_over_the_jobs() -> None:
    config = load_config(None, ray__address="10.9.9.9:1")
    assert join_own_cluster(config, JOB) is config


def test_auto_is_what_ray_means_by_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(ConfigError, match="no Ray node runs on this machine"):
        cluster_address("auto")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.2:6379\n")
    assert cluster_address("auto") == "10.0.0.2:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.3:6379")
    assert cluster_address("auto") == "10.0.0.3:6379"
    assert cluster_address("10.0.0.4:1") == "10.0.0.4:1"


def test_the_servers_address_is_loopback_or_the_one_towards_the_cluster() -> None:
    assert node_address(RayConfig()) == "127.0.0.1"
    assert node_address(RayConfig(address="127.0.0.1:6379")) == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 6379))
        except OSError:
            pytest.skip("this machine has no route to other networks")
        mine = probe.getsockname()[0]
    assert mine != "127.0.0.1"
    assert node_address(RayConfig(address="198.51.100.1:6379")) == mine
    assert node_address(RayConfig(address=f"{mine}:6379")) == mine, "on the head itself"


@pytest.mark.parametrize("address", ["nonsense", "host.invalid:6379", "10.0.0.1:port"])
def test_an_address_that_leads_nowhere(address: str) -> None:
    with pytest.raises(ConfigError, match="give its head as HOST:PORT"):
        node_address(RayConfig(address=address))
