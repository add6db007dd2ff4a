"""Long random runs of simulated gangs, with faults and without; a failure names its seed."""

from dataclasses import replace

import pytest

from dp_engine import simulation as command
from dp_engine.messages import Add
from dp_engine.proof.faults import FAULTS
from dp_engine.simulation import Plan, SimulationFailed, simulate
from vote.errors import LockstepBroken

RUNS = [
    (2, 500, 0),
    (2, 500, 5),
    (2, 500, 6),
    (3, 400, 1),
    (3, 400, 2),
    (3, 400, 3),
    (8, 300, 0),
    (8, 300, 1),
    (64, 60, 0),
]


@pytest.mark.parametrize(("ranks", "turns", "seed"), RUNS)
def test_a_gang_answers_everything(ranks: int, turns: int, seed: int) -> None:
    plan = Plan.draw(seed, ranks, turns)
    outcome = simulate(plan)
    assert outcome.turns >= turns and not outcome.errors
    assert sum(outcome.ends.values()) == len(plan.traffic.requests) > 10
    assert outcome.sleeps > 0 and outcome.tokens > 50
    assert (outcome.rebalances > 0) == (plan.rebalance_interval > 0)


def test_the_runs_differ_in_what_matters() -> None:
    plans = [Plan.draw(seed, ranks, turns) for ranks, turns, seed in RUNS]
    kinds = {(plan.engine.policy, plan.engine.overlap) for plan in plans}
    assert len(kinds) == 4
    assert {plan.vote.decision for plan in plans} == {"adaptive", "cadence"}
    assert {plan.engine.preemption for plan in plans} == {"recompute", "terminate"}
    assert {plan.rebalance_interval for plan in plans} == {0, 5, 30}


def test_a_seed_repeats_itself() -> None:
    first, second = (simulate(Plan.draw(4, 3, 100)) for _ in range(2))
    assert (first.steps, first.ends, first.turns, first.tokens) == (
        second.steps,
        second.ends,
        second.turns,
        second.tokens,
    )


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (3, 2), (3, 3), (8, 4)])
def test_a_fault_is_noticed_by_all_and_blamed_on_its_rank(kind: str, ranks: int, seed: int) -> None:
    plan = Plan.draw(seed, ranks, 150, kind)
    outcome = simulate(plan)
    assert plan.fault is not None and outcome.report is not None
    assert plan.fault.rank in outcome.report.culprits
    texts = {error.report for error in outcome.errors.values() if isinstance(error, LockstepBroken)}
    assert texts == {outcome.report.text}, "one report for all"


def test_one_of_sixty_four_is_found() -> None:
    plan = Plan.draw(0, 64, 40, "hangs")
    assert plan.fault is not None
    report = simulate(plan).report
    assert report is not None and set(report.culprits) == {plan.fault.rank}


# ---- the simulation would notice


def test_a_failure_says_how_to_repeat_it() -> None:
    """A token that is not the model's: the router was told to expect another prompt."""
    plan = Plan.draw(3, 2, 60)
    request, (rank, add) = next(iter(plan.traffic.requests.items()))
    other = Add(add.wake, request, [*add.prompt, 7], add.sampling)
    traffic = replace(plan.traffic, requests={request: (rank, other)})
    with pytest.raises(SimulationFailed, match=r"--seed 3 --ranks 2 --steps 60: .*request 1 was told"):
        simulate(replace(plan, traffic=traffic))


def test_a_fault_that_nobody_notices_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(FAULTS["settings"], strike=lambda protocol, runner, worker: None)
    monkeypatch.setitem(FAULTS, "settings", harmless)
    with pytest.raises(SimulationFailed, match="has not noticed"):
        simulate(Plan.draw(1, 2, 60, "settings"))


def test_a_wait_beyond_the_bound_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "longest_wait", lambda vote: 1)
    plan = next(plan for seed in range(9) if (plan := Plan.draw(seed, 2, 300)).engine.policy == "phased")
    with pytest.raises(SimulationFailed, match="has wanted a prefill for 2 steps"):
        simulate(plan)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--ranks", "2", "--steps", "50", "--seed", "1", "--seeds", "2"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["seed 1", "seed 2"]
    assert command.main(["--ranks", "3", "--steps", "50", "--fault", "settings"]) == 0
    assert "voted settings=18 where the others voted 17" in capsys.readouterr().out
