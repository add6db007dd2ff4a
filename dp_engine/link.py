"""A rank's socket to the router: DEALER, CURVE-encrypted with the launch's keys, msgpack messages."""

import logging
from dataclasses import dataclass, field

import msgspec
import zmq

from dp_engine.messages import MAX_MESSAGE_BYTES, LogLine, Message, ToRank, Welcome, decode_to_rank, encode


@dataclass(frozen=True)
class RankKeys:
    """What a rank needs to reach its router: CURVE keys as Z85 text, made anew for every launch.

    The pair is shared by all ranks of the launch; who holds it is one of them.
    """

    launch_id: str
    server_public: str
    client_public: str
    client_secret: str = field(repr=False)


class Link:
    """Owned by the rank's loop thread. Messages that do not parse are counted and dropped."""

    def __init__(self, endpoint: str, rank: int, keys: RankKeys) -> None:
        self.rank = rank
        self.bad_messages = 0
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"rank-%d" % rank)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the router's books
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
        socket.connect(endpoint)
        self._socket = socket

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def drain(self) -> list[ToRank]:
        """Everything that has arrived, without waiting."""
        messages: list[ToRank] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(decode_to_rank(frame))
            except msgspec.DecodeError:
                self.bad_messages += 1

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until something arrives; False after `timeout_s`."""
        return bool(self._socket.poll(None if timeout_s is None else int(timeout_s * 1000)))

    def wait_welcome(self, timeout_s: float) -> None:
        """Block until the router has answered the Hello; it sends nothing else before that. Raises TimeoutError.

        A rank votes only after that: a Welcome that found it asleep would wake it alone.
        """
        if not self.wait(timeout_s) or not isinstance(decode_to_rank(self._socket.recv()), Welcome):
            raise TimeoutError(f"the router did not welcome rank {self.rank} within {timeout_s:g} s")

    def close(self) -> None:
        self._socket.close()
        self._context.term()


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
