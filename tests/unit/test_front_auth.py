"""The API key and TLS: who gets in, where the key comes from, and what our own commands send."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from launcher.chat import run_chat
from launcher.client import ServerError, ask
from launcher.config import API_KEY_VARIABLE, ConfigError, ServerConfig, load_config
from launcher.front.auth import take_api_key
from launcher.http import check_tls
from tests.certificates import write_certificate
from tests.front_server import MODEL, FrontServer

KEY = "sk-0123456789"
REQUEST = {"model": MODEL, "prompt": "hi", "max_tokens": 2}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def url(certificate: tuple[Path, Path]) -> Iterator[str]:
    """A server with a key and TLS."""
    with FrontServer(1, api_key=KEY, tls=certificate) as server:
        yield server.url


@pytest.fixture(autouse=True)
def shell(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer sk-012345678", f"Bearer {KEY}9", f"Basic {KEY}", KEY, "Bearer \xe9\xe9"],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("POST", "/pause"),
        ("GET", "/debug/doctor"),
        ("GET", "/none"),
        ("GET", "/health/../pause"),
        ("GET", "//health"),
    ],
)
def test_without_the_key_nothing_is_answered(url: str, header: str | None, method: str, path: str) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    reply = httpx.request(method, url + path, headers=headers, json=REQUEST)
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
    error = reply.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert KEY not in reply.text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_key_all_is_as_ever(url: str, scheme: str) -> None:
    with httpx.Client(base_url=url, headers={"Authorization": f"{scheme} {KEY}"}, timeout=30) as client:
        assert client.post("/v1/completions", json=REQUEST).json()["usage"]["completion_tokens"] == 2
        assert client.get("/pause").json() == {"mode": "none"}
        assert client.get("/none").status_code == 404


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_monitoring_needs_no_key(url: str, path: str) -> None:
    assert httpx.get(url + path).status_code == 200


def test_our_commands_send_the_key(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ServerError, match=r"answers 401: this server wants its API key.*PHALANX_API_KEY"):
        ask("GET", url, "/pause", timeout_s=10)
    assert run_chat(url) == 2
    assert "its key goes into PHALANX_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv(API_KEY_VARIABLE, KEY + "\n")
    assert ask("GET", url + "/v1", "/pause", timeout_s=10).json() == {"mode": "none"}
    monkeypatch.setattr("launcher.chat._talk", lambda *_: None)
    assert run_chat(url) == 0


def test_a_certificate_that_is_not_trusted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
        ask("GET", url, "/health", timeout_s=10)


def test_the_key_of_the_file_wins_and_the_variable_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    monkeypatch.setenv(API_KEY_VARIABLE, "another-key")
    assert take_api_key(file) == KEY
    assert take_api_key(None) is None, "the variable is gone, so no rank inherits it"
    monkeypatch.setenv(API_KEY_VARIABLE, "another-key")
    assert take_api_key(None) == "another-key"


@pytest.mark.parametrize("text", ["", "\n", "short", "two words here", "schlüssel-lang", "a-key\nand-another"])
def test_what_is_no_key_is_refused_without_being_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    monkeypatch.setenv(API_KEY_VARIABLE, text)
    for given in (None, file):
        with pytest.raises(ConfigError, match="is no API key") as caught:
            take_api_key(given)
        assert not text.strip() or text.strip() not in str(caught.value)


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read server.api_key_file .*nokey: No such file"):
        take_api_key(tmp_path / "nokey")


def test_tls_files_are_checked_before_anything_starts(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    assert check_tls(ServerConfig()) is None
    assert check_tls(ServerConfig(tls_cert=cert, tls_key=key)) == certificate
    with pytest.raises(ConfigError, match=r"cannot read .*nothing: No such file"):
        check_tls(ServerConfig(tls_cert=cert, tls_key=tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="are no certificate with its key"):
        check_tls(ServerConfig(tls_cert=key, tls_key=cert))
    _, other = write_certificate(tmp_path / "other")
    with pytest.raises(ConfigError, match="are no certificate with its key: KEY_VALUES_MISMATCH"):
        check_tls(ServerConfig(tls_cert=cert, tls_key=other))
    locked = write_certificate(tmp_path / "locked", b"secret")
    with pytest.raises(ConfigError, match="has a passphrase"):
        check_tls(ServerConfig(tls_cert=locked[0], tls_key=locked[1]))


def test_half_of_tls_is_refused() -> None:
    with pytest.raises(ConfigError, match="setting 'server': tls_cert and tls_key go together"):
        load_config(None, ["server.tls_cert=cert.pem"])
