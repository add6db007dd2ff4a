"""All observers of a gang, from the side of those who ask: ranks whose collective failed, and the launcher."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import zmq

from vote.recorder import Recorder
from vote.report import LOOKED_AT, Report, Sighting
from vote.settings import wait_for_keys

if TYPE_CHECKING:
    from torch.distributed import Store  # torch itself has no business in an observer

LOOK_S = 2.0  # an observer has nothing else to do: one that is silent for so long is gone, or its host is
STACK_S = 6.0  # more, where it has to get a stack
REPORT_S = 12.0  # to look at all ranks, more than once if need be, and to get stacks
_ROOT = Path(__file__).resolve().parents[1]


class Look(msgspec.Struct, frozen=True, tag=True):
    """What does your rank do? Answered by a Sighting with the `last` entries of each ring, with a stack on request, and
    with the last `stderr` bytes that it has written to its stderr, if that is a file."""

    last: int
    stack: bool
    stderr: int = 0


class Compose(msgspec.Struct, frozen=True, tag=True):
    """What has happened to the gang? Answered by the Report, composed once, whoever asks how often."""

    mismatch: bool


Request: TypeAlias = Look | Compose

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_sighting = msgspec.msgpack.Decoder(Sighting).decode
_decode_report = msgspec.msgpack.Decoder(Report).decode


@dataclass(frozen=True)
class ObserverKeys:
    """One CURVE key pair as Z85 text, for observers and for whoever asks them: all hold the launch's secret."""

    public: str
    secret: str = field(repr=False)


class OnlyHolders:
    """Credentials provider that admits who holds this CURVE key (Z85 text), and nobody else."""

    def __init__(self, public: str) -> None:
        self._key = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return key == self._key


class Observers:
    """Asks. `addresses`: of the ranks' observers. Blocking calls, from any thread; nothing stays open between them."""

    def __init__(self, addresses: Mapping[int, str], keys: ObserverKeys) -> None:
        self.addresses = dict(addresses)
        self._keys = keys

    def look(self, last: int = LOOKED_AT, *, stack: bool = False, stderr: int = 0) -> dict[int, Sighting | None]:
        """Every rank as seen from outside; None for one whose observer does not answer."""
        answers = self._ask(self.addresses, Look(last, stack, stderr), STACK_S if stack else LOOK_S)
        return {rank: None if answer is None else _decode_sighting(answer) for rank, answer in answers.items()}

    def look_at(self, rank: int, *, stack: bool) -> Sighting | None:
        """One rank as seen from outside."""
        return Observers({rank: self.addresses[rank]}, self._keys).look(stack=stack)[rank]

    def report(self, *, mismatch: bool) -> Report | None:
        """The one report of the gang's end: the first observer that answers composes it for all. None: none answers."""
        there = self.look(last=1)
        for rank in sorted(rank for rank, sighting in there.items() if sighting is not None):
            answer = self._ask({rank: self.addresses[rank]}, Compose(mismatch), REPORT_S)[rank]
            if answer is not None:
                return _decode_report(answer)
        return None

    def _ask(self, addresses: Mapping[int, str], request: Request, timeout_s: float) -> dict[int, bytes | None]:
        answers: dict[int, bytes | None] = dict.fromkeys(addresses)
        context = zmq.Context()
        poller = zmq.Poller()
        sockets = {self._connect(context, address): rank for rank, address in addresses.items()}
        try:
            for socket in sockets:
                socket.send(encode(request))
                poller.register(socket, zmq.POLLIN)
            deadline = time.monotonic() + timeout_s
            while None in answers.values() and (left := deadline - time.monotonic()) > 0:
                for socket, _ in poller.poll(int(left * 1000) + 1):
                    answers[sockets[socket]] = socket.recv()
                    poller.unregister(socket)
        finally:
            for socket in sockets:
                socket.close(linger=0)
            context.term()
        return answers

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.curve_serverkey = socket.curve_publickey = self._keys.public.encode()
        socket.curve_secretkey = self._keys.secret.encode()
        socket.connect(address)
        return socket


class ObserverProcess:
    """Started and held by its rank. It notices the rank's end by the end of a pipe, and stays a little longer."""

    def __init__(self, recorder: Recorder, host: str, keys: ObserverKeys) -> None:
        """`host`: the address to listen on, this rank's own."""
        assert recorder.fd is not None, "an observer reads shared memory"
        start = {"fd": recorder.fd, "host": host, "public": keys.public, "secret": keys.secret}
        self._address = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vote.observer"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[recorder.fd],
            start_new_session=True,  # a Ctrl-C of the terminal is not for it
            text=True,
        )
        _let_trace(self._process.pid)
        self._tell(start)

    @property
    def address(self) -> str:
        """Where it listens; waits until it does. Raises RuntimeError if it could not start."""
        if not self._address:
            assert self._process.stdout is not None
            self._address = self._process.stdout.readline().strip()
            if not self._address:
                raise RuntimeError(f"the rank's observer did not start (exit code {self._process.wait()})")
        return self._address

    def introduce(self, addresses: Mapping[int, str]) -> None:
        """Tell it of all observers of the gang, itself included."""
        self._tell({"addresses": {str(rank): address for rank, address in addresses.items()}})

    def close(self) -> None:
        """The rank ends in order: nothing will be asked any more. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.terminate()
            self._process.stdin.close()
            self._process.wait()

    def _tell(self, message: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()


def gather_observers(
    process: ObserverProcess, store: "Store | None", rank: int, size: int, keys: ObserverKeys, timeout_s: float
) -> Observers:
    """Make the gang's observers known to each other and to this rank. Raises RanksMissing."""
    addresses = {rank: process.address}
    if store is not None:
        names = {other: f"observer/{other}" for other in range(size)}
        store.set(names[rank], process.address)
        wait_for_keys(store, names, timeout_s, "the exchange of observers")
        addresses = {other: store.get(name).decode() for other, name in names.items()}
    process.introduce(addresses)
    return Observers(addresses, keys)


def _let_trace(pid: int) -> None:
    """Where only ancestors may read a process's stack (Yama), let the observer do so too."""
    import ctypes

    set_ptracer = 0x59616D61
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(set_ptracer, pid, 0, 0, 0)
