"""Requests that outlive their gang: where they wait, how they go on, who is suspected of what."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_engine.messages import Add, Output, Sampling, TokenLogprobs
from launcher.books import Load
from launcher.death import Death
from launcher.keys import LaunchKeys
from launcher.router import GangDown, QueueFull, Router, Ticket
from launcher.suspicion import PROBATION_TOKENS
from launcher.ticket import RequestPoisoned
from tests.fake_gang import collect, open_link, run
from tests.fake_rank import FakeRank
from tests.lives import Lives


def submit(lives: Lives, *prompt: int, max_tokens: int = 20, **options: Any) -> Ticket:
    return lives.router.submit(list(prompt), Sampling(max_tokens=max_tokens), **options)


def test_a_request_goes_on_as_its_prompt_and_the_tokens_so_far() -> None:
    lives = Lives(1)
    ticket = submit(lives, 7, 8, priority=3, cache_salt="s")
    lives.emit(ticket, 4, 5)
    lives.adds()
    lives.links[0].fail("rank 0 died")
    assert lives.router.num_waiting == 1 and not lives.router.ready
    lives.begin()
    [(_, epoch, rank, add)] = lives.adds()
    assert (epoch, rank, add.prompt, add.num_emitted) == (2, 0, [7, 8, 4, 5], 2)
    assert (add.priority, add.cache_salt, add.sampling.max_tokens, add.request_id) == (3, "s", 20, ticket.request_id)
    assert lives.links[0].books.loads == [Load(4, 18)]
    lives.emit(ticket, 6, end="stop")
    delta = ticket.take()
    assert (delta.tokens, delta.finish_reason) == ([4, 5, 6], "stop")
    assert lives.router.inflight == 0


def test_late_words_of_a_dead_gang_are_not_heard() -> None:
    lives = Lives(1)
    ticket = submit(lives, 7)
    lives.emit(ticket, 4)
    old = lives.links[0]
    old.fail("cut off")
    lives.say(old, 0, Output(2, [ticket.request_id], [99], [(ticket.request_id, "stop")]))
    new = lives.begin()
    lives.say(old, 0, Output(3, [ticket.request_id], [99], []))
    assert ticket.link is new and ticket.open
    lives.emit(ticket, 5)
    assert ticket.take().tokens == [4, 5]


def test_logprobs_come_once() -> None:
    lives = Lives(1)
    ticket = submit(lives, 7)
    one = TokenLogprobs(-1.0, [(3, -1.0)])
    lives.say(lives.links[0], 0, Output(1, [ticket.request_id], [4], [], None, [one]))
    assert ticket.take().logprobs == [one]
    lives.die({0}, innocent=True)
    lives.begin()
    lives.say(lives.links[0], 0, Output(1, [ticket.request_id], [5], [], None, [one]))
    assert (delta := ticket.take()).logprobs == [one] and delta.tokens == [5]


def test_new_requests_wait_behind_those_that_go_on() -> None:
    lives = Lives(1, max_inflight=3)
    old = submit(lives, 1)
    lives.die({0}, innocent=True)
    new = [submit(lives, 2), submit(lives, 3)]
    with pytest.raises(QueueFull):
        submit(lives, 4)
    lives.adds()
    lives.begin()
    assert [entry[3].request_id for entry in lives.adds()] == [old.request_id, *(ticket.request_id for ticket in new)]


def test_before_the_first_gang_is_there_nothing_is_taken() -> None:
    router = Router(1)
    router.open(0, LaunchKeys.generate(), 1)
    with pytest.raises(GangDown, match="waiting for rank 0"):
        router.submit([1], Sampling(max_tokens=1))


def test_work_moves_to_the_other_gang_at_once() -> None:
    lives = Lives(1, replicas=2)
    tickets = [submit(lives, number) for number in range(4)]
    assert sorted(ticket.link.replica for ticket in tickets if ticket.link) == [0, 0, 1, 1]
    lives.adds()
    moved = [ticket for ticket in tickets if ticket.link is lives.links[0]]
    assert lives.die({0}, innocent=True) == 2
    assert [(entry[0], entry[3].request_id) for entry in lives.adds()] == [(1, ticket.request_id) for ticket in moved]
    assert lives.router.ready
    assert lives.links[1].books.requests == [4]


def test_an_abort_while_waiting_ends_the_request_for_good() -> None:
    lives = Lives(1)
    ticket = submit(lives, 1)
    lives.links[0].fail("it died")
    lives.router.abort(ticket)
    lives.adds()
    lives.begin()
    assert lives.adds() == []
    assert ticket.take().finish_reason == "abort"
    assert lives.router.unplaced["abort"] == 1


def test_the_pause_mode_outlives_a_gang() -> None:
    lives = Lives(2)
    lives.router.pause("all")
    lives.die(None)
    lives.sent.clear()
    lives.begin()
    assert [entry[3].mode for entry in lives.sent if hasattr(entry[3], "mode")] == ["all", "all"]


def test_a_fork_goes_on_alone() -> None:
    lives = Lives(2)
    first = submit(lives, 1, 2, choices=2)
    second = submit(lives, 1, 2, choices=2, parent=first)
    assert second.rank == first.rank
    lives.emit(first, 5)
    lives.die({first.rank}, innocent=True)
    lives.adds()
    lives.begin()
    adds = {entry[3].request_id: entry[3] for entry in lives.adds()}
    assert adds[first.request_id].prompt == [1, 2, 5]
    assert adds[first.request_id].parent == 0


# ---- suspects


def test_only_requests_on_the_rank_at_fault_are_suspected() -> None:
    lives = Lives(2)
    tickets = [submit(lives, number) for number in range(6)]
    on_one = [ticket for ticket in tickets if ticket.rank == 1]
    lives.die({1})
    assert {ticket for ticket in tickets if ticket.suspect} == set(on_one)
    assert [ticket.deaths for ticket in tickets if ticket.suspect] == [["it died"]] * 3


def test_suspects_are_tried_one_a_rank_and_acquitted_after_some_tokens() -> None:
    lives = Lives(2)
    tickets = [submit(lives, number) for number in range(6)]
    lives.die(None)
    lives.adds()
    lives.begin()
    assert [entry[2] for entry in lives.adds()] == [0, 1], "one for each rank"
    assert lives.router.num_waiting == 4
    ordinary = submit(lives, 9)
    assert ordinary.link is not None, "others are not held up"
    lives.emit(tickets[0], *range(PROBATION_TOKENS - 1))
    assert tickets[0].suspect
    lives.adds()
    lives.emit(tickets[0], 1)
    assert not tickets[0].suspect
    assert [(entry[2], entry[3].request_id) for entry in lives.adds()] == [(0, tickets[2].request_id)]
    lives.emit(tickets[1], 1, end="stop")
    assert [(entry[2], entry[3].request_id) for entry in lives.adds()] == [(1, tickets[3].request_id)]


def test_a_request_that_ends_its_rank_each_time_is_failed_at_the_second_death() -> None:
    lives = Lives(2)
    poison, others = submit(lives, 13), [submit(lives, number) for number in range(7)]
    for death in range(2):
        assert poison.link is not None
        lives.die({poison.rank}, reason=f"death {death}")
        lives.begin()
        for ticket in others:
            if ticket.link is not None and ticket.suspect and poison.open:
                lives.emit(ticket, *range(PROBATION_TOKENS))
    with pytest.raises(RequestPoisoned, match=r"2 times.*death 0; death 1"):
        poison.take()
    while suspects := [ticket for ticket in others if ticket.suspect and ticket.link is not None]:
        lives.emit(suspects[0], *range(PROBATION_TOKENS))
    assert all(ticket.open and not ticket.suspect for ticket in others)
    for ticket in others:
        lives.emit(ticket, 1, end="stop")
    assert lives.router.inflight == 0
    assert lives.links[0].probation == {}


def test_what_no_request_can_cause_is_held_against_none() -> None:
    lives = Lives(1)
    ticket = submit(lives, 1)
    for _ in range(10):
        lives.die({0}, innocent=True)
        lives.begin()
    assert ticket.open and not ticket.deaths and not ticket.suspect


def test_a_request_that_gets_over_its_deaths_is_failed_in_the_end() -> None:
    """One that ends its rank some tokens later each time."""
    lives = Lives(1)
    ticket = submit(lives, 1, max_tokens=10_000)
    deaths = 0
    while ticket.open:
        lives.emit(ticket, *range(PROBATION_TOKENS))
        lives.die({0})
        deaths += 1
        lives.begin()
    assert deaths == 8


def test_a_verdict_that_comes_late_counts_all_the_same() -> None:
    lives = Lives(1, replicas=2)
    ticket = submit(lives, 1)
    assert ticket.link is lives.links[0]
    lives.links[0].fail("first")
    assert ticket.link is lives.links[1] and ticket.suspect
    lives.links[1].fail("second")
    lives.router.bury(0, 1, Death("first", frozenset({0})))
    assert ticket.open
    lives.router.bury(1, 1, Death("second", frozenset({0})))
    with pytest.raises(RequestPoisoned):
        ticket.take()


def test_a_suspect_that_is_cleared_late_leaves_its_probation() -> None:
    lives = Lives(1, replicas=2)
    ticket = submit(lives, 1)
    lives.links[0].fail("first")
    assert lives.links[1].probation == {0: ticket}
    lives.router.bury(0, 1, Death("a host was lost", frozenset({0}), innocent=True))
    assert lives.links[1].probation == {} and not ticket.suspect


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["submit", "begin", "drop"]), st.integers(0, 1), st.just(0)),
        st.tuples(st.sampled_from(["emit", "end", "abort"]), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("die"), st.integers(0, 1), st.integers(-1, 2)),
        st.tuples(st.sampled_from(["full", "lose"]), st.integers(0, 1), st.integers(0, 1)),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(STEPS)
def test_nothing_is_lost_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    """Every request gets its own tokens 0, 1, 2 ... without a gap; afterwards all books are empty."""
    lives = Lives(2, replicas=2)
    tickets: list[Ticket] = []
    for kind, a, b in steps:
        play(lives, tickets, kind, a, b)
        check(lives, tickets)
    lives.full.clear()
    lives.lost.clear()
    for replica in (0, 1):
        if lives.links[replica].down is not None:
            lives.begin(replica)
    for _ in range(400):
        for ticket in tickets:
            if ticket.open and ticket.link is not None:
                lives.emit(ticket, len(ticket.emitted), end="stop" if len(ticket.emitted) > 8 else None)
    assert lives.router.inflight == 0 == lives.router.num_waiting
    assert all(link.books.loads == [Load(0, 0)] * 2 and link.probation == {} for link in lives.links.values())
    assert all(ticket.emitted == list(range(len(ticket.emitted))) for ticket in tickets)


def play(lives: Lives, tickets: list[Ticket], kind: str, a: int, b: int) -> None:
    ticket = tickets[a % len(tickets)] if tickets else None
    if kind == "submit":
        try:
            tickets.append(submit(lives, 1, 2, max_tokens=5000))
        except QueueFull:
            return
    elif kind == "begin":
        if lives.links[a].down is not None:
            lives.begin(a)
    elif kind == "drop":
        lives.links[a].fail("dropped")  # the verdict comes with a later death, or never
    elif kind == "die":
        lives.die(None if b < 0 else {min(b, 1)}, replica=a, innocent=b == 2)
    elif kind == "full":
        lives.full ^= {(a, b)}
    elif kind == "lose":
        lives.lost[a, b] = 1
    elif ticket is None:
        return
    elif kind == "abort":
        lives.router.abort(ticket)
    elif ticket.open and ticket.link is not None and ticket.link.down is None:
        lives.emit(ticket, len(ticket.emitted), end="stop" if kind == "end" else None)


def check(lives: Lives, tickets: list[Ticket]) -> None:
    for link in lives.links.values():
        running = [ticket for ticket in tickets if ticket.open and ticket.link is link]
        assert sum(link.books.requests) == len(running)
        assert all(ticket.suspect and ticket.link is link for ticket in link.probation.values())
    open_ones = [ticket for ticket in tickets if ticket.open]
    assert lives.router.inflight == len(open_ones)
    assert lives.router.num_waiting == sum(ticket.link is None for ticket in open_ones)


def test_a_gang_that_ends_while_it_is_given_work_loses_none() -> None:
    """Several suspects are given places when the last rank turns out to be gone."""
    lives = Lives(3)
    tickets = [submit(lives, number) for number in range(6)]
    lives.die(None)
    lives.lost[0, 2] = 1
    lives.begin()
    assert lives.links[0].down is not None
    assert lives.router.num_waiting == 6 and all(ticket.link is None for ticket in tickets)
    lives.begin()
    for _ in range(8):
        for ticket in tickets:
            if ticket.link is not None and ticket.open:
                lives.emit(ticket, 1, end="stop")
    assert [ticket.take().finish_reason for ticket in tickets] == ["stop"] * 6


# ---- over sockets


def test_streams_go_on_over_real_sockets() -> None:
    """Two lives of a gang of two; the second one counts on where the first one stopped."""

    def count_on(add: Add) -> Iterator[int]:
        token = add.num_emitted
        while True:
            yield token
            token += 1

    async def test() -> None:
        router = Router(2)
        tickets: list[Ticket] = []
        with ExitStack() as stack:
            for epoch in (1, 2):
                keys = LaunchKeys.generate()
                link = await open_link(router, keys, epoch=epoch)
                ranks = [
                    stack.enter_context(
                        FakeRank(link.endpoint, keys.for_rank(), rank, 2, reply=count_on, epoch=epoch, tick_s=0.002)
                    )
                    for rank in (0, 1)
                ]
                await link.wait_ready(10)
                if epoch == 1:
                    tickets += [router.submit([5], Sampling(max_tokens=100)) for _ in range(8)]
                    while min(len(ticket.emitted) for ticket in tickets) < 10:
                        await asyncio.sleep(0.005)
                    ranks[1].die("out of memory")
                    await link.wait_down()
                    assert router.bury(0, 1, Death("out of memory", frozenset({1}))) == 8
                    await link.close()
            for tokens, reason in await asyncio.gather(*map(collect, tickets)):
                assert (tokens, reason) == (list(range(100)), "length")
            await router.close()

    run(test)
