import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import zmq

from dp_engine.link import RankKeys
from dp_engine.messages import Abort, Hello, LogLine, Output, Sampling, decode_to_rank, encode
from launcher.books import Load
from launcher.keys import LaunchKeys
from launcher.link import Congested
from launcher.router import GangDown, QueueFull, RequestRejected, Router
from tests.fake_rank import FakeRank


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


@asynccontextmanager
async def gang(world_size: int, *, ready: bool = True, max_inflight: int = 64, **options: Any) -> AsyncIterator[Any]:
    """A started router and its fake ranks."""
    keys = LaunchKeys.generate()
    router = Router(world_size, keys, epoch=1, max_inflight=max_inflight, on_log=options.pop("on_log", None))
    await router.start()
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(FakeRank(router.endpoint, keys.for_rank(), rank, world_size, **options))
            for rank in range(world_size)
        ]
        try:
            if ready:
                await router.wait_ready(10)
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


def test_tokens_reach_their_request_and_books_return_to_zero() -> None:
    async def test() -> None:
        async with gang(3) as (router, ranks, _):
            tickets = [router.submit([1] * (n + 1), Sampling(max_tokens=n + 1)) for n in range(12)]
            for n, result in enumerate(await asyncio.gather(*map(collect, tickets))):
                assert result == ([3 + i for i in range(n + 1)], "length")
            assert router.books.loads == [Load(0, 0)] * 3
            assert router.inflight == 0
            assert sum(router.started) == 12
            assert [dict(counter) for counter in router.finished] == [{"length": n} for n in router.started]
            assert sorted(len(add.prompt) for rank in ranks for add in rank.adds) == list(range(1, 13))
            assert router.last_output_at is not None
            assert set(router.reports) == {0, 1, 2}

    run(test)


def test_burst_lands_evenly() -> None:
    """40 requests within 50 ms right after start, on 4 ranks."""

    async def test() -> None:
        async with gang(4) as (router, ranks, _):
            begin = time.monotonic()
            tickets = [router.submit([1] * 32, Sampling(max_tokens=500)) for _ in range(40)]
            assert time.monotonic() - begin < 0.05
            assert router.started == [10, 10, 10, 10]
            await until(lambda: [len(rank.adds) for rank in ranks] == [10, 10, 10, 10])
            for ticket in tickets:
                router.abort(ticket)
            assert router.books.loads == [Load(0, 0)] * 4
            await until(lambda: all(len(rank.aborted) == 10 and not rank.running for rank in ranks))

    run(test)


def test_every_rank_hears_every_wake() -> None:
    async def test() -> None:
        async with gang(3) as (router, ranks, _):
            tickets = [router.submit([1], Sampling(max_tokens=2)) for _ in range(6)]
            await asyncio.gather(*map(collect, tickets))
            await until(lambda: all(rank.wakes == [1, 2, 3, 4, 5, 6] for rank in ranks))

    run(test)


def test_abort_is_idempotent_and_ends_the_iterator() -> None:
    async def test() -> None:
        async with gang(1) as (router, ranks, _):
            ticket = router.submit([1], Sampling(max_tokens=500))
            first = await anext(ticket)
            assert first.tokens[0] == 3
            router.abort(ticket)
            router.abort(ticket)
            _, reason = await collect(ticket)
            assert reason == "abort"
            await until(lambda: ranks[0].aborted == [ticket.request_id])
            assert await collect(ticket) == ([], None)  # an ended iterator stays ended
            done = router.submit([1], Sampling(max_tokens=1))
            await collect(done)
            router.abort(done)
            await asyncio.sleep(0.05)
            assert ranks[0].aborted == [ticket.request_id]

    run(test)


def test_queue_full_and_room_again() -> None:
    async def test() -> None:
        async with gang(2, max_inflight=2) as (router, _, _keys):
            tickets = [router.submit([1], Sampling(max_tokens=500)) for _ in range(2)]
            with pytest.raises(QueueFull, match="2 requests"):
                router.submit([1], Sampling(max_tokens=1))
            router.abort(tickets[0])
            assert await collect(router.submit([1], Sampling(max_tokens=1))) == ([3], "length")

    run(test)


def test_rejected_request_raises_with_the_reason() -> None:
    async def test() -> None:
        async with gang(1, reply=lambda add: "it needs 99 blocks, the pool has 9") as (router, _, _keys):
            with pytest.raises(RequestRejected, match="99 blocks"):
                await collect(router.submit([1], Sampling(max_tokens=1)))
            assert router.finished[0] == {"rejected": 1}
            assert router.inflight == 0

    run(test)


def test_goodbye_with_error_ends_every_request() -> None:
    async def test() -> None:
        async with gang(2) as (router, ranks, _):
            tickets = [router.submit([1], Sampling(max_tokens=500)) for _ in range(8)]
            await anext(tickets[0])
            ranks[1].die("out of memory")
            results = await asyncio.gather(*map(collect, tickets), return_exceptions=True)
            assert all(isinstance(result, GangDown) and "out of memory" in str(result) for result in results)
            with pytest.raises(GangDown, match="rank 1 failed: out of memory"):
                router.submit([1], Sampling(max_tokens=1))
            assert not router.ready
            assert router.books.loads == [Load(0, 0)] * 2

    run(test)


def test_monitor_can_fail_the_gang_and_the_first_reason_stays() -> None:
    async def test() -> None:
        async with gang(1) as (router, _, _keys):
            ticket = router.submit([1], Sampling(max_tokens=500))
            router.fail("rank 0 died (signal 9)")
            router.fail("something later")
            with pytest.raises(GangDown, match="signal 9"):
                await collect(ticket)
            assert router.unready_reason == "rank 0 died (signal 9)"

    run(test)


def test_vanished_rank_is_noticed_at_the_next_message() -> None:
    async def test() -> None:
        async with gang(1) as (router, ranks, _):
            ranks[0].__exit__()

            def submits() -> bool:
                try:
                    router.submit([1], Sampling(max_tokens=1))
                except GangDown:
                    return True
                return False

            await until(submits)
            assert router.unready_reason == "rank 0 is not connected any more"
            assert router.inflight == 0

    run(test)


def test_wait_ready_names_absent_ranks() -> None:
    async def test() -> None:
        keys = LaunchKeys.generate()
        router = Router(3, keys, epoch=1)
        await router.start()
        try:
            with FakeRank(router.endpoint, keys.for_rank(), 1, 3) as rank:
                with pytest.raises(TimeoutError, match=r"no word from ranks 0, 2 within 0\.3 s"):
                    await router.wait_ready(0.3)
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
        router = Router(2, keys, epoch=1)
        await router.start()
        try:
            with FakeRank(router.endpoint, keys.for_rank(), 0, 2, hello={"launch_id": "x"}) as rank:
                rank.die("cannot read model.safetensors")
                with pytest.raises(GangDown, match=r"rank 0 failed: cannot read model\.safetensors"):
                    await router.wait_ready(10)
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
                await router.wait_ready(0.3)
            assert router.bad_messages == 1
            assert not ranks[0].welcomed.is_set()

    run(test)


def test_second_hello_of_a_rank_is_refused() -> None:
    async def test() -> None:
        async with gang(1) as (router, ranks, keys):
            with FakeRank(router.endpoint, keys.for_rank(), 0, 1) as twin:
                await until(lambda: router.bad_messages == 1)
                assert await collect(router.submit([1], Sampling(max_tokens=1))) == ([3], "length")
                assert len(ranks[0].adds) == 1
                assert twin.adds == []

    run(test)


@pytest.mark.parametrize("payload", [b"", b"\xff\x00junk", b"\x91" * 5000, encode(Output(1, [1, 2], [3], []))])
def test_bad_messages_are_counted_and_dropped(payload: bytes) -> None:
    async def test() -> None:
        async with gang(1) as (router, ranks, _):
            ranks[0].send_raw(payload)
            await until(lambda: router.bad_messages == 1)
            assert await collect(router.submit([1], Sampling(max_tokens=1))) == ([3], "length")

    run(test)


def test_tokens_of_another_ranks_request_are_dropped() -> None:
    async def test() -> None:
        async with gang(2) as (router, ranks, _):
            ticket = router.submit([1], Sampling(max_tokens=500))
            other = ranks[1 - ticket.rank]
            other.send_raw(encode(Output(1, [ticket.request_id], [99], [(ticket.request_id, "stop")])))
            other.send_raw(encode(Output(2, [], [], [], other.report())))
            await until(lambda: other.rank in router.reports)
            assert ticket.open
            router.abort(ticket)
            tokens, reason = await collect(ticket)
            assert reason == "abort"
            assert tokens == [3 + i for i in range(len(tokens))]

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
        router = Router(1, keys, epoch=1)
        await router.start()
        stranger = RankKeys(keys.launch_id, keys.server_public, foreign.client_public, foreign.client_secret)
        context, socket = connect(router.endpoint, None if kind == "no encryption" else stranger)
        with suppress(zmq.Again):  # not connected: nothing can be sent at all
            socket.send(encode(Hello(1, keys.launch_id, 1, 0, 1, 1, 1, 1)), flags=zmq.NOBLOCK)
        try:
            with pytest.raises(TimeoutError, match="no word from rank 0"):
                await router.wait_ready(0.5)
            assert router.bad_messages == 0
        finally:
            socket.close()
            context.term()
            await router.close()

    run(test)


def test_log_lines_carry_the_rank() -> None:
    async def test() -> None:
        lines: list[tuple[int, int, str]] = []
        async with gang(2, on_log=lambda *line: lines.append(line)) as (_, ranks, _keys):
            ranks[1].log("loaded")
            await until(lambda: lines == [(1, 20, "loaded")])

    run(test)


def test_log_lines_of_a_loading_rank_are_heard_but_no_rank_speaks_for_another() -> None:
    keys = LaunchKeys.generate()
    lines: list[tuple[int, int, str]] = []
    router = Router(2, keys, epoch=1, on_log=lambda *line: lines.append(line))
    router._link = StubLink()  # type: ignore[assignment]
    router._on_message(b"r1", encode(LogLine(1, 20, "loading")))
    router._on_message(b"r0", encode(Hello(1, keys.launch_id, 1, 0, 2, 1, 1, 1)))
    router._on_message(b"r0", encode(LogLine(1, 20, "false")))
    router._on_message(b"r9", encode(LogLine(9, 20, "nobody")))
    assert lines == [(1, 20, "loading")]
    assert router.bad_messages == 2


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
            assert await router.shutdown(0.5) == [1]
            assert time.monotonic() - begin < 2

    run(test)


def test_keys_do_not_show_secrets() -> None:
    keys = LaunchKeys.generate()
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys.for_rank())
    assert keys.server_secret not in vars(keys.for_rank()).values()


def test_runs_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def test() -> None:
        async with gang(2) as (router, _, _keys):
            tickets = [router.submit([1], Sampling(max_tokens=20)) for _ in range(20)]
            results = await asyncio.gather(*map(collect, tickets))
            assert all(reason == "length" and len(tokens) == 20 for tokens, reason in results)
            assert await router.shutdown(5) == []

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), 30))


class StubLink:
    """A link whose queue to every rank can be full."""

    def __init__(self) -> None:
        self.full = False
        self.sent: list[tuple[bytes, Any]] = []

    def send(self, identity: bytes, payload: bytes) -> None:
        if self.full:
            raise Congested
        self.sent.append((identity, decode_to_rank(payload)))


def test_full_queue_refuses_requests_and_delays_aborts() -> None:
    """A rank that does not read: nothing is charged for a refused request, and an abort reaches it in the end."""
    keys = LaunchKeys.generate()
    router = Router(1, keys, epoch=1)
    router._link = link = StubLink()  # type: ignore[assignment]
    router._on_message(b"r0", encode(Hello(1, keys.launch_id, 1, 0, 1, 1, 1, 1)))
    ticket = router.submit([1, 2], Sampling(max_tokens=3))
    link.full = True
    with pytest.raises(QueueFull, match="rank 0"):
        router.submit([1], Sampling(max_tokens=1))
    assert (router.wake, router.inflight, router.books.loads) == (1, 1, [Load(2, 3)])
    router.abort(ticket)
    assert (router.inflight, router.books.loads) == (0, [Load(0, 0)])
    router._on_message(b"r0", encode(Output(1, [], [], [])))
    assert [type(message).__name__ for _, message in link.sent] == ["Welcome", "Add"]
    link.full = False
    router._on_message(b"r0", encode(Output(2, [], [], [])))
    router._on_message(b"r0", encode(Output(3, [], [], [])))
    assert [message for _, message in link.sent[2:]] == [Abort([ticket.request_id])]
