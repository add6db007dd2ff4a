"""Long random runs of a simulated gang: `python -m dp_engine.simulation --ranks 8 --steps 5000 --seed 3`.

The real step loops, schedulers and protocol of 2 to 64 ranks, over a group without processes and a model that can be
checked. Settings, traffic and faults come from the seed alone, so a failure is told and repeated by its seed.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from dp_engine.config import EngineConfig
from dp_engine.engine import Engine, StepCounters
from dp_engine.policies import make_scheduler
from dp_engine.proof.explored import HeardProtocol, could_work
from dp_engine.proof.faults import FAULTS, Fault, Gone, SimulatedReporter
from dp_engine.proof.pretended import PretendedModel, continuation
from dp_engine.proof.simulated_rank import SimulatedLink, SimulatedRebalancer, SimulatedRunner, Turns
from dp_engine.proof.traffic import Traffic, random_traffic
from dp_engine.worker import StepWorker
from vote.config import VoteConfig
from vote.decision import StepType
from vote.errors import LockstepBroken
from vote.foresight import longest_wait
from vote.protocol import Agreement, StepProtocol
from vote.recorder import Recorder
from vote.report import Report
from vote.simulated import SimulatedGang
from vote.witness import Witness

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 10, 4, 64


class SimulationFailed(AssertionError):
    """Something was not as it must be; the message has the seed."""


@dataclass(frozen=True)
class Plan:
    """What is simulated; all of it follows from the seed."""

    seed: int
    ranks: int
    turns: int
    engine: EngineConfig
    vote: VoteConfig
    traffic: Traffic
    fault: Fault | None = None
    rebalance_interval: int = 0  # forwards from one round of moving experts to the next

    @classmethod
    def draw(cls, seed: int, ranks: int, turns: int, fault: str | None = None) -> "Plan":
        """`turns`: of traffic; the gang goes on until all is done. `fault`: one of FAULTS."""
        random = Random(f"{seed} {ranks} {turns}")
        engine = EngineConfig(
            policy=random.choice(("phased", "unified")), overlap=random.random() < 0.5, block_size=BLOCK_SIZE,
            max_num_seqs=random.choice((2, 4, 6)), max_num_batched_tokens=random.choice((8, 16)),
            kv_watermark=random.choice((0.5, 0.9, 1.0)), preemption=random.choice(("terminate", "recompute")),
            num_draft_tokens=random.choice((0, 0, 2)), prefix_cache=random.random() < 0.5,
        )  # fmt: skip
        vote = VoteConfig(
            decision=random.choice(("adaptive", "cadence")), all_interval=random.randint(1, 9),
            any_interval=random.randint(1, 12), fast_path=random.random() < 0.5,
            decode_steps_per_prefill=random.randint(4, 12), decode_steps_per_shared_prefill=random.randint(1, 4),
            decode_steps_per_urgent_prefill=random.randint(1, 2), saved_prefills=random.randint(1, 3),
        )  # fmt: skip
        traffic = random_traffic(random, ranks, turns)
        drawn = Fault(fault, random.randrange(ranks), random.randint(turns // 4, turns // 2)) if fault else None
        return cls(seed, ranks, turns, engine, vote, traffic, drawn, random.choice((0, 5, 30)))


@dataclass
class Outcome:
    """What has happened. `ends`: how requests ended, by reason; `report`: of the gang's end, if it broke."""

    turns: int = 0
    sleeps: int = 0
    steps: Counter[StepType] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    waited: int = 0
    rebalances: int = 0
    report: Report | None = None
    errors: dict[int, Exception] = field(default_factory=dict)


def simulate(plan: Plan) -> Outcome:
    """Raises SimulationFailed."""
    simulation = _Simulation(plan)
    try:
        return simulation.run()
    except AssertionError as error:
        call = f"--seed {plan.seed} --ranks {plan.ranks} --steps {plan.turns}"
        fault = f" --fault {plan.fault.kind}" if plan.fault else ""
        raise SimulationFailed(f"python -m dp_engine.simulation {call}{fault}: {error}") from error


class _Simulation:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.gang = SimulatedGang(plan.ranks)
        self.turns = Turns()
        self.recorders = [Recorder(rank, plan.ranks) for rank in range(plan.ranks)]
        self.reporter = SimulatedReporter(self.recorders, plan.fault)
        self.agreements: list[Agreement] = []
        self.outcome = Outcome()
        limited = plan.engine.policy == "phased"
        self.longest_wait = longest_wait(plan.vote) if limited else 0
        self.broke_at: int | None = None

    def run(self) -> Outcome:
        results = self.gang.run([partial(self._rank, rank) for rank in range(self.plan.ranks)])
        self.outcome.turns = self.turns.last
        self.outcome.errors = {rank: error for rank, error in enumerate(results) if isinstance(error, Exception)}
        self.outcome.report = self.reporter.made
        if self.plan.fault is None:
            for error in self.outcome.errors.values():
                raise AssertionError(f"{type(error).__name__}: {error}") from error
        else:
            self._all_noticed(self.plan.fault)
        return self.outcome

    def _rank(self, rank: int) -> None:
        """One rank, from its first vote to its end."""
        plan, config = self.plan, self.plan.engine
        recorder = self.recorders[rank]
        runner = SimulatedRunner(self.gang, rank, PretendedModel(NUM_BLOCKS, BLOCK_SIZE), recorder.data)
        rebalancer = SimulatedRebalancer(runner, plan.rebalance_interval) if plan.rebalance_interval else None
        worker = StepWorker(runner, recorder.data, rebalancer)  # type: ignore[arg-type]
        mixed = config.policy == "unified"
        protocol = StepProtocol(
            self.gang.group(rank), plan.vote, Witness(recorder, self.reporter), mixed=mixed, settings=17,
            count_collectives=lambda: worker.num_collectives, placement=lambda: worker.placement,
        )  # fmt: skip
        scheduler = make_scheduler(config, NUM_BLOCKS, MAX_MODEL_LEN, [2])
        link = SimulatedLink(self.turns, rank, plan.traffic.arrivals[rank])
        heard = HeardProtocol(protocol)
        parts: Any = (link, heard, scheduler, worker, StepCounters())
        engine = Engine(*parts, mixed=mixed, overlap=config.overlap, ring=recorder.control)
        fault = plan.fault if plan.fault is not None and plan.fault.rank == rank else None
        waited = votes = 0
        try:
            while True:
                engine.receive()
                if fault is not None and link.turn >= fault.turn:
                    self.broke_at = protocol.clock.step
                    fault.strike(protocol, runner, worker)
                    fault = None
                slept = link.sleeps
                goes_on = engine.step()
                votes = self._same(votes, heard.agreement, goes_on)
                waited = waited + 1 if heard.facts.wants_prefill and not heard.served and goes_on else 0
                self._in_time(rank, waited)
                assert link.sleeps == slept or not could_work(scheduler), f"rank {rank} sleeps, but could work"
                if not goes_on:
                    break
        except Exception as error:
            if plan.fault is not None and plan.fault.rank == rank and plan.fault.in_forward:
                self.broke_at = recorder.data.step
            if not isinstance(error, (LockstepBroken, Gone)):
                recorder.last_words(f"{type(error).__name__}: {error}")
            raise
        scheduler.check_integrity()
        left = (scheduler.num_unfinished, scheduler.pool.num_used, worker.num_collectives - runner.num_collectives)
        assert not any(left), f"rank {rank} has left over: requests, blocks, collectives {left}"
        self.outcome.rebalances = rebalancer.rounds if rebalancer is not None else 0
        self._judge(rank, link)

    def _same(self, number: int, agreement: Agreement, goes_on: bool) -> int:
        """Every rank's agreement of this number is the same."""
        if number == len(self.agreements):
            self.agreements.append(agreement)
            self.outcome.steps[agreement.step_type] += agreement.compute and goes_on
            self.outcome.sleeps += agreement.sleep
        assert self.agreements[number] == agreement, f"{agreement} where others have {self.agreements[number]}"
        return number + 1

    def _in_time(self, rank: int, waited: int) -> None:
        self.outcome.waited = max(self.outcome.waited, waited)
        assert waited <= self.longest_wait, f"rank {rank} has wanted a prefill for {waited} steps"

    def _judge(self, rank: int, link: SimulatedLink) -> None:
        """All requests of a rank were answered as the model would."""
        for request, (owner, add) in self.plan.traffic.requests.items():
            if owner != rank:
                continue
            tokens, reason = link.tokens[request], link.ends.get(request)
            wanted = continuation(add.prompt, add.sampling.max_tokens)
            assert tokens == wanted[: len(tokens)], f"request {request} was told {tokens} instead of {wanted}"
            assert reason != "length" or len(tokens) == len(wanted), f"request {request} is too short"
            may_lack = request in self.plan.traffic.aborted
            assert reason is not None or may_lack, f"request {request} has no end"
            self.outcome.ends[reason or "abort"] += 1
            self.outcome.tokens += len(tokens)

    def _all_noticed(self, fault: Fault) -> None:
        """Every other rank got LockstepBroken in the very step, and the report names the culprit."""
        errors = self.outcome.errors
        for rank in range(self.plan.ranks):
            if rank != fault.rank:
                error = errors.get(rank)
                assert isinstance(error, LockstepBroken), f"rank {rank} has not noticed {fault}: {error!r}"
                assert error.step == self.broke_at, f"rank {rank} noticed {fault} at step {error.step}"
        report = self.reporter.made
        assert report is not None, "nobody asked for a report"
        blamed = set(report.culprits)
        enough = {fault.rank} <= blamed if fault.silent and self.plan.ranks == 2 else blamed == {fault.rank}
        assert enough, f"{fault} was blamed on {report.culprits}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dp_engine.simulation", description="Simulate a gang at random.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5000, help="turns with traffic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="so many, one after the other")
    parser.add_argument("--fault", choices=sorted(FAULTS))
    options = parser.parse_args(arguments)
    for seed in range(options.seed, options.seed + options.seeds):
        started = time.perf_counter()
        plan = Plan.draw(seed, options.ranks, options.steps, options.fault)
        try:
            outcome = simulate(plan)
        except SimulationFailed as error:
            print(error, file=sys.stderr)
            return 1
        print(f"seed {seed}: {_words(plan, outcome)}, {time.perf_counter() - started:.1f} s", flush=True)
        if outcome.report is not None and options.seeds == 1:
            print(outcome.report.text)
    return 0


def _words(plan: Plan, outcome: Outcome) -> str:
    engine = plan.engine
    settings = f"{engine.policy}{' overlap' * engine.overlap} {plan.vote.decision} {engine.preemption}"
    if outcome.report is not None:
        return f"{settings}: {plan.fault}: " + "; ".join(f"rank {r} {w}" for r, w in outcome.report.culprits.items())
    steps = ", ".join(f"{count} {kind.value}" for kind, count in outcome.steps.items() if count)
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(outcome.ends.items()))
    moved = f", {outcome.rebalances} rebalances" * bool(plan.rebalance_interval)
    waited = f", waited {outcome.waited} at most" * (engine.policy == "phased")
    return f"{settings}: {outcome.turns} turns, {steps}, {outcome.sleeps} sleeps{moved}; requests: {ends}{waited}"


if __name__ == "__main__":
    sys.exit(main())
