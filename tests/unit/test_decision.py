"""The decisions as tables."""

import numpy as np
import pytest

from vote.ballot import BALLOT_SIZE, Facts, Lockstep, Tally, write_ballot
from vote.config import VoteConfig
from vote.decision import Clock, StepType, decide

P, D, I = StepType.PREFILL, StepType.DECODE, StepType.IDLE  # noqa: E741
HERE = Lockstep(1, 0, 0, 0, 1, 0, 0, 0)

IDLE = Facts()
WANTS = Facts(wants_prefill=True, unfinished=True)
BUSY = Facts(has_decode=True, unfinished=True)
BOTH = Facts(wants_prefill=True, has_decode=True, unfinished=True)
STUCK = Facts(unfinished=True)  # has a request that can neither be prefilled nor decoded now


def decision(config: VoteConfig, decode_step: int, *ranks: Facts) -> StepType:
    ballots = np.zeros((len(ranks), BALLOT_SIZE), np.int32)
    for row, facts in zip(ballots, ranks, strict=True):
        write_ballot(row, HERE, facts)
    return decide(Tally(ballots.min(axis=0)), Clock(step=9, decode_step=decode_step), config)


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


@pytest.mark.parametrize(
    ("decode_step", "ranks", "expected"),
    [
        (0, (WANTS, IDLE), P),
        (0, (WANTS, WANTS), P),
        (0, (WANTS, BUSY), D),
        (1, (WANTS, BUSY), D),
        (2, (WANTS, BUSY), D),
        (3, (WANTS, BUSY), P),
        (0, (BOTH, BOTH), D),
        (1, (BOTH, BOTH), P),
        (99, (BUSY, BUSY), D),
        (99, (IDLE, IDLE), I),
    ],
)
def test_adaptive(decode_step: int, ranks: tuple[Facts, ...], expected: StepType) -> None:
    assert decision(VoteConfig(decision="adaptive", decode_steps_per_prefill=3), decode_step, *ranks) is expected


def test_clock() -> None:
    clock = Clock()
    for step_type, decode_step in ((D, 1), (D, 2), (I, 2), (P, 0), (D, 1)):
        clock = clock.after(step_type)
        assert clock.decode_step == decode_step
    assert clock.step == 5
