import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.books import DECODE_WEIGHT, EXPECTED_TOKENS, Books, Load, quote

LOADS = st.lists(st.builds(Load, st.integers(0, 9999), st.integers(0, 9999)), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("loads", "prefill", "decode", "start", "rank"),
    [
        ([Load(0, 0), Load(0, 0)], 10, 10, 0, 0),
        ([Load(0, 0), Load(0, 0)], 10, 10, 1, 1),  # ties rotate
        ([Load(0, 5), Load(0, 0)], 10, 10, 0, 1),
        ([Load(100, 0), Load(0, 10)], 100, 1, 0, 1),  # a long prompt avoids the rank that is prefilling
        ([Load(100, 0), Load(0, 100)], 1, 50, 1, 0),  # many tokens to decode avoid the rank that is decoding
        ([Load(0, 50), Load(0, 50), Load(0, 100)], 1, 50, 2, 0),  # nobody exceeds the maximum: least of its own
    ],
)
def test_quote(loads: list[Load], prefill: int, decode: int, start: int, rank: int) -> None:
    assert quote(loads, prefill, decode, start).rank == rank


@given(LOADS, st.integers(1, 999), st.integers(1, 999), st.integers(0, 7))
def test_choice_minimises_resulting_maximum(loads: list[Load], prefill: int, decode: int, start: int) -> None:
    def gang(rank: int) -> int:
        after = [Load(x.prefill + prefill, x.decode + decode) if r == rank else x for r, x in enumerate(loads)]
        return max(x.prefill for x in after) + DECODE_WEIGHT * max(x.decode for x in after)

    chosen = quote(loads, prefill, decode, start % len(loads)).rank
    assert gang(chosen) == min(gang(rank) for rank in range(len(loads)))


def test_choices_of_a_prompt_count_together() -> None:
    """One more sequence may wait for the longer prefill's rank; three would make the busier rank decode too long."""
    books = Books(2)
    books.charge(1, 0, 50, 100)
    books.charge(2, 1, 0, 120)
    assert books.quote(60, 10).rank == 1
    assert books.quote(60, 10, 3).rank == 0
    assert books.quote(60, 100_000, 3).rank == books.quote(60, EXPECTED_TOKENS, 3).rank


def test_burst_spreads_evenly() -> None:
    books = Books(4)
    for request_id in range(40):
        books.charge(request_id, books.quote(32, 64).rank, 32, 64)
    assert books.requests == [10, 10, 10, 10]


@pytest.mark.parametrize("seed", range(10))
def test_burst_stays_even_while_tokens_arrive(seed: int) -> None:
    """Progress of the first requests must not pull the rest of a burst to their ranks."""
    rng = random.Random(seed)
    books = Books(4)
    for request_id in range(40):
        books.charge(request_id, books.quote(32, 64).rank, 32, 64)
        if rng.random() < 0.2:
            books.progress(rng.randrange(request_id + 1))
    assert max(books.requests) - min(books.requests) <= 2


def test_unbounded_answers_count_as_expected_length() -> None:
    books = Books(1)
    books.charge(1, 0, 10, 100_000)
    assert books.loads == [Load(10, EXPECTED_TOKENS)]
    books.progress(1, 5)
    assert books.loads == [Load(0, EXPECTED_TOKENS)]
    books.progress(1, 100_000 - 5 - 3)
    assert books.loads == [Load(0, 3)]


def test_double_charge_is_an_error() -> None:
    books = Books(1)
    books.charge(1, 0, 1, 1)
    with pytest.raises(ValueError, match="request 1"):
        books.charge(1, 0, 1, 1)


def test_a_quote_among_some_ranks() -> None:
    loads = [Load(0, 0), Load(5, 0), Load(9, 0)]
    assert quote(loads, 1, 1).rank == 0
    assert quote(loads, 1, 1, among=[2, 1]).rank == 1
    assert quote(loads, 1, 1, among=[2]) == quote(loads, 1, 1, among=(2,))


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 3000), st.integers(1, 3000)),
        st.tuples(st.just("progress"), st.integers(0, 50), st.integers(1, 900)),
        st.tuples(st.just("release"), st.integers(0, 50), st.just(0)),
    ),
    max_size=80,
)


@given(EVENTS)
def test_books_return_to_zero(events: list[tuple[str, int, int]]) -> None:
    books = Books(3)
    next_id = 0
    for kind, a, b in events:
        if kind == "submit":
            books.charge(next_id, books.quote(a, b).rank, a, b)
            next_id += 1
        elif kind == "progress":
            books.progress(a, b)
        else:
            books.release(a)
            books.release(a)  # twice: an abort and a late completion
        assert all(load.prefill >= 0 and load.decode >= 0 for load in books.loads)
    for request_id in range(next_id):
        books.release(request_id)
    assert books.loads == [Load(0, 0)] * 3
    assert books.requests == [0, 0, 0]
    assert len(books) == 0
