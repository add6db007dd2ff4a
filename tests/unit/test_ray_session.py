"""Which authentication is used towards a running Ray cluster."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from launcher import ray_session
from launcher.config import ConfigError


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "x")  # so that what is set here is undone
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(ray_session.Path, "home", lambda: tmp_path)
    return tmp_path


def cluster(monkeypatch: pytest.MonkeyPatch, wants_token: bool) -> None:
    monkeypatch.setattr(ray_session, "_wants_token", lambda address: wants_token)


def test_no_token_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    cluster(monkeypatch, wants_token=False)
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("secret")
    ray_session._choose_authentication("127.0.0.1:1")
    assert "RAY_AUTH_MODE" not in ray_session.os.environ


def test_the_users_token_where_one_is_wanted(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    cluster(monkeypatch, wants_token=True)
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("secret")
    ray_session._choose_authentication("127.0.0.1:1")
    assert ray_session.os.environ["RAY_AUTH_MODE"] == "token"


def test_a_missing_token_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, wants_token=True)
    with pytest.raises(ConfigError, match="wants an authentication token"):
        ray_session._choose_authentication("127.0.0.1:1")


def test_an_explicit_mode_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, wants_token=True)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_session._choose_authentication("127.0.0.1:1")
    assert ray_session.os.environ["RAY_AUTH_MODE"] == "disabled"


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
