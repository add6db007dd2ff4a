"""What the operator asks of all ranks at once."""

import asyncio
from collections.abc import Callable

import pytest

from dp_engine.messages import Pause, ResetPrefixCache, Sampling, Wake
from launcher.link import Unroutable
from launcher.router import GangDown, RankBusy, Router
from tests.fake_gang import StubGang, collect, gang, link_of, run, until


def test_pause_and_reset_reach_all_ranks_with_one_wake_number() -> None:
    async def test() -> None:
        async with gang(3) as (router, ranks, _):
            ticket = router.submit([1], Sampling(max_tokens=2))
            await collect(ticket)
            router.pause("new")
            assert router.paused == "new"
            router.pause("none")
            router.reset_prefix_cache()
            assert (router.paused, link_of(router).roster.wake) == ("none", 4)
            await until(lambda: all(rank.wakes == [1, 2, 3, 4] for rank in ranks))
            for rank in ranks:
                assert rank.pauses == [Pause(2, "new"), Pause(3, "none")]
                assert rank.resets == [ResetPrefixCache(4)]

    run(test)


def test_requests_wait_while_paused() -> None:
    async def test() -> None:
        async with gang(2) as (router, ranks, _):
            router.pause("all")
            tickets = [router.submit([1], Sampling(max_tokens=3)) for _ in range(4)]
            await until(lambda: sum(len(rank.running) for rank in ranks) == 4)
            await asyncio.sleep(0.05)
            assert router.inflight == 4
            router.abort(tickets[0])
            router.pause("none")
            assert [result[1] for result in await asyncio.gather(*map(collect, tickets))] == ["abort", *["length"] * 3]

    run(test)


def test_a_mode_is_told_once() -> None:
    stub = StubGang(2)
    stub.router.pause("all")
    assert stub.take() == [(0, Pause(1, "all")), (1, Pause(1, "all"))]
    stub.router.pause("all")
    assert stub.take() == [(0, Wake(2)), (1, Wake(2))]


def test_a_full_queue_leaves_the_mode_as_it_was() -> None:
    """The ranks that were told are told back, and the one that was not hears of the wake numbers only."""
    stub = StubGang(3)
    stub.full = {1}
    with pytest.raises(RankBusy, match="queue to rank 1 is full; the pause mode is still 'none'"):
        stub.router.pause("all")
    assert stub.router.paused == "none"
    told = [Pause(1, "all"), Pause(2, "none")]
    sent = stub.take()
    assert [message for rank, message in sent if rank == 0] == told
    assert [message for rank, message in sent if rank == 2] == told
    stub.full.clear()
    stub.sign(1)
    assert stub.take() == [(1, Wake(2))]
    stub.router.pause("all")
    assert stub.take() == [(rank, Pause(3, "all")) for rank in range(3)]


def test_a_rank_that_could_not_be_told_back_is_told_at_its_next_sign() -> None:
    stub = StubGang(2)
    stub.router.pause("new")
    stub.take()
    stub.full = {1}
    send = link_of(stub.router)._link.send

    def fill_up(identity: bytes, payload: bytes) -> None:
        send(identity, payload)
        stub.full = {0, 1}

    link_of(stub.router)._link.send = fill_up  # type: ignore[method-assign]
    with pytest.raises(RankBusy, match="still 'new'"):
        stub.router.pause("all")
    assert stub.take() == [(0, Pause(2, "all"))]
    stub.full.clear()
    link_of(stub.router)._link.send = send  # type: ignore[method-assign]
    stub.sign(0)
    stub.sign(0)
    assert stub.take() == [(0, Pause(3, "new"))]


def test_a_reset_reaches_a_full_queue_later() -> None:
    stub = StubGang(2)
    stub.full = {0}
    with pytest.raises(RankBusy, match="queue to rank 0 is full; prefixes are still cached there"):
        stub.router.reset_prefix_cache()
    assert stub.take() == [(1, ResetPrefixCache(1))]
    stub.full.clear()
    stub.sign(0)
    stub.sign(0)
    assert stub.take() == [(0, ResetPrefixCache(1))]


CALLS = [lambda router: router.pause("all"), lambda router: router.reset_prefix_cache()]


@pytest.mark.parametrize("call", CALLS, ids=["pause", "reset"])
def test_a_gang_that_is_down_takes_no_orders(call: Callable[[Router], None]) -> None:
    stub = StubGang(2)
    stub.router.give_up(0, "rank 0 died")
    with pytest.raises(GangDown, match="rank 0 died"):
        call(stub.router)
    assert stub.take() == []


@pytest.mark.parametrize("call", CALLS, ids=["pause", "reset"])
def test_a_lost_rank_is_noticed(call: Callable[[Router], None]) -> None:
    stub = StubGang(2)

    def lost(identity: bytes, payload: bytes) -> None:
        raise Unroutable

    link_of(stub.router)._link.send = lost  # type: ignore[method-assign]
    with pytest.raises(GangDown, match="rank 0 is not connected any more"):
        call(stub.router)
