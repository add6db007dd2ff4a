"""A gang under load in virtual time: the real protocol and the real phased scheduler, a step that only costs.

Ranks meet over `vote.simulated`. A step takes as long as its slowest rank, plus its ballots. Requests arrive at each
rank at random (Poisson), the same for every decision that is compared. A step that no rank computes anything in costs
its ballot, as in our engine; the published scheduler would run an empty forward there.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from bench.stats import percentile
from dp_engine.batch import Batch
from dp_engine.config import EngineConfig
from dp_engine.messages import Add, Sampling
from dp_engine.phased import PhasedScheduler
from vote.ballot import Tally
from vote.config import VoteConfig
from vote.decision import Clock, Rule, StepType
from vote.protocol import Agreement, StepProtocol
from vote.recorder import Recorder
from vote.simulated import SimulatedGang
from vote.witness import Witness

TOKEN = 50
PROMPT_TOKENS = (32, 512)  # uniform
MEAN_NEW_TOKENS = 256  # exponential
MAX_NEW_TOKENS = 1024
LONELY_RATE = 0.1  # requests a second of the lonely rank, whatever the others get
WARM_UP_S = 12.0  # nothing that arrives, or is computed, before is counted


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a rank's part of a step.

    Chosen, not measured: a mid-size mixture of experts with a GPU per rank, whose decode step of 20 ms hardly depends
    on its batch, and which prefills 25 000 tokens a second. What matters to a decision is how many decode steps a
    prefill step is worth: here 1 to 2 for one prompt, 5 for a full step of 2048 tokens.
    """

    step: float = 20.0
    sequence: float = 0.05  # decode
    kv_token: float = 2e-5  # decode, of all its sequences
    prompt_token: float = 0.04  # prefill
    ballot: float = 0.3

    def of(self, batch: Batch) -> float:
        if batch.step_type is StepType.PREFILL:
            return self.step + self.prompt_token * batch.num_tokens
        return self.step + self.sequence * len(batch) + self.kv_token * int(batch.seqlens_k.sum())


@dataclass(frozen=True)
class Arrival:
    at_ms: float
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Load:
    """`rate`: requests a second of a busy rank. `skew`: equal; lonely: the last rank gets `LONELY_RATE`, all others
    are busy; hot: rank 0 is busy, all others get an eighth."""

    ranks: int
    skew: str
    rate: float
    seconds: float
    seed: int = 0

    def rates(self) -> list[float]:
        if self.skew == "hot":
            return [self.rate] + [self.rate / 8] * (self.ranks - 1)
        return [self.rate] * (self.ranks - 1) + [LONELY_RATE if self.skew == "lonely" else self.rate]

    def arrivals(self) -> list[list[Arrival]]:
        """By rank, in order; a function of the load alone."""
        return [self._arrivals_of(rank, rate) for rank, rate in enumerate(self.rates())]

    def _arrivals_of(self, rank: int, rate: float) -> list[Arrival]:
        rng = np.random.default_rng((self.seed, rank))
        at_ms, arrivals = 0.0, []
        while (at_ms := at_ms + rng.exponential(1e3 / rate)) < 1e3 * self.seconds:
            new_tokens = 1 + int(min(rng.exponential(MEAN_NEW_TOKENS), MAX_NEW_TOKENS - 1))
            arrivals.append(Arrival(at_ms, int(rng.integers(*PROMPT_TOKENS, endpoint=True)), new_tokens))
        return arrivals


def any_every_step(tally: Tally, clock: Clock, config: VoteConfig) -> bool:
    return tally.any("wants_prefill")


def all_only(tally: Tally, clock: Clock, config: VoteConfig) -> bool:
    return tally.all("wants_prefill")


@dataclass(frozen=True)
class Decision:
    config: VoteConfig
    rule: Rule | None = None  # one that no setting names
    memoryless: bool = False  # decides the same until somebody's situation changes


DECISIONS = {
    "cadence": Decision(VoteConfig(decision="cadence", fast_path=False)),  # as published
    "cadence + fast path": Decision(VoteConfig(decision="cadence")),
    "adaptive": Decision(VoteConfig(decision="adaptive")),
    "ANY every step": Decision(VoteConfig(), any_every_step, memoryless=True),
    "ALL only": Decision(VoteConfig(), all_only, memoryless=True),
}

ENGINE = EngineConfig(prefix_cache=False, max_num_seqs=64, max_num_batched_tokens=8192, num_blocks=8192)


@dataclass
class RankLog:
    """What a rank's requests saw, in ms, after the warm-up."""

    first_token: list[float] = field(default_factory=list)
    unserved: list[float] = field(default_factory=list)  # how long those have waited that still do at the end
    intervals: defaultdict[float, int] = field(default_factory=lambda: defaultdict(int))  # rounded -> how often
    tokens: int = 0
    steps: defaultdict[StepType, int] = field(default_factory=lambda: defaultdict(int))
    prefill_ms: float = 0.0


@dataclass(frozen=True)
class Figures:
    """Of one rank or of several. Times in ms. A request that has no token yet counts with the time it has waited."""

    requests: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    interval_mean: float
    interval_p99: float
    tokens_per_s: float
    unserved: int


@dataclass(frozen=True)
class Outcome:
    """A run: shares of prefill among the steps that compute something, by number and by time."""

    ranks: list[Figures]
    busy: Figures  # all but the last rank
    all: Figures
    prefill_steps: float
    prefill_time: float

    @property
    def lonely(self) -> Figures:
        return self.ranks[-1]


def figures(logs: Sequence[RankLog], seconds: float) -> Figures:
    waits = [wait for log in logs for wait in (*log.first_token, *log.unserved)]
    counts: defaultdict[float, int] = defaultdict(int)
    for log in logs:
        for interval, count in log.intervals.items():
            counts[interval] += count
    total = sum(counts.values())
    return Figures(
        requests=len(waits),
        ttft_mean=sum(waits) / max(len(waits), 1),
        ttft_p50=percentile(waits, 0.5),
        ttft_p99=percentile(waits, 0.99),
        interval_mean=sum(interval * count for interval, count in counts.items()) / max(total, 1),
        interval_p99=weighted_percentile(counts, 0.99),
        tokens_per_s=sum(log.tokens for log in logs) / seconds,
        unserved=sum(len(log.unserved) for log in logs),
    )


def weighted_percentile(counts: dict[float, int], share: float) -> float:
    """Nearest rank, as `stats.percentile`, of values that occur several times."""
    left = share * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 1e-9:
            return value
    return 0.0


def simulate(load: Load, decision: Decision, costs: Costs = Costs(), engine: EngineConfig = ENGINE) -> Outcome:
    """Run the gang for `load.seconds` of its own time."""
    gang = _Gang(load.ranks)
    ranks = [
        _Rank(gang, rank, arrivals, load, decision, costs, engine) for rank, arrivals in enumerate(load.arrivals())
    ]
    for result in gang.run([rank.run for rank in ranks]):
        if isinstance(result, Exception):
            raise result
    logs, seconds = [rank.log for rank in ranks], load.seconds - WARM_UP_S
    steps = logs[0].steps
    computed = steps[StepType.PREFILL] + steps[StepType.DECODE]
    return Outcome(
        ranks=[figures([log], seconds) for log in logs],
        busy=figures(logs[:-1], seconds),
        all=figures(logs, seconds),
        prefill_steps=steps[StepType.PREFILL] / max(computed, 1),
        prefill_time=logs[0].prefill_ms / (1e3 * seconds),
    )


class _Gang(SimulatedGang):
    """Tallies each vote once, for all ranks."""

    def tally(self, rank: int, ballot: np.ndarray) -> np.ndarray:
        ballots = self.meet(rank, "control", ballot)
        if rank == 0:  # the first to go on
            self._tally = np.minimum.reduce(ballots)
        return self._tally


class _Group:
    """One rank's control group."""

    def __init__(self, gang: _Gang, rank: int) -> None:
        self._gang = gang
        self.rank = rank
        self.size = gang.size

    def all_reduce_min(self, vector: np.ndarray) -> np.ndarray:
        return self._gang.tally(self.rank, vector)

    def close(self) -> None:
        """Nothing is open."""


class _Rank:
    """The step loop without a link: requests come by a list, tokens go into a log."""

    def __init__(
        self, gang: _Gang, rank: int, arrivals: list[Arrival], load: Load, decision: Decision, costs: Costs,
        engine: EngineConfig,
    ) -> None:  # fmt: skip
        self.log = RankLog()
        self._gang = gang
        self._rank = rank
        self._arrivals = arrivals
        self._end_ms = 1e3 * load.seconds
        self._memoryless = decision.memoryless
        self._costs = costs
        self._votes = 0
        self._now = 0.0  # ms; the same on all ranks
        self._arrived = 0
        self._unserved: dict[int, float] = {}  # requests without a token -> when they arrived
        self._told: dict[int, float] = {}  # running requests -> when they had their last token
        assert engine.num_blocks is not None
        self._scheduler = PhasedScheduler(engine, engine.num_blocks, MAX_NEW_TOKENS + PROMPT_TOKENS[1], [0])
        self._protocol = StepProtocol(
            _Group(gang, rank), decision.config, Witness(Recorder(rank, load.ranks)), on_ballot=self._count_vote,
            rule=decision.rule,
        )  # fmt: skip

    def run(self) -> None:
        scheduler = self._scheduler
        while self._now < self._end_ms:
            self._receive()
            agreement = self._protocol.agree(scheduler.facts(), scheduler.try_prefill)
            self._now += self._votes * self._costs.ballot
            self._votes = 0
            if agreement.compute:
                self._compute(agreement)
            elif agreement.sleep or self._memoryless:
                self._now = max(self._now, min(self._gang.meet(self._rank, "arrival", self._next_arrival())))
        self.log.unserved = [self._now - at_ms for at_ms in self._unserved.values() if at_ms >= 1e3 * WARM_UP_S]

    def _count_vote(self, seconds: float) -> None:
        self._votes += 1

    def _next_arrival(self) -> float:
        return self._arrivals[self._arrived].at_ms if self._arrived < len(self._arrivals) else self._end_ms

    def _receive(self) -> None:
        while self._next_arrival() <= self._now and self._arrived < len(self._arrivals):
            arrival = self._arrivals[self._arrived]
            prompt = list(repeat(TOKEN, arrival.prompt_tokens))
            self._unserved[self._arrived] = arrival.at_ms
            self._scheduler.add(Add(0, self._arrived, prompt, Sampling(arrival.new_tokens, ignore_eos=True)))
            self._arrived += 1

    def _compute(self, agreement: Agreement) -> None:
        scheduler, began = self._scheduler, self._now
        scheduler.plan(agreement.step_type)
        batch = scheduler.batch()
        self._now += max(self._gang.meet(self._rank, "step", self._costs.of(batch)))
        output = scheduler.settle(np.full(batch.num_outputs, TOKEN))
        counted = began >= 1e3 * WARM_UP_S
        if counted:
            self.log.steps[agreement.step_type] += 1
            self.log.prefill_ms += (self._now - began) * (agreement.step_type is StepType.PREFILL)
            self.log.tokens += len(output.tokens)
        for request in output.request_ids:
            before = self._told.get(request)
            self._told[request] = self._now
            if before is None:
                self._first_token(self._unserved.pop(request))
            elif counted:
                self.log.intervals[round(self._now - before, 1)] += 1
        for request, _ in output.finished:
            del self._told[request]

    def _first_token(self, arrived_ms: float) -> None:
        if arrived_ms >= 1e3 * WARM_UP_S:
            self.log.first_token.append(self._now - arrived_ms)
