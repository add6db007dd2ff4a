"""Faults that no library notices, and what does: the explorer (which of its proofs) or the tally's own proof."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest

from dp_engine.explore import explore_world
from dp_engine.proof.explored import Cast
from dp_engine.proof.standard_worlds import PUBLISHED, standard_worlds, world
from dp_engine.proof.worlds import Router, World
from tests.mutants import (
    AnswersSecondWithFirst,
    DeafToWork,
    EmptyPrefillResets,
    KeepsDeadHead,
    MaxGroup,
    MovesExpertsWhenBusy,
    NeverSleeps,
    OverlapsWhenBusy,
    SkipsSecondBallot,
    SkipsVoteWithoutWork,
    SleepsAlone,
    SleepsInSpiteOfWakeUps,
)
from vote.ballot import AGREED, BALLOT_SIZE, Facts, Lockstep, Tally, write_ballot
from vote.decision import Clock
from vote.explorer import Counterexample, Proof


def one_each(router: Router) -> None:
    router.add(0, 3, 3)
    router.add(1, 3, 4)


def one_after_the_other(router: Router) -> None:
    router.add(0, 3, 6)
    router.add(0, 3, 4)
    router.add(1, 3, 2)


def an_aborted_head(router: Router) -> None:
    first = router.add(0, 17, 3)
    router.add(0, 3, 2)
    router.abort(0, first)


def heads_that_do_not_fit(router: Router) -> None:
    """On both ranks, behind a sequence that runs."""
    for rank in range(2):
        router.add(rank, 7, 5)
        router.add(rank, 7, 1)


WORLDS: dict[str, World] = {
    "calm": world("calm", "a request each", one_each, vote=PUBLISHED),
    "uneven": world("uneven", "more work for one rank", one_after_the_other, vote=PUBLISHED),
    "adaptive": world("adaptive", "more work for one rank", one_after_the_other),
    "dead head": world("dead head", "an aborted head", an_aborted_head, vote=PUBLISHED, release="next_decode",
                       want="head"),
    "full": world("full", "heads that do not fit", heads_that_do_not_fit, vote=PUBLISHED, want="head", num_blocks=4,
                  kv_watermark=1.0, bounded=False),
    "moving": world("moving", "experts move", one_each, rebalance_interval=1),
    **{name: standard_worlds()[name] for name in ("lonely",)},
}  # fmt: skip
AT_ONE = Clock(0, 1)


@dataclass(frozen=True)
class Mutant:
    """Which ranks of a world are played how, and what catches it. `usual`: who plays the same world without a fault."""

    world: str
    cast: Mapping[int, Cast]
    caught: Proof
    usual: Mapping[int, Cast] | None = None


def everywhere(cast: Cast, ranks: int = 2) -> dict[int, Cast]:
    return dict.fromkeys(range(ranks), cast)


MUTANTS = {
    "skips the vote without work": Mutant("calm", {1: Cast(engine=SkipsVoteWithoutWork)}, Proof.LOCKSTEP),
    "skips the second ballot after scheduling": Mutant(
        "calm", everywhere(Cast(protocol=SkipsSecondBallot)), Proof.LOCKSTEP
    ),
    "another interval": Mutant("uneven", {1: Cast(vote={"any_interval": 2})}, Proof.LOCKSTEP),
    "another interval, digest": Mutant("uneven", {1: Cast(vote={"any_interval": 2}, settings=7)}, Proof.TALLY),
    "restarted with decode_step 0": Mutant(
        "calm", {0: Cast(clock=AT_ONE)}, Proof.TALLY, usual=everywhere(Cast(clock=AT_ONE))
    ),
    "MAX for MIN": Mutant("calm", {1: Cast(group=MaxGroup)}, Proof.LOCKSTEP),
    "second ballot answered by a first": Mutant("calm", {1: Cast(protocol=AnswersSecondWithFirst)}, Proof.TALLY),
    "sleeps alone": Mutant("calm", {1: Cast(engine=SleepsAlone)}, Proof.SLEEP),
    "sleeps in spite of wake-ups": Mutant("calm", everywhere(Cast(protocol=SleepsInSpiteOfWakeUps)), Proof.PROGRESS),
    "never sleeps": Mutant("calm", everywhere(Cast(protocol=NeverSleeps)), Proof.SLEEP),
    "a dead request vetoes for ever": Mutant("dead head", everywhere(Cast(scheduler=KeepsDeadHead)), Proof.PROGRESS),
    "an empty prefill resets the counter": Mutant(
        "full", everywhere(Cast(protocol=EmptyPrefillResets)), Proof.PROGRESS
    ),
    "overlap by a local fact": Mutant("uneven", {0: Cast(engine=OverlapsWhenBusy)}, Proof.LOCKSTEP),
    "moves experts by a local fact": Mutant("moving", {1: Cast(engine=MovesExpertsWhenBusy)}, Proof.LOCKSTEP),
    "work that is not told": Mutant("calm", {1: Cast(scheduler=DeafToWork)}, Proof.SLEEP),
    "an interval longer than stated": Mutant("lonely", everywhere(Cast(vote={"any_interval": 5}), 3), Proof.WAIT),
}


@lru_cache
def usual(name: str) -> Counterexample | None:
    return explore_world(WORLDS[name]).counterexample


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    found = explore_world(WORLDS[mutant.world], mutant.cast).counterexample
    assert found is not None, "not caught"
    assert found.proof is mutant.caught, str(found)
    if mutant.usual is None:
        assert usual(mutant.world) is None
    else:
        assert explore_world(WORLDS[mutant.world], mutant.usual).counterexample is None


def test_max_passes_the_tally() -> None:
    """Why MAX for MIN takes the explorer: what is agreed is the same under both, only the votes are turned round."""
    ballots = np.zeros((2, BALLOT_SIZE), np.int32)
    here = Lockstep(**dict.fromkeys(AGREED, 3))
    for row, facts in zip(ballots, (Facts(wants_prefill=True, wake=5), Facts(wake=6)), strict=True):
        write_ballot(row, here, facts)
    least, greatest = Tally(ballots.min(axis=0)), Tally(ballots.max(axis=0))
    assert not least.disagreements() and not greatest.disagreements()
    assert (least.any("wants_prefill"), greatest.any("wants_prefill")) == (True, False)
