"""The socket between router and ranks: ZMQ ROUTER, encrypted and authenticated with the launch's CURVE keys."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq
from zmq.asyncio import Context as AsyncContext
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from dp_engine.link import SILENCE_S, notice_silence
from dp_engine.messages import MAX_MESSAGE_BYTES
from dp_engine.numbering import MessagesLost, Reception, numbered
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

    `on_broken(identity, reason)`: messages of a peer were lost, or its connection has ended, after all it had said was
    handed on. `send_high_water` bounds the messages queued for one peer. A peer that gives no sign of life for
    `silence_s` is gone. Lives on the event loop that called `start`.
    """

    def __init__(
        self,
        keys: LaunchKeys,
        on_message: Callable[[bytes, bytes], None],
        send_high_water: int,
        *,
        on_broken: Callable[[bytes, str], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        self._keys = keys
        self._on_message = on_message
        self._on_broken = on_broken
        self._send_high_water = send_high_water
        self._silence_s = silence_s
        self._sent: dict[bytes, int] = {}
        self._receptions: dict[bytes, Reception] = {}
        self._peers: dict[int, bytes] = {}  # by file descriptor of their connection
        self._closed: list[int] = []  # descriptors of connections that have ended, unheeded yet
        self._context: Any = None
        self._socket: Any = None
        self._monitor: Any = None
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
        notice_silence(self._socket, self._silence_s)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        address = host
        if ":" in host:
            self._socket.ipv6 = True
            address = f"[{host.strip('[]')}]"
        self._socket.bind(f"tcp://{address}:*")
        self.endpoint = self._socket.last_endpoint.decode()
        self._loop.add_reader(self._socket.fd, self._drain)
        self._loop.add_reader(self._monitor.fd, self._drain)
        self._loop.call_soon(self._drain)

    def send(self, identity: bytes, payload: bytes) -> None:
        """Queue a message for a peer. Raises Congested or Unroutable; nothing is dropped silently."""
        if self._socket is None:
            raise Unroutable("the link is closed")
        number = self._sent.get(identity, 0)
        try:
            self._socket.send_multipart((identity, numbered(number, payload)), flags=zmq.NOBLOCK)
        except zmq.Again:
            raise Congested from None
        except zmq.ZMQError as error:
            raise Unroutable(error.strerror) from None
        else:
            self._sent[identity] = number + 1
        finally:
            self._look_again()

    def _look_again(self) -> None:
        """The socket's descriptor signals edges, and any call may swallow one: look for input after each."""
        if self._loop is not None and self._socket.events & zmq.POLLIN:
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._socket is None:
            return
        self._note_closed()  # before the last look for messages: what a peer said before its end is heard first
        for _ in range(DRAIN_AT_ONCE):
            try:
                identity = self._socket.recv(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._heed_closed()
                return
            frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            self._peers[int(identity.get(zmq.SRCFD))] = identity.bytes
            self._hand_on(identity.bytes, frames[0] if len(frames) == 1 else b"")
            if self._socket is None:
                return
        self._look_again()

    def _hand_on(self, identity: bytes, frame: bytes) -> None:
        reception = self._receptions.setdefault(identity, Reception())
        try:
            payload = reception.payload(frame)
        except MessagesLost as error:
            self._call(self._on_broken, identity, str(error))
        else:
            self._call(self._on_message, identity, payload)

    def _note_closed(self) -> None:
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            self._closed.append(int(recv_monitor_message(self._monitor)["value"]))

    def _heed_closed(self) -> None:
        closed, self._closed = self._closed, []
        for descriptor in closed:
            if (identity := self._peers.pop(descriptor, None)) is not None:
                reason = f"its connection was closed, or nothing was heard of it for {self._silence_s:g} s"
                self._call(self._on_broken, identity, reason)

    def _call(self, heed: Callable[..., None], identity: bytes, what: bytes | str) -> None:
        try:
            heed(identity, what)
        except Exception:  # a bug must cost one message, not the loop
            log.exception("message of a rank could not be handled")

    async def close(self) -> None:
        """Close socket and context; idempotent."""
        if self._socket is None:
            return
        assert self._loop is not None
        socket, self._socket = self._socket, None
        self._loop.remove_reader(socket.fd)
        self._loop.remove_reader(self._monitor.fd)
        socket.disable_monitor()
        self._monitor.close()
        socket.close()
        self._authenticator.stop()
        try:
            await asyncio.sleep(0)  # lets the authenticator's cancelled task end before its context goes
        finally:
            self._context.term()
