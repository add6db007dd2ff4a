"""The socket between router and ranks: ZMQ ROUTER, encrypted and authenticated with the launch's CURVE keys."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq
from zmq.asyncio import Context as AsyncContext
from zmq.auth.asyncio import AsyncioAuthenticator

from dp_engine.messages import MAX_MESSAGE_BYTES
from launcher.keys import LaunchKeys
from vote.observers import OnlyHolders

log = logging.getLogger(__name__)

RECEIVE_HIGH_WATER = 1 << 14
DRAIN_AT_ONCE = 256  # messages handled before other tasks of the loop get their turn


class Unroutable(Exception):
    """The peer is not connected (any more)."""


class Congested(Exception):
    """The queue to the peer is full."""


class RankLink:
    """Owns context, socket and authenticator; hands every whole message to `on_message(identity, payload)`.

    `send_high_water` bounds the messages queued for one peer. Lives on the event loop that called `start`.
    """

    def __init__(self, keys: LaunchKeys, on_message: Callable[[bytes, bytes], None], send_high_water: int) -> None:
        self._keys = keys
        self._on_message = on_message
        self._send_high_water = send_high_water
        self._context: Any = None
        self._socket: Any = None
        self._authenticator: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.endpoint = ""

    async def start(self, host: str) -> None:
        """Bind to a random port of `host`. Raises zmq.ZMQError when the address is not this machine's."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._authenticator = AsyncioAuthenticator(AsyncContext.shadow(self._context), log=log)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            domain="*", credentials_provider=OnlyHolders(self._keys.client_public)
        )
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey = self._keys.server_public.encode()
        self._socket.curve_secretkey = self._keys.server_secret.encode()
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES
        self._socket.sndhwm = self._send_high_water
        self._socket.rcvhwm = RECEIVE_HIGH_WATER
        self._socket.linger = 0
        address = host
        if ":" in host:
            self._socket.ipv6 = True
            address = f"[{host.strip('[]')}]"
        self._socket.bind(f"tcp://{address}:*")
        self.endpoint = self._socket.last_endpoint.decode()
        self._loop.add_reader(self._socket.fd, self._drain)
        self._loop.call_soon(self._drain)

    def send(self, identity: bytes, payload: bytes) -> None:
        """Queue a message for a peer. Raises Congested or Unroutable; nothing is dropped silently."""
        if self._socket is None:
            raise Unroutable("the link is closed")
        try:
            self._socket.send_multipart((identity, payload), flags=zmq.NOBLOCK)
        except zmq.Again:
            raise Congested from None
        except zmq.ZMQError as error:
            raise Unroutable(error.strerror) from None
        finally:
            self._look_again()

    def _look_again(self) -> None:
        """The socket's descriptor signals edges, and any call may swallow one: look for input after each."""
        if self._loop is not None and self._socket.events & zmq.POLLIN:
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._socket is None:
            return
        for _ in range(DRAIN_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(frames[0], frames[1] if len(frames) == 2 else b"")
            except Exception:  # a bug must cost one message, not the loop
                log.exception("message of a rank could not be handled")
            if self._socket is None:
                return
        self._look_again()

    async def close(self) -> None:
        """Close socket and context; idempotent."""
        if self._socket is None:
            return
        assert self._loop is not None
        socket, self._socket = self._socket, None
        self._loop.remove_reader(socket.fd)
        socket.close()
        self._authenticator.stop()
        await asyncio.sleep(0)  # lets the authenticator's cancelled task end before its context goes
        self._context.term()
