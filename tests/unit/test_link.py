"""A rank's socket: the router's answer comes before anything else."""

import asyncio
from collections.abc import Callable

import pytest

from dp_engine.link import Link, RankKeys
from dp_engine.messages import PROTOCOL_VERSION, Add, Hello, Sampling, Wake
from launcher.keys import LaunchKeys
from launcher.router import Router
from tests.fake_gang import open_link


def on_a_router(rank: Callable[[str, RankKeys], list[object]]) -> list[object]:
    """What `rank` finds at a router that gives it a request as soon as it can."""

    async def run() -> list[object]:
        keys = LaunchKeys.generate()
        router = Router(1)
        link = await open_link(router, keys)
        task = asyncio.create_task(asyncio.to_thread(rank, link.endpoint, keys.for_rank()))
        await link.wait_ready(10)
        router.submit([5], Sampling(max_tokens=1))
        try:
            return await task
        finally:
            await router.close()

    return asyncio.run(run())


def test_what_follows_the_welcome_is_not_lost() -> None:
    def rank(endpoint: str, keys: RankKeys) -> list[object]:
        link = Link(endpoint, 0, keys)
        link.send(Hello(PROTOCOL_VERSION, keys.launch_id, 1, 0, 1, 1, 100, 512, ""))
        link.wait_welcome(10)
        found: list[object] = []
        while not found:
            assert link.wait(10)
            found += link.drain()
        link.close()
        return found

    [message] = [found for found in on_a_router(rank) if not isinstance(found, Wake)]
    assert isinstance(message, Add) and message.prompt == [5]


def test_a_router_that_does_not_answer() -> None:
    keys = LaunchKeys.generate().for_rank()
    link = Link("tcp://127.0.0.1:9", 3, keys)
    with pytest.raises(TimeoutError, match=r"did not welcome rank 3 within 0.1 s"):
        link.wait_welcome(0.1)
    link.close()
