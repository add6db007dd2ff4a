"""The process beside a rank that can be asked about it while it hangs, is stopped, or is dead.

Started by `vote.observers.ObserverProcess`, which says on stdin, as lines of JSON, where the recorder is and, later,
who the other observers are; the first line on stdout is the address that it listens on. It reads the rank's memory and
asks the kernel; the rank itself has no part in it. When stdin ends the rank is gone; it can be asked for some seconds
more.
"""

import asyncio
import json
import logging
import mmap
import os
import shutil
import socket as sockets
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from vote.observers import Compose, Look, ObserverKeys, Observers, OnlyHolders, decode_request, encode
from vote.recorder import MEMORY_BYTES, Recording
from vote.report import Report, Sighting, compose, culprits, sight

LINGER_S = 8.0  # after the rank's end
GRACE_S = 1.5  # for a rank that seems to hang to do something after all
STACK_S = 5.0
STACK_LINES = 60
MAX_REQUEST_BYTES = 1 << 12
MAX_STDERR_BYTES = 1 << 18
NONE = "(no stack: {})"


class Observer:
    """Owns the map of the rank's memory and the report, once there is one."""

    def __init__(self, fd: int, keys: ObserverKeys) -> None:
        self._memory = mmap.mmap(fd, MEMORY_BYTES, access=mmap.ACCESS_READ)
        self._keys = keys
        self._pid = Recording.read(self._memory).pid
        self._born = _born(self._pid)
        self._report: asyncio.Task[Report] | None = None
        self.peers: Observers | None = None

    def introduce(self, addresses: dict[str, str]) -> None:
        self.peers = Observers({int(rank): address for rank, address in addresses.items()}, self._keys)

    async def answer(self, request: Look | Compose) -> Sighting | Report | None:
        """None: nothing to say yet."""
        if isinstance(request, Look):
            return await self.look(request.last, stack=request.stack, stderr=request.stderr)
        if self.peers is None:
            return None
        if self._report is None:
            self._report = asyncio.create_task(self._compose(self.peers, request.mismatch))
        return await asyncio.shield(self._report)

    async def look(self, last: int, *, stack: bool = False, stderr: int = 0) -> Sighting:
        """The rank as it is now."""
        state = _state(self._pid, self._born)
        shown = await _stack(self._pid) if stack and state != "dead" else ""
        recording = Recording.read(self._memory)
        return sight(
            recording, state=state, host=sockets.gethostname(), now=time.time(), last=last, stack=shown,
            stderr=_tail_of_stderr(stderr),
        )  # fmt: skip

    async def _compose(self, peers: Observers, mismatch: bool) -> Report:
        """Look at all ranks until it is certain who left, or for `GRACE_S`."""
        deadline = time.monotonic() + GRACE_S
        while True:
            seen = await asyncio.to_thread(peers.look)
            certain = mismatch or any(s is not None and (s.words or s.state != "running") for s in seen.values())
            if certain or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        for rank in culprits(seen, mismatch=mismatch):
            if (sighting := seen[rank]) is not None and sighting.state != "dead":
                stack = await asyncio.to_thread(peers.look_at, rank, stack=True)
                seen[rank] = msgspec.structs.replace(sighting, stack=stack.stack if stack else "")
        return compose(seen, mismatch=mismatch)


def _born(pid: int) -> str:
    """The kernel's start time of a process, which tells it from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def _state(pid: int, born: str) -> str:
    """What the kernel says of a process: "running", "stopped" or "dead"."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return "dead"
    if fields[0] in "ZXx" or fields[19] != born:
        return "dead"
    return "stopped" if fields[0] in "Tt" else "running"


def _tail_of_stderr(size: int) -> str:
    """The end of the file that the rank's stderr goes to; this process has inherited it."""
    size = min(size, MAX_STDERR_BYTES)
    if size <= 0 or not os.path.isfile("/proc/self/fd/2"):
        return ""  # a terminal or a pipe: somebody else reads it
    try:
        with open("/proc/self/fd/2", "rb", buffering=0) as file:  # opened anew: the offset is not the rank's
            file.seek(max(os.fstat(file.fileno()).st_size - size, 0))
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""


async def _stack(pid: int) -> str:
    """The Python stacks of a process that need not co-operate, by py-spy; or why there are none."""
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return NONE.format("py-spy is not installed")
    process = await asyncio.create_subprocess_exec(
        program, "dump", "--nonblocking", "--pid", str(pid),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = await asyncio.wait_for(process.communicate(), STACK_S)
    except TimeoutError:
        process.kill()
        return NONE.format(f"py-spy took more than {STACK_S:g} s")
    if process.returncode:
        return NONE.format(" ".join(errors.decode(errors="replace").split())[-300:])
    return _of_interest(output.decode(errors="replace"))


def _of_interest(dump: str) -> str:
    """The loop's and the steps' threads out of py-spy's dump, without Ray's frames; all if these are not found."""
    threads = ["Thread" + rest for rest in dump.split("\nThread")[1:]]
    ours = [thread for thread in threads if thread.split("\n")[0].endswith(('"MainThread"', '"steps"'))]
    lines = [line for thread in ours or threads for line in thread.splitlines()]
    return "\n".join([line for line in lines if line and "(ray/" not in line][:STACK_LINES])


async def observe(stdin: asyncio.StreamReader) -> None:
    """Serve until the rank has ended and some seconds have passed."""
    start = json.loads(await stdin.readline())
    keys = ObserverKeys(start["public"], start["secret"])
    observer = Observer(start["fd"], keys)
    context = zmq.asyncio.Context()
    authenticator = AsyncioAuthenticator(context, log=logging.getLogger(__name__))
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=OnlyHolders(keys.public))
    socket = _bind(context, start["host"], keys)
    print(socket.last_endpoint.decode(), flush=True)
    serving = asyncio.create_task(_serve(socket, observer))
    while line := await stdin.readline():
        observer.introduce(json.loads(line)["addresses"])
    await asyncio.sleep(LINGER_S)
    serving.cancel()


def _bind(context: zmq.asyncio.Context, host: str, keys: ObserverKeys) -> Any:
    socket = context.socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.maxmsgsize = MAX_REQUEST_BYTES
    socket.ipv6 = ":" in host
    socket.bind(f"tcp://[{host.strip('[]')}]:*" if ":" in host else f"tcp://{host}:*")
    return socket


async def _serve(socket: Any, observer: Observer) -> None:
    tasks: set[asyncio.Task[None]] = set()

    async def answer(identity: bytes, payload: bytes) -> None:
        try:
            request = decode_request(payload)
        except msgspec.DecodeError:
            return  # not one of ours
        if (said := await observer.answer(request)) is not None:
            await socket.send_multipart([identity, encode(said)])

    while True:
        frames = await socket.recv_multipart()
        if len(frames) == 2:
            task = asyncio.create_task(answer(*frames))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def _main() -> None:
    if sys.platform == "linux":
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the rank's own may be busy with what is asked about
    stdin = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    await observe(stdin)


if __name__ == "__main__":
    asyncio.run(_main())
    os._exit(0)
