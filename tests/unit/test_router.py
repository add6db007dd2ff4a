"""The router's requests: to a rank and back."""

import asyncio
import time

import pytest

from dp_engine.messages import Abort, Add, Output, Sampling, Wake, encode
from launcher.books import Load
from launcher.router import QueueFull, RequestRejected
from tests.fake_gang import StubGang, collect, gang, link_of, run, until


def test_tokens_reach_their_request_and_books_return_to_zero() -> None:
    async def test() -> None:
        async with gang(3) as (router, ranks, _):
            tickets = [router.submit([1] * (n + 1), Sampling(max_tokens=n + 1)) for n in range(12)]
            for n, result in enumerate(await asyncio.gather(*map(collect, tickets))):
                assert result == ([3 + i for i in range(n + 1)], "length")
            assert link_of(router).books.loads == [Load(0, 0)] * 3
            assert router.inflight == 0
            started, finished = router.replicas[0].started, router.replicas[0].finished
            assert sum(started) == 12
            assert [dict(counter) for counter in finished] == [{"length": n} for n in started]
            assert sorted(len(add.prompt) for rank in ranks for add in rank.adds) == list(range(1, 13))
            assert link_of(router).last_output_at is not None
            assert set(link_of(router).reports) == {0, 1, 2}

    run(test)


def test_burst_lands_evenly() -> None:
    """40 requests within 50 ms right after start, on 4 ranks."""

    async def test() -> None:
        async with gang(4) as (router, ranks, _):
            begin = time.monotonic()
            tickets = [router.submit([1] * 32, Sampling(max_tokens=500)) for _ in range(40)]
            assert time.monotonic() - begin < 0.05
            assert router.replicas[0].started == [10, 10, 10, 10]
            await until(lambda: [len(rank.adds) for rank in ranks] == [10, 10, 10, 10])
            for ticket in tickets:
                router.abort(ticket)
            assert link_of(router).books.loads == [Load(0, 0)] * 4
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
            assert router.replicas[0].finished[0] == {"rejected": 1}
            assert router.inflight == 0

    run(test)


def test_tokens_of_another_ranks_request_are_dropped() -> None:
    async def test() -> None:
        async with gang(2) as (router, ranks, _):
            ticket = router.submit([1], Sampling(max_tokens=500))
            other = ranks[1 - ticket.rank]
            other.send_raw(encode(Output(1, [ticket.request_id], [99], [(ticket.request_id, "stop")])))
            other.send_raw(encode(Output(2, [], [], [], other.report())))
            await until(lambda: other.rank in link_of(router).reports)
            assert ticket.open
            router.abort(ticket)
            tokens, reason = await collect(ticket)
            assert reason == "abort"
            assert tokens == [3 + i for i in range(len(tokens))]

    run(test)


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


def test_full_queue_refuses_requests_and_delays_aborts() -> None:
    """A rank that does not read: nothing is charged for a refused request, and an abort reaches it in the end."""
    stub = StubGang(1)
    router = stub.router
    ticket = router.submit([1, 2], Sampling(max_tokens=3))
    stub.full = {0}
    with pytest.raises(QueueFull, match="rank 0"):
        router.submit([1], Sampling(max_tokens=1))
    assert (link_of(router).roster.wake, router.inflight, link_of(router).books.loads) == (1, 1, [Load(2, 3)])
    router.abort(ticket)
    assert (router.inflight, link_of(router).books.loads) == (0, [Load(0, 0)])
    stub.sign(0)
    assert [type(message) for _, message in stub.take()] == [Add]
    stub.full.clear()
    stub.sign(0)
    stub.sign(0)
    assert stub.take() == [(0, Abort([ticket.request_id])), (0, Wake(2))]


def test_an_abort_wakes_all_ranks() -> None:
    """Its rank may be asleep, and once awake it waits in the vote for all others."""
    stub = StubGang(3)
    ticket = stub.router.submit([1], Sampling(max_tokens=3))
    stub.take()
    stub.router.abort(ticket)
    others = [(rank, Wake(2)) for rank in range(3)]
    assert sorted(stub.take(), key=str) == sorted([(ticket.rank, Abort([ticket.request_id])), *others], key=str)


def test_a_rank_that_missed_a_wake_hears_of_it_at_its_next_sign() -> None:
    stub = StubGang(2)
    stub.full = {1}
    ticket = stub.router.submit([1], Sampling(max_tokens=3))
    assert ticket.rank == 0
    assert [rank for rank, _ in stub.take()] == [0]
    stub.full.clear()
    stub.sign(1)
    stub.sign(1)
    assert stub.take() == [(1, Wake(1))]


def test_several_tokens_of_a_step_arrive_in_order() -> None:
    """As accepted drafts do."""

    async def test() -> None:
        async with gang(2, burst=4) as (router, ranks, _):
            tickets = [router.submit([1], Sampling(max_tokens=n)) for n in (1, 4, 9, 30)]
            for n, result in zip((1, 4, 9, 30), await asyncio.gather(*map(collect, tickets)), strict=True):
                assert result == ([3 + i for i in range(n)], "length")
            assert sum(rank.report().accepted_draft_tokens for rank in ranks) > 20
            assert link_of(router).books.loads == [Load(0, 0)] * 2

    run(test)


# ---- several choices for one prompt


def test_choices_of_a_prompt_share_a_rank_and_its_prompt() -> None:
    stub = StubGang(3)
    router, sampling = stub.router, Sampling(max_tokens=10)
    first = router.submit([1] * 7, sampling, choices=3)
    forks = [router.submit([1] * 7, sampling, choices=3, parent=first) for _ in range(2)]
    adds = [(rank, message) for rank, message in stub.take() if isinstance(message, Add)]
    assert {rank for rank, _ in adds} == {first.rank}
    assert [(add.parent, add.prompt) for _, add in adds] == [(parent, [1] * 7) for parent in (0, 1, 1)]
    assert [add.wake for _, add in adds] == [1, 2, 3]
    assert link_of(router).books.loads[first.rank] == Load(7, 30)
    stub.say(first.rank, Output(1, [1, 2, 2, 3], [5, 5, 6, 5], [(3, "stop")]))
    assert link_of(router).books.loads[first.rank] == Load(0, 17)
    router.abort(first)
    router.abort(forks[0])
    assert link_of(router).books.loads == [Load(0, 0)] * 3


@pytest.mark.parametrize(("choices", "rank"), [(1, 1), (3, 0)])
def test_the_rank_is_chosen_for_all_choices(choices: int, rank: int) -> None:
    router = StubGang(2).router
    router.submit([1] * 50, Sampling(max_tokens=100))
    router.submit([1], Sampling(max_tokens=120))
    assert link_of(router).books.loads == [Load(50, 100), Load(1, 120)]
    assert router.submit([1] * 60, Sampling(max_tokens=10), choices=choices).rank == rank


def test_forks_go_on_when_one_of_them_is_aborted() -> None:
    async def test() -> None:
        async with gang(3) as (router, ranks, _):
            sampling = Sampling(max_tokens=400)
            first = router.submit([1] * 7, sampling, choices=3)
            forks = [router.submit([1] * 7, sampling, choices=3, parent=first) for _ in range(2)]
            await anext(first)
            router.abort(first)
            assert (await collect(first))[1] == "abort"
            for tokens, reason in await asyncio.gather(*map(collect, forks)):
                assert (len(tokens), reason) == (400, "length")
            assert [add.parent for add in ranks[first.rank].adds] == [0, first.request_id, first.request_id]
            assert sum(len(rank.adds) for rank in ranks) == 3
            assert ranks[first.rank].aborted == [first.request_id]
            assert link_of(router).books.loads == [Load(0, 0)] * 3

    run(test)
