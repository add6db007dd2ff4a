"""The HTTP server around the front: a socket that is bound before anything else starts, and an orderly end."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from launcher.config import ConfigError, DeploymentConfig, ServerConfig
from launcher.ray_session import node_address

BACKLOG = 2048
GRACE_S = 3
LOOPBACKS = ("127.0.0.1", "::1")
WILDCARDS = ("0.0.0.0", "::")


def bind_http(host: str, port: int) -> socket.socket:
    """Bind and listen; port 0 picks a free one. Raises ConfigError in one line."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use; choose another with --port, 0 for any") from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock


def server_url(sock: socket.socket, config: DeploymentConfig) -> str:
    """The server's URL for people: a socket on all interfaces is shown with this node's address."""
    host, port = sock.getsockname()[:2]
    host = node_address(config.ray) if host in WILDCARDS else host
    return f"http{'s' if config.server.tls_cert else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def check_tls(config: ServerConfig) -> tuple[Path, Path] | None:
    """Certificate and key, which can be used, if there are any. Raises ConfigError, before anything is started."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    for path in (config.tls_cert, config.tls_key):
        _require_readable(path)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_passphrase)
    except ssl.SSLError as error:
        what = f"server.tls_cert {config.tls_cert} and server.tls_key {config.tls_key}"
        raise ConfigError(f"{what} are no certificate with its key: {error.reason or error}") from None
    return config.tls_cert, config.tls_key


def _require_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _no_passphrase() -> str:
    """OpenSSL asks for it; without this it would ask at the terminal."""
    raise ConfigError("server.tls_key has a passphrase: give a key without one, in a file that only you can read")


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the supervisor's."""
        yield


async def serve_http(
    app: ASGIApp, sock: socket.socket, stop: asyncio.Event, tls: tuple[Path, Path] | None = None
) -> None:
    """Serve on a socket of `bind_http` until `stop` is set; then finish what is in progress, for 3 seconds at most.

    Takes the socket over. `tls`: certificate chain and key, after `check_tls`. Being cancelled ends it as `stop` does.
    """
    cert, key = tls or (None, None)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="critical",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=cert,
        ssl_keyfile=key,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await serving
