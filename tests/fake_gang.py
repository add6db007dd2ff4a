"""A router and its fake ranks on one event loop, or the router alone with queues that can be full."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from dp_engine.messages import PROTOCOL_VERSION, Hello, Output, decode_to_rank, encode
from launcher.gang_link import GangLink
from launcher.keys import LaunchKeys
from launcher.link import Congested
from launcher.router import Router
from tests.fake_rank import FakeRank


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def link_of(router: Router) -> GangLink:
    """The present life of the router's first gang."""
    link = router.replicas[0].link
    assert link is not None
    return link


async def open_link(router: Router, keys: LaunchKeys, replica: int = 0, epoch: int = 1) -> GangLink:
    """A life of a gang whose ranks may come."""
    link = router.open(replica, keys, epoch)
    await link.start("127.0.0.1")
    return link


@asynccontextmanager
async def gang(world_size: int, *, ready: bool = True, max_inflight: int = 64, **options: Any) -> AsyncIterator[Any]:
    """A started router and its fake ranks."""
    keys = LaunchKeys.generate()
    router = Router(world_size, max_inflight=max_inflight, on_log=options.pop("on_log", None))
    link = await open_link(router, keys)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(FakeRank(link.endpoint, keys.for_rank(), rank, world_size, **options))
            for rank in range(world_size)
        ]
        try:
            if ready:
                await link.wait_ready(10)
            yield router, ranks, keys
        finally:
            await router.close()


async def collect(ticket: Any) -> tuple[list[int], str | None]:
    tokens: list[int] = []
    reason = None
    async for delta in ticket:
        tokens += delta.tokens
        reason = delta.finish_reason
    return tokens, reason


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


class StubGang:
    """A router and what it sends to its ranks, of which the first `present` are there; the queues of `full` are full.

    Nothing runs: the test speaks for the ranks.
    """

    def __init__(self, world_size: int, *, present: int | None = None, **options: Any) -> None:
        self.full: set[int] = set()
        self.sent: list[tuple[int, Any]] = []
        keys = LaunchKeys.generate()
        self.router = Router(world_size, **options)
        self.link = self.router.open(0, keys, 1)
        self.link._link.send = self._send  # type: ignore[method-assign]
        for rank in range(world_size if present is None else present):
            self.say(rank, Hello(PROTOCOL_VERSION, keys.launch_id, 1, rank, world_size, 1, 100, 512, ""))
        self.take()

    def say(self, rank: int, message: Any) -> None:
        self.link._on_message(b"%d" % rank, encode(message))

    def sign(self, rank: int) -> None:
        """The rank gives a sign of life."""
        self.say(rank, Output(1, [], [], []))

    def take(self) -> list[tuple[int, Any]]:
        """Rank and message of what was sent since the last call."""
        sent, self.sent = self.sent, []
        return sent

    def _send(self, identity: bytes, payload: bytes) -> None:
        if (rank := int(identity)) in self.full:
            raise Congested
        self.sent.append((rank, decode_to_rank(payload)))
