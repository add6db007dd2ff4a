"""A rank's socket to the router: DEALER, CURVE-encrypted with the launch's keys, counted msgpack messages."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from dp_engine.messages import MAX_MESSAGE_BYTES, Direction, LogLine, Message, ToRank, Welcome, decode_to_rank, encode
from dp_engine.numbering import Reception, numbered

SILENCE_S = 60.0
SILENT_VOTES = 2.0  # a router, or a rank, may be silent for as long as so many votes may take


@dataclass(frozen=True)
class RankKeys:
    """What a rank needs to reach its router: CURVE keys as Z85 text, made anew for every launch.

    The pair is shared by all ranks of the launch; who holds it is one of them.
    """

    launch_id: str
    server_public: str
    client_public: str
    client_secret: str = field(repr=False)


class RouterLost(Exception):
    """There is no router any more: nothing outlives it."""


def notice_silence(socket: Any, silence_s: float) -> None:
    """Ask the other end for a sign of life where none comes by itself; after `silence_s` without one the connection is
    closed. ZMQ's own thread does so, however busy or asleep its process is."""
    every_ms = max(int(silence_s * 250), 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, every_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * every_ms)


class Link:
    """Owned by the rank's loop thread. Messages that do not parse are counted and dropped.

    A connection ends once, and the link with it: ZMQ makes a new one by itself, but what was under way is lost.
    """

    def __init__(self, endpoint: str, rank: int, keys: RankKeys, silence_s: float = SILENCE_S) -> None:
        """`silence_s`: a router that gives no sign of life for so long is gone."""
        self.rank = rank
        self.bad_messages = 0
        self._silence_s = silence_s
        self._connected = False
        self._sent = 0
        self._received = Reception()
        self._inbox: list[bytes] = []
        self._to_lose: dict[Direction, int] = {"to_router": 0, "to_rank": 0}
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"rank-%d" % rank)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the router's books
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 1000)
        notice_silence(socket, silence_s)
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
        self._monitor: Any = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(endpoint)
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def send(self, message: Message) -> None:
        frame = numbered(self._sent, encode(message))
        self._sent += 1
        if not self._loses("to_router"):
            self._socket.send(frame)

    def drain(self) -> list[ToRank]:
        """Everything that has arrived, without waiting. Raises MessagesLost, RouterLost."""
        self._receive()
        payloads, self._inbox = self._inbox, []
        messages: list[ToRank] = []
        for payload in payloads:
            try:
                messages.append(decode_to_rank(payload))
            except msgspec.DecodeError:
                self.bad_messages += 1
        return messages

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until something arrives; False after `timeout_s`. Raises MessagesLost, RouterLost."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._receive()
        while not self._inbox:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            self._poller.poll(None if left_s is None else int(left_s * 1000) + 1)
            self._receive()
        return True

    def wait_welcome(self, timeout_s: float) -> None:
        """Block until the router has answered the Hello; it sends nothing else before that. Raises TimeoutError.

        A rank votes only after that: a Welcome that found it asleep would wake it alone.
        """
        if not self.wait(timeout_s) or not isinstance(decode_to_rank(self._inbox.pop(0)), Welcome):
            raise TimeoutError(f"the router did not welcome rank {self.rank} within {timeout_s:g} s")

    def lose(self, direction: Direction, messages: int) -> None:
        """The next messages are lost on the way, after they were counted: for tests and drills."""
        self._to_lose[direction] += messages

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _receive(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if not self._loses("to_rank"):
                self._inbox.append(self._received.payload(frame))
        self._check_connection()

    def _loses(self, direction: Direction) -> bool:
        losing = self._to_lose[direction] > 0
        self._to_lose[direction] -= losing
        return losing

    def _check_connection(self) -> None:
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif self._connected:
                raise RouterLost(
                    f"rank {self.rank} has no router any more: its connection was closed, or nothing was heard of it "
                    f"for {self._silence_s:g} s"
                )


class LinkHandler(logging.Handler):
    """Sends log records to the launcher's terminal. Loggers are used by the loop thread only, as sockets must be."""

    def __init__(self, link: Link) -> None:
        super().__init__(logging.INFO)
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._link.send(LogLine(self._link.rank, record.levelno, self.format(record)))
        except zmq.ZMQError:
            self.handleError(record)
