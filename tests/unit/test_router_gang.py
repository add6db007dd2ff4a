"""The router's ranks: who is heard, who is missed, how a gang ends."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest
import zmq

from dp_engine.link import RankKeys
from dp_engine.messages import PROTOCOL_VERSION, Hello, LogLine, Output, Sampling, encode
from dp_engine.numbering import numbered
from launcher.books import Load
from launcher.keys import LaunchKeys
from launcher.router import GangDown, Router
from tests.fake_gang import StubGang, collect, gang, link_of, open_link, run, until
from tests.fake_rank import FakeRank


def test_a_gang_that_is_given_up_ends_every_request() -> None:
    async def test() -> None:
        async with gang(2) as (router, ranks, _):
            tickets = [router.submit([1], Sampling(max_tokens=500)) for _ in range(8)]
            await anext(tickets[0])
            ranks[1].die("out of memory")
            reason = await link_of(router).wait_down()
            assert reason == "rank 1 failed: out of memory"
            assert router.unready_reason == f"gang 0 is being started again ({reason})"
            assert router.num_waiting == 8
            router.give_up(0, reason)
            results = await asyncio.gather(*map(collect, tickets), return_exceptions=True)
            assert all(isinstance(result, GangDown) and "out of memory" in str(result) for result in results)
            with pytest.raises(GangDown, match="rank 1 failed: out of memory"):
                router.submit([1], Sampling(max_tokens=1))
            assert not router.ready
            assert (router.inflight, router.num_waiting) == (0, 0)
            assert link_of(router).books.loads == [Load(0, 0)] * 2

    run(test)


def test_monitor_can_fail_the_gang_and_the_first_reason_stays() -> None:
    async def test() -> None:
        async with gang(1) as (router, _, _keys):
            ticket = router.submit([1], Sampling(max_tokens=500))
            router.give_up(0, "rank 0 died (signal 9)")
            router.give_up(0, "something later")
            with pytest.raises(GangDown, match="signal 9"):
                await collect(ticket)
            assert router.unready_reason == "rank 0 died (signal 9)"

    run(test)


def test_a_vanished_rank_is_noticed_at_once() -> None:
    """Nothing has to be sent for that."""

    async def test() -> None:
        async with gang(2) as (router, ranks, _):
            ranks[1].__exit__()
            reason = await asyncio.wait_for(link_of(router).wait_down(), 10)
            assert reason.startswith("rank 1: its connection was closed")
            assert router.unready_reason is not None and "rank 1" in router.unready_reason

    run(test)


def test_lost_messages_name_the_rank_and_their_number() -> None:
    async def test() -> None:
        async with gang(3) as (router, ranks, _):
            tickets = [router.submit([1], Sampling(max_tokens=500)) for _ in range(3)]
            await anext(tickets[2])
            ranks[2].lose(3)
            assert await asyncio.wait_for(link_of(router).wait_down(), 10) == "rank 2: 3 messages were lost on the way"
            assert all(ticket.open and ticket.link is None for ticket in tickets), "they wait for the next life"

    run(test)


def test_wait_ready_names_absent_ranks() -> None:
    async def test() -> None:
        keys = LaunchKeys.generate()
        router = Router(3)
        link = await open_link(router, keys)
        try:
            with FakeRank(link.endpoint, keys.for_rank(), 1, 3) as rank:
                with pytest.raises(TimeoutError, match=r"no word from ranks 0, 2 within 0\.3 s"):
                    await link_of(router).wait_ready(0.3)
                assert rank.welcomed.is_set()
                with pytest.raises(GangDown, match="waiting for ranks 0, 2"):
                    router.submit([1], Sampling(max_tokens=1))
                assert rank.adds == []
        finally:
            await router.close()

    run(test)


def test_rank_that_fails_while_loading_ends_the_wait() -> None:
    async def test() -> None:
        keys = LaunchKeys.generate()
        router = Router(2)
        link = await open_link(router, keys)
        try:
            with FakeRank(link.endpoint, keys.for_rank(), 0, 2, hello={"launch_id": "x"}) as rank:
                rank.die("cannot read model.safetensors")
                with pytest.raises(GangDown, match=r"rank 0 failed: cannot read model\.safetensors"):
                    await link_of(router).wait_ready(10)
        finally:
            await router.close()

    run(test)


@pytest.mark.parametrize(
    ("hello", "fault"),
    [
        ({"protocol": 99}, "protocol 99"),
        ({"launch_id": "another"}, "launch another"),
        ({"epoch": 7}, "epoch 7"),
        ({"world_size": 5}, "world size 5"),
        ({"rank": 1}, "rank 1 of 1"),
        ({"rank": -1}, "rank -1 of 1"),
    ],
)
def test_wrong_hello_is_refused(hello: dict[str, Any], fault: str) -> None:
    async def test() -> None:
        async with gang(1, ready=False, hello=hello) as (router, ranks, _):
            with pytest.raises(TimeoutError, match=fault):
                await link_of(router).wait_ready(0.3)
            assert link_of(router).bad_messages == 1
            assert not ranks[0].welcomed.is_set()

    run(test)


def test_second_hello_of_a_rank_is_refused() -> None:
    async def test() -> None:
        async with gang(1) as (router, ranks, keys):
            with FakeRank(link_of(router).endpoint, keys.for_rank(), 0, 1) as twin:
                await until(lambda: link_of(router).bad_messages == 1)
                assert await collect(router.submit([1], Sampling(max_tokens=1))) == ([3], "length")
                assert len(ranks[0].adds) == 1
                assert twin.adds == []

    run(test)


@pytest.mark.parametrize("payload", [b"", b"\xff\x00junk", b"\x91" * 5000, encode(Output(1, [1, 2], [3], []))])
def test_bad_messages_are_counted_and_dropped(payload: bytes) -> None:
    async def test() -> None:
        async with gang(1) as (router, ranks, _):
            ranks[0].send_raw(payload)
            await until(lambda: link_of(router).bad_messages == 1)
            assert await collect(router.submit([1], Sampling(max_tokens=1))) == ([3], "length")

    run(test)


def connect(endpoint: str, keys: RankKeys | None) -> tuple[Any, Any]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if keys is not None:
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
    socket.connect(endpoint)
    return context, socket


@pytest.mark.parametrize("kind", ["no encryption", "foreign client key"])
def test_strangers_are_not_heard(kind: str) -> None:
    async def test() -> None:
        keys, foreign = LaunchKeys.generate(), LaunchKeys.generate()
        router = Router(1)
        link = await open_link(router, keys)
        stranger = RankKeys(keys.launch_id, keys.server_public, foreign.client_public, foreign.client_secret)
        context, socket = connect(link.endpoint, None if kind == "no encryption" else stranger)
        with suppress(zmq.Again):  # not connected: nothing can be sent at all
            hello = Hello(PROTOCOL_VERSION, keys.launch_id, 1, 0, 1, 1, 1, 1, "")
            socket.send(numbered(0, encode(hello)), flags=zmq.NOBLOCK)
        try:
            with pytest.raises(TimeoutError, match="no word from rank 0"):
                await link_of(router).wait_ready(0.5)
            assert link_of(router).bad_messages == 0
        finally:
            socket.close()
            context.term()
            await router.close()

    run(test)


def test_log_lines_carry_the_rank() -> None:
    async def test() -> None:
        lines: list[tuple[int, int, int, str]] = []
        async with gang(2, on_log=lambda *line: lines.append(line)) as (_, ranks, _keys):
            ranks[1].log("loaded")
            await until(lambda: lines == [(0, 1, 20, "loaded")])

    run(test)


def test_log_lines_of_a_loading_rank_are_heard_but_no_rank_speaks_for_another() -> None:
    lines: list[tuple[int, int, int, str]] = []
    stub = StubGang(2, present=1, on_log=lambda *line: lines.append(line))
    stub.say(1, LogLine(1, 20, "loading"))
    stub.say(0, LogLine(1, 20, "false"))
    stub.say(9, LogLine(9, 20, "nobody"))
    assert lines == [(0, 1, 20, "loading")]
    assert link_of(stub.router).bad_messages == 2


def test_error_in_a_handler_costs_one_message_only() -> None:
    async def test() -> None:
        def on_log(*_: object) -> None:
            raise RuntimeError("terminal is gone")

        async with gang(1, on_log=on_log) as (router, ranks, _):
            ranks[0].log("x")
            assert await collect(router.submit([1], Sampling(max_tokens=2))) == ([3, 4], "length")

    run(test)


def test_shutdown_collects_goodbyes_and_ends_requests() -> None:
    async def test() -> None:
        async with gang(2) as (router, _, _keys):
            ticket = router.submit([1], Sampling(max_tokens=500))
            assert await router.shutdown(5) == []
            with pytest.raises(GangDown, match="shutting down"):
                await collect(ticket)

    run(test)


def test_shutdown_names_silent_ranks() -> None:
    async def test() -> None:
        async with gang(2) as (router, ranks, _):
            ranks[1].__exit__()
            begin = time.monotonic()
            assert await router.shutdown(0.5) == [(0, 1)]
            assert time.monotonic() - begin < 2

    run(test)


def test_keys_do_not_show_secrets() -> None:
    keys = LaunchKeys.generate()
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys.for_rank())
    assert keys.server_secret not in vars(keys.for_rank()).values()
