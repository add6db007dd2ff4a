"""A rank's socket and the router's: the answer to a Hello comes first, and nothing is lost without a word."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from dp_engine.link import Link, RankKeys, RouterLost
from dp_engine.messages import PROTOCOL_VERSION, Add, Hello, LogLine, Sampling, Wake, encode
from dp_engine.numbering import MessagesLost, Reception, numbered
from launcher.keys import LaunchKeys
from launcher.link import Congested, RankLink
from launcher.router import Router
from tests.fake_gang import link_of, open_link, until
from tests.proxy import Proxy


async def with_a_rank(rank: Callable[[str, RankKeys], Any], router: Callable[[Router], Any]) -> Any:
    """What `rank` returns in a thread beside a router that does what `router` says once the rank is welcome."""
    keys = LaunchKeys.generate()
    it = Router(1)
    link = await open_link(it, keys)
    task = asyncio.create_task(asyncio.to_thread(rank, link.endpoint, keys.for_rank()))
    try:
        await link.wait_ready(20)
        await router(it)
        return await asyncio.wait_for(task, 20)
    finally:
        await it.close()


def welcomed(endpoint: str, keys: RankKeys) -> Link:
    link = Link(endpoint, 0, keys)
    link.send(Hello(PROTOCOL_VERSION, keys.launch_id, 1, 0, 1, 1, 100, 512, ""))
    link.wait_welcome(10)
    return link


async def submit(router: Router) -> None:
    router.submit([5], Sampling(max_tokens=1))


def take(link: Link) -> Add:
    while True:
        assert link.wait(10)
        for message in link.drain():
            if isinstance(message, Add):
                return message


def test_what_follows_the_welcome_is_not_lost() -> None:
    def rank(endpoint: str, keys: RankKeys) -> Add:
        link = welcomed(endpoint, keys)
        try:
            return take(link)
        finally:
            link.close()

    assert asyncio.run(with_a_rank(rank, submit)).prompt == [5]


def test_a_router_that_does_not_answer() -> None:
    keys = LaunchKeys.generate().for_rank()
    link = Link("tcp://127.0.0.1:9", 3, keys)
    with pytest.raises(TimeoutError, match=r"did not welcome rank 3 within 0.1 s"):
        link.wait_welcome(0.1)
    link.close()


def test_what_the_router_said_and_was_lost_shows_at_the_rank() -> None:
    """A lost message does not even wake the rank; the next one does, and says how many are missing."""

    def rank(endpoint: str, keys: RankKeys) -> int:
        link = welcomed(endpoint, keys)
        link.lose("to_rank", 2)
        try:
            with pytest.raises(MessagesLost) as caught:
                assert not link.wait(20), "woken by a message that was lost"
            return caught.value.missing
        finally:
            link.close()

    async def router(it: Router) -> None:
        for mode in ("new", "all", "none"):
            await asyncio.sleep(0.1)
            it.pause(mode)  # type: ignore[arg-type]

    assert asyncio.run(with_a_rank(rank, router)) == 2


def test_what_the_rank_said_and_was_lost_shows_at_the_router() -> None:
    ready = threading.Event()  # what is lost before counts as a start that failed

    def rank(endpoint: str, keys: RankKeys) -> None:
        link = welcomed(endpoint, keys)
        try:
            assert ready.wait(20)
            link.lose("to_router", 1)
            for text in ("lost", "comes"):
                link.send(LogLine(0, 20, text))
            link.wait(20)
        finally:
            link.close()

    async def router(it: Router) -> None:
        ready.set()
        assert await asyncio.wait_for(link_of(it).wait_down(), 20) == "rank 0: 1 message was lost on the way"
        link_of(it).roster.shut_down([0])

    asyncio.run(with_a_rank(rank, router))


def test_a_cut_is_noticed_at_both_ends_though_the_line_comes_back() -> None:
    """Also by a rank that sleeps and a router that has nothing to say."""

    async def test() -> None:
        keys = LaunchKeys.generate()
        router, asleep = Router(1), threading.Event()
        router_link = await open_link(router, keys)

        def rank(endpoint: str) -> None:
            link = welcomed(endpoint, keys.for_rank())
            asleep.set()
            try:
                with pytest.raises(RouterLost, match="rank 0 has no router any more"):
                    link.wait(20)
            finally:
                link.close()

        with Proxy(router_link.endpoint) as proxy:
            task = asyncio.create_task(asyncio.to_thread(rank, proxy.endpoint))
            assert await asyncio.to_thread(asleep.wait, 20)
            proxy.cut()
            assert (await asyncio.wait_for(router_link.wait_down(), 10)).startswith("rank 0: its connection was closed")
            await asyncio.wait_for(task, 20)
        await router.close()

    asyncio.run(test())


def test_a_message_that_a_full_queue_refuses_uses_up_no_number() -> None:
    async def test() -> None:
        keys, heard = LaunchKeys.generate(), list[bytes]()
        link = RankLink(keys, lambda identity, _: heard.append(identity), 2, on_broken=lambda *_: None)
        await link.start("127.0.0.1")
        context = zmq.Context()
        peer = context.socket(zmq.DEALER)
        peer.rcvhwm, peer.linger = 1, 0
        peer.curve_serverkey = keys.server_public.encode()
        peer.curve_publickey = keys.client_public.encode()
        peer.curve_secretkey = keys.client_secret.encode()
        peer.connect(link.endpoint)
        peer.send(numbered(0, b"here"))
        await until(lambda: bool(heard))
        sent = refused = 0
        reception, payload = Reception(), encode(Wake(1)) + bytes(1 << 20)
        while refused < 3:
            try:
                link.send(heard[0], payload)
                sent += 1
            except Congested:
                refused += 1
        for _ in range(sent):
            assert peer.poll(10_000)
            assert reception.payload(peer.recv()) == payload
        link.send(heard[0], b"after")
        assert peer.poll(10_000) and reception.payload(peer.recv()) == b"after"
        peer.close()
        context.term()
        await link.close()

    asyncio.run(asyncio.wait_for(test(), 60))
