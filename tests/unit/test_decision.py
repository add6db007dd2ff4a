"""The decisions as tables."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vote.ballot import BALLOT_SIZE, Facts, Lockstep, Tally, write_ballot
from vote.config import VoteConfig
from vote.decision import RULES, Clock, StepType, decide, price

P, D, I = StepType.PREFILL, StepType.DECODE, StepType.IDLE  # noqa: E741
HERE = Lockstep(1, 0, 0, 0, 1, 0, 0, 0)

IDLE = Facts()
WANTS = Facts(wants_prefill=True, unfinished=True)
BUSY = Facts(has_decode=True, unfinished=True)
BOTH = Facts(wants_prefill=True, has_decode=True, unfinished=True)
STUCK = Facts(unfinished=True)  # has a request that can neither be prefilled nor decoded now


def tally(*ranks: Facts) -> Tally:
    ballots = np.zeros((len(ranks), BALLOT_SIZE), np.int32)
    for row, facts in zip(ballots, ranks, strict=True):
        write_ballot(row, HERE, facts)
    return Tally(ballots.min(axis=0))


def decision(config: VoteConfig, decode_step: int, *ranks: Facts, owed: int = 0) -> StepType:
    return decide(tally(*ranks), Clock(step=9, decode_step=decode_step, owed=owed), config)


PUBLISHED = VoteConfig(decision="cadence", fast_path=False)


@pytest.mark.parametrize(
    ("decode_step", "ranks", "expected"),
    [
        (0, (WANTS, WANTS), P),  # 0 is an ALL point
        (0, (WANTS, BUSY), D),
        (0, (WANTS, IDLE), D),  # the lonely rank
        (1, (WANTS, WANTS), D),
        (69, (BOTH, BOTH), D),
        (70, (BOTH, BOTH), P),
        (70, (BOTH, BUSY), D),
        (100, (BOTH, BUSY), P),  # ANY point
        (100, (BUSY, BUSY), D),
        (99, (BOTH, BUSY), D),
        (140, (BOTH, BOTH), P),
        (200, (IDLE, WANTS), P),
        (700, (BOTH, BUSY), P),  # ALL and ANY meet: ANY wins
        (5, (IDLE, IDLE), I),
        (0, (STUCK, IDLE), D),
    ],
)
def test_cadence_as_published(decode_step: int, ranks: tuple[Facts, ...], expected: StepType) -> None:
    assert decision(PUBLISHED, decode_step, *ranks) is expected


@pytest.mark.parametrize(
    ("decode_step", "ranks", "expected"),
    [
        (1, (WANTS, IDLE), P),
        (37, (IDLE, WANTS, IDLE), P),
        (37, (BUSY, WANTS), D),  # somebody decodes: the interval is protected
        (0, (STUCK, IDLE), D),
    ],
)
def test_fast_path(decode_step: int, ranks: tuple[Facts, ...], expected: StepType) -> None:
    assert decision(VoteConfig(decision="cadence"), decode_step, *ranks) is expected


def runs(running: int, *, wants: bool = False, backlog: bool = False) -> Facts:
    return Facts(wants, running > 0, unfinished=running > 0 or wants, running=running, backlog=backlog)


ADAPTIVE = VoteConfig(
    saved_prefills=0, decode_steps_per_prefill=9, decode_steps_per_shared_prefill=5, decode_steps_per_urgent_prefill=2
)  # fmt: skip


@pytest.mark.parametrize(
    ("decode_step", "ranks", "expected"),
    [
        # nobody decodes: at once
        (0, (WANTS, IDLE), P),
        (0, (WANTS, WANTS), P),
        (99, (IDLE, IDLE), I),
        # nobody wants
        (99, (runs(1), runs(3)), D),
        # an ordinary wish
        (8, (runs(4, wants=True), runs(4)), D),
        (9, (runs(4, wants=True), runs(4)), P),
        (10, (runs(4, wants=True), runs(4)), P),
        # all want
        (4, (runs(4, wants=True), runs(3, wants=True)), D),
        (5, (runs(4, wants=True), runs(3, wants=True)), P),
        (5, (runs(4, wants=True), runs(3, wants=True), runs(3)), D),
        # lonely: less than an eighth of the busiest
        (1, (runs(0, wants=True), runs(1)), D),
        (2, (runs(0, wants=True), runs(1)), P),
        (2, (runs(1, wants=True), runs(8)), D),
        (2, (runs(1, wants=True), runs(9)), P),
        (2, (runs(1, wants=True), runs(9, wants=True)), P),
        (2, (runs(1), runs(9, wants=True)), D),  # the lonely one does not ask
        (2, (runs(7, wants=True), runs(1), runs(57)), P),
        # a backlog anywhere
        (1, (runs(4, wants=True, backlog=True), runs(4)), D),
        (2, (runs(4, wants=True, backlog=True), runs(4)), P),
        (2, (runs(4), runs(1), runs(4, wants=True, backlog=True)), P),
    ],
)
def test_adaptive(decode_step: int, ranks: tuple[Facts, ...], expected: StepType) -> None:
    assert decision(ADAPTIVE, decode_step, *ranks) is expected


@pytest.mark.parametrize("asks", [runs(0, wants=True), runs(4, wants=True), runs(4, wants=True, backlog=True)])
def test_the_least_number_of_decode_steps_counts(asks: Facts) -> None:
    config = VoteConfig(decode_steps_per_prefill=3, saved_prefills=0)
    assert decision(config, 3, asks, runs(4)) is P


SAVING = VoteConfig(decode_steps_per_prefill=10, saved_prefills=2)


@pytest.mark.parametrize(
    ("decode_step", "owed", "expected"),
    [
        (1, 0, P),  # two are saved
        (0, 0, D),  # but a decode step comes first
        (1, 10, P),
        (1, 11, D),
        (9, 11, D),
        (9, 20, D),
        (10, 20, P),  # none is saved, but no wish waits longer
    ],
)
def test_saved_prefills(decode_step: int, owed: int, expected: StepType) -> None:
    assert decision(SAVING, decode_step, runs(4, wants=True), runs(4), owed=owed) is expected


@pytest.mark.parametrize(
    ("config", "ranks", "owed", "expected"),
    [
        (SAVING, (runs(4, wants=True), IDLE), 0, 10),
        (SAVING, (runs(4, wants=True), IDLE), 7, 10),
        (SAVING, (runs(4, wants=True), IDLE), 13, 7),  # never more than for two
        (SAVING, (runs(4, wants=True), IDLE), 20, 0),
        (SAVING, (WANTS, WANTS), 0, 0),  # nobody is interrupted
        (ADAPTIVE, (runs(4, wants=True), IDLE), 0, 0),
        (PUBLISHED, (runs(4, wants=True), IDLE), 0, 0),
    ],
)
def test_price(config: VoteConfig, ranks: tuple[Facts, ...], owed: int, expected: int) -> None:
    assert price(tally(*ranks), Clock(owed=owed), config) == expected


situations = st.builds(
    runs, st.integers(0, 64), wants=st.booleans(), backlog=st.just(False)
) | st.builds(runs, st.integers(0, 64), wants=st.just(True), backlog=st.booleans())  # fmt: skip


@given(st.lists(situations, min_size=1, max_size=5), st.integers(0, 20))
def test_adaptive_bounds_both_sides(ranks: list[Facts], decode_step: int) -> None:
    wanted, decoding = any(rank.wants_prefill for rank in ranks), any(rank.has_decode for rank in ranks)
    granted = decision(ADAPTIVE, decode_step, *ranks) is P
    if granted:
        assert wanted and (not decoding or decode_step >= ADAPTIVE.decode_steps_per_urgent_prefill)
    else:
        assert not wanted or (decoding and decode_step < ADAPTIVE.decode_steps_per_prefill)


@given(st.lists(st.lists(situations, min_size=2, max_size=2), max_size=80))
def test_what_is_owed_is_paid(story: list[list[Facts]]) -> None:
    """Ordinary prefill steps that interrupt others: those that were saved, and one in so many decode steps."""
    config = SAVING.model_copy(update={"decode_steps_per_shared_prefill": 10, "decode_steps_per_urgent_prefill": 10})
    clock, granted, decoded = Clock(), 0, 0
    for ranks in story:
        said = tally(*ranks)
        step_type = decide(said, clock, config)
        granted += step_type is P and said.any("has_decode")
        decoded += step_type is D
        clock = clock.after(step_type, price(said, clock, config))
        assert 0 <= clock.owed <= 20
        assert 10 * granted <= 20 + 10 + decoded


def test_a_rule_of_ones_own_takes_the_place_of_the_named_one() -> None:
    asked, config = tally(runs(4, wants=True), runs(4)), VoteConfig(saved_prefills=0)
    assert decide(asked, Clock(), config, rule=lambda tally, clock, config: tally.any("wants_prefill")) is P
    assert decide(asked, Clock(), config) is D


def test_every_decision_that_can_be_configured_has_a_rule() -> None:
    assert set(RULES) == set(VoteConfig.model_fields["decision"].annotation.__args__)  # type: ignore[union-attr]


def test_clock() -> None:
    clock = Clock()
    for step_type, decode_step in ((D, 1), (D, 2), (I, 2), (P, 0), (D, 1)):
        clock = clock.after(step_type)
        assert clock.decode_step == decode_step
    assert clock.step == 5
    assert Clock(3, 4, 5).after(P, price=7) == Clock(4, 0, 12)
    assert Clock(3, 4, 5).after(D) == Clock(4, 5, 4)
    assert Clock(3, 4, 0).after(D).owed == 0
