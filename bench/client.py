"""A closed burst of streamed requests, as light as Python allows: the machine's cores belong to the server.

While a burst runs the client only stamps and stores bytes; they are read as events when it is over.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools


@dataclass
class Exchange:
    """One request and what came back. `pieces` are body bytes with their arrival, `time.perf_counter()` seconds."""

    sent: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None


class _Connection(asyncio.Protocol):
    """Sends one request and collects its answer; `done` resolves when the answer or the connection ends."""

    def __init__(self, request: bytes) -> None:
        self.exchange = Exchange()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self.exchange.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"the answer is not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        self.exchange.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        self.exchange.status = self._parser.get_status_code()
        self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"the connection was lost: {exc or 'closed by the server'}")

    def _finish(self, error: str | None) -> None:
        if not self.done.done():
            self.exchange.error = error
            self.done.set_result(None)
            self._transport.close()


async def burst(url: str, bodies: Sequence[bytes], timeout_s: float) -> list[Exchange]:
    """POST all bodies to `url` at once, one connection each, and wait for the last. Failures are in the exchanges."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    loop = asyncio.get_running_loop()

    async def one(body: bytes) -> Exchange:
        head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        try:
            _, connection = await loop.create_connection(lambda: _Connection(head.encode() + body), host, port)
        except OSError as error:
            return Exchange(error=f"cannot connect to {host}:{port}: {error.strerror or error}")
        try:
            await asyncio.wait_for(connection.done, timeout_s)
        except TimeoutError:
            connection.exchange.error = f"no complete answer within {timeout_s:.0f} s"
            connection._transport.abort()
        return connection.exchange

    return list(await asyncio.gather(*(one(body) for body in bodies)))
