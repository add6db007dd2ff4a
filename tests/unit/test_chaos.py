"""Faults on demand at an engine over a scheduler world's fake model."""

import os
import signal
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_engine.chaos import ChaosError
from dp_engine.messages import Sampling
from tests.scheduler_world import expected, prompt_of
from tests.scripted_link import Script
from tests.unit.test_engine import ENGINES, LATER, Rig, asking, every_engine

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def rig_of(script: Script, **config: Any) -> Rig:
    return Rig(script, chaos=True, **config)


@every_engine
@pytest.mark.parametrize("after", [0, 3])
def test_an_exception_in_the_step_that_was_named(settings: dict[str, Any], after: int) -> None:
    script = asking(0, max_tokens=20)
    script.fault(2, "raise", after_steps=after)
    rig = rig_of(script, **settings)
    with pytest.raises(ChaosError, match=r"^chaos: raise on demand"):
        rig.engine.run()
    assert rig.link.turn == 2 + after
    assert rig.events[-1] in ("vote", "result"), "in the step, not before its vote"


@every_engine
def test_a_gang_that_was_asleep_is_struck_too(settings: dict[str, Any]) -> None:
    script = asking(0, max_tokens=3)
    script.fault(LATER, "raise")
    rig = rig_of(script, **settings)
    with pytest.raises(ChaosError):
        rig.engine.run()
    assert rig.link.turn == LATER
    assert rig.tokens() == expected(prompt_of(1, 20), 3)


@pytest.mark.parametrize("kind", SIGNALS)
def test_signals_to_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = asking(0, max_tokens=9)
    script.fault(1, kind, after_steps=2)
    rig, sent = rig_of(script), list[tuple[int, int, int]]()
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number, rig.link.turn)))
    rig.engine.run()
    assert sent == [(os.getpid(), SIGNALS[kind], 3)]
    assert rig.tokens() == expected(prompt_of(1, 20), 9), "who is continued after a stop goes on"


def test_a_step_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class EnoughWaiting(Exception):
        pass

    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise EnoughWaiting

    monkeypatch.setattr(time, "sleep", sleep)
    script = asking(0)
    script.fault(1, "hang")
    with pytest.raises(EnoughWaiting):
        rig_of(script).engine.run()
    assert min(naps) >= 3600


@every_engine
def test_slow_forwards(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as were asked for, two faults at once add up, and the tokens stay the same."""
    script = asking(0, LATER, max_tokens=12)
    script.fault(1, "slow", seconds=0.5, steps=6)
    script.fault(2, "slow", seconds=0.25, steps=2)
    rig, naps = rig_of(script, **settings), list[float]()
    monkeypatch.setattr(time, "sleep", naps.append)
    rig.engine.run()
    assert naps == [0.5, 0.75, 0.75, 0.5, 0.5, 0.5]
    assert [rig.tokens(number) for number in (1, 2)] == [expected(prompt_of(number, 20), 12) for number in (1, 2)]


@every_engine
def test_a_full_pool_holds_requests_up_for_a_while(settings: dict[str, Any]) -> None:
    script = Script()
    script.fault(0, "full", steps=10)
    script.add(1, 1, prompt_of(1, 20), Sampling(6))
    rig = rig_of(script, **settings)
    for turn in range(10):
        rig.engine.receive()
        rig.engine.step()
        rig.scheduler.check_integrity()
        assert rig.scheduler.pool.num_free == 0 or turn == 9
        assert "submit" not in rig.events
    rig.engine.run()
    assert rig.tokens() == expected(prompt_of(1, 20), 6)
    rig.world.check_drained()


def test_a_full_pool_of_a_sleeping_gang_stays_full_until_steps_have_passed() -> None:
    script = Script()
    script.fault(0, "full", steps=5)
    script.add(LATER, 1, prompt_of(1, 20), Sampling(2))
    rig = rig_of(script)
    rig.engine.run()
    assert len(rig.naps()) == 2
    full, empty = (nap.report for nap in rig.naps())
    assert full is not None and full.used_blocks == full.num_blocks
    assert empty is not None and empty.used_blocks == 0
    assert rig.tokens() == expected(prompt_of(1, 20), 2)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(ENGINES)),
    st.sampled_from(["recompute", "terminate"]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=4),
)
def test_whenever_the_pool_is_full_everything_comes_home(
    engine: str,
    preemption: str,
    prefix_cache: bool,
    requests: list[tuple[int, int, int]],
    faults: list[tuple[int, int]],
) -> None:
    """Requests are answered right, or, where preemption ends them, with that reason; no block is lost."""
    script = Script()
    for number, (turn, prompt, max_tokens) in enumerate(requests, 1):
        script.add(turn, number, prompt_of(number, prompt), Sampling(max_tokens))
    for turn, steps in faults:
        script.fault(turn, "full", steps=steps)
    small = {"block_size": 4, "num_blocks": 40, "preemption": preemption, "prefix_cache": prefix_cache}
    rig = rig_of(script, **small, **ENGINES[engine])
    rig.engine.run()
    rig.scheduler.check_integrity()
    rig.scheduler.resources.hand_back()  # what is withheld from a gang that sleeps for ever
    rig.scheduler.check_integrity()
    rig.world.check_drained()
    answers = rig.link.answers()
    for number, (_, prompt, max_tokens) in enumerate(requests, 1):
        whole, answer = expected(prompt_of(number, prompt), max_tokens), answers[number]
        if answer.reason == "insufficient_system_resource":
            assert preemption == "terminate" and answer.tokens == whole[: len(answer.tokens)]
        else:
            assert answer.reason in ("length", "stop") and answer.tokens == whole


@every_engine
def test_poison(settings: dict[str, Any]) -> None:
    """Strikes in the step that schedules such a request, and in no other."""
    script = Script()
    script.fault(0, "poison", tokens=(7, 8))
    script.add(1, 1, [7, 9, 8, 7], Sampling(3))
    script.add(2, 2, [8, 7, 7], Sampling(3))
    script.add(LATER, 3, [5, 7, 7, 8, 6], Sampling(3))
    rig = rig_of(script, **settings)
    with pytest.raises(ChaosError, match=r"^chaos: request 3 is poison$"):
        rig.engine.run()
    assert rig.link.turn == LATER
    assert [rig.tokens(1), rig.tokens(2)] == [expected([7, 9, 8, 7], 3), expected([8, 7, 7], 3)]


def test_poison_is_no_matter_of_what_was_answered_before() -> None:
    script = Script()
    script.fault(0, "poison", tokens=(7, 8))
    script.add(1, 1, [5, 6, 7, 8], Sampling(3), num_emitted=1)
    rig = rig_of(script)
    rig.engine.run()
    assert len(rig.tokens()) > 0


def test_poison_that_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    script = Script()
    script.fault(0, "poison", tokens=(7,), how="kill")
    script.add(1, 1, [7], Sampling(1))
    rig_of(script).engine.run()
    assert killed == [signal.SIGKILL]


def test_messages_are_lost_by_the_link() -> None:
    script = asking(0)
    script.fault(1, "drop", messages=3, direction="to_rank")
    rig = rig_of(script)
    rig.engine.run()
    assert rig.link.losses == [("to_rank", 3)]


def test_a_rank_without_chaos_refuses_faults() -> None:
    script = asking(0)
    script.fault(1, "raise")
    script.fault(2, "full", steps=1000)
    rig = Rig(script)
    rig.engine.run()
    assert rig.link.reports[-1].bad_messages == 2
    assert rig.tokens() == expected(prompt_of(1, 20), 6)
    rig.world.check_drained()
