"""The step loop of a rank."""

import logging
import time
from dataclasses import dataclass, field, replace

from dp_engine.admission import Refused
from dp_engine.batch import Batch, StepStats
from dp_engine.chaos import Chaos
from dp_engine.compiler import GrammarCompiler
from dp_engine.grammar import GrammarError, Matcher
from dp_engine.link import Link
from dp_engine.messages import (
    BALLOT_BUCKETS_S,
    FIRST_TOKEN_BUCKETS_S,
    Abort,
    Add,
    ExpertReport,
    Fault,
    Histogram,
    Output,
    Pause,
    Ready,
    Rejected,
    Report,
    ResetPrefixCache,
    Shutdown,
    ToRank,
    Wake,
    empty_histogram,
)
from dp_engine.output import StepOutput
from dp_engine.scheduler import Scheduler
from dp_engine.worker import StepWorker
from ep.dispatch import CollectiveFailed
from ep.rebalance import Rebalancer
from vote.ballot import Facts
from vote.decision import StepType
from vote.protocol import Agreement, StepProtocol
from vote.recorder import Recorder, Ring

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25


@dataclass
class StepCounters:
    """Cumulative since the rank's start; `Report` says what they mean."""

    steps: dict[StepType, int] = field(default_factory=lambda: dict.fromkeys(StepType, 0))
    placeholder_steps: int = 0
    idle_sleeps: int = 0
    batched_tokens: int = 0
    sum_qk: int = 0
    last: StepStats = field(default_factory=StepStats)  # of the last step that was not a placeholder
    ballots: Histogram = field(default_factory=lambda: empty_histogram(BALLOT_BUCKETS_S))
    first_tokens: Histogram = field(default_factory=lambda: empty_histogram(FIRST_TOKEN_BUCKETS_S))

    def count_ballot(self, seconds: float) -> None:
        self.ballots.add(BALLOT_BUCKETS_S, seconds)

    def count_step(self, batch: Batch) -> None:
        self.steps[batch.step_type] += 1
        if not len(batch):
            self.placeholder_steps += 1
            return
        self.last = batch.stats()
        self.batched_tokens += self.last.num_batched_tokens
        self.sum_qk += self.last.sum_qk

    def count_output(self, output: StepOutput) -> None:
        for seconds in output.first_token_s:
            self.first_tokens.add(FIRST_TOKEN_BUCKETS_S, seconds)


class Engine:
    """Votes, schedules, computes, settles; one step after the other, until all ranks were asked to stop.

    With overlap a step is computed by `worker` while the next one is voted on and planned. Whether a step is in flight
    follows from the tallies alone, so it is the same on all ranks at every vote.
    """

    def __init__(
        self,
        link: Link,
        protocol: StepProtocol,
        scheduler: Scheduler,
        worker: StepWorker,
        counters: StepCounters,
        *,
        mixed: bool,
        overlap: bool,
        ring: Ring | None = None,
        chaos: Chaos | None = None,
        compiler: GrammarCompiler | None = None,
        rebalancer: Rebalancer | None = None,
    ) -> None:
        """`ring`: where this thread's ballots are noted, and its sleep. `chaos`: None refuses all faults. `compiler`:
        of grammars; None: requests that have one are refused. `rebalancer`: the worker's, for reports."""
        self._link = link
        self._protocol = protocol
        self._scheduler = scheduler
        self._worker = worker
        self._counters = counters
        self._mixed = mixed
        self._overlap = overlap
        self._ring = ring or Recorder(0, 1).control
        self._chaos = chaos
        self._refused = 0  # faults
        self._compiler = compiler
        self._rebalancer = rebalancer
        self._step: int | None = None  # number of the step in flight
        self._reported_at = 0.0

    def run(self) -> None:
        """Raises vote.errors.LockstepBroken, or whatever a step of this rank raises."""
        while True:
            self.receive()
            if not self.step():
                return

    def receive(self) -> None:
        """Take in what the router has sent."""
        for message in self._link.drain():
            self._receive(message)
        if self._compiler is not None:
            self._take_compiled(self._compiler)

    def step(self) -> bool:
        """One vote and what follows from it, with work here or without. False: all ranks were asked to stop."""
        scheduler = self._scheduler
        if self._mixed:
            scheduler.plan(StepType.MIXED)
        agreement = self._protocol.agree(self._facts(), scheduler.try_prefill)
        if agreement.compute and not self._mixed:
            scheduler.plan(agreement.step_type)
        settled = self._settle()
        if agreement.compute and not agreement.stop:
            self._issue(agreement)
        elif self._chaos is not None:
            self._chaos.in_step()
        self._send(settled)
        if agreement.stop:
            return False
        if not self._overlap:
            self._send(self._settle())
        if agreement.sleep:
            self._sleep()
        return True

    def _facts(self) -> Facts:
        facts = self._scheduler.facts()
        return replace(facts, wants_rebalance=True) if self._worker.wants_rebalance else facts

    def _issue(self, agreement: Agreement) -> None:
        """Start the planned step: it enters every collective, its batch empty or not."""
        batch = self._scheduler.batch()
        if self._chaos is not None:
            self._chaos.in_forward(self._scheduler.in_flight)
        self._counters.count_step(batch)
        self._step = agreement.step
        self._worker.submit(batch, agreement.step, agreement.rebalance)

    def _settle(self) -> tuple[int, StepOutput] | None:
        """Wait for the step in flight, if there is one, and account for it."""
        if self._step is None:
            return None
        step, self._step = self._step, None
        try:
            drawn = self._worker.result()
        except CollectiveFailed as error:
            self._protocol.broken(error, str(error), step)
        output = self._scheduler.settle(*drawn)
        self._counters.count_output(output)
        return step, output

    def _send(self, settled: tuple[int, StepOutput] | None) -> None:
        if settled is None:
            return
        step, output = settled
        now = time.monotonic()
        report = None
        if now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            report = self._report()
        if output.request_ids or output.finished or report:
            self._link.send(Output(step, output.request_ids, output.tokens, output.finished, report, output.logprobs))

    def _sleep(self) -> None:
        """All ranks agreed that nobody has work: block until the next message. No collective, no timer."""
        self._scheduler.check_integrity()
        self._counters.idle_sleeps += 1
        self._link.send(Output(self._protocol.clock.step, [], [], [], self._report()))
        entry = self._ring.enter(b"sleep")
        self._link.wait()
        self._ring.leave(entry)

    def _add(self, request: Add, matcher: Matcher | None = None) -> None:
        try:
            if request.sampling.grammar is not None and matcher is None and self._compiler is not None:
                if not request.schedulable:
                    raise Refused("a request with a grammar is held by the rank itself: schedulable has to be true")
                self._compiler.submit(request)
                return
            self._scheduler.add(request, matcher)
        except Refused as error:
            self._link.send(Rejected(request.request_id, str(error)))

    def _take_compiled(self, compiler: GrammarCompiler) -> None:
        """Requests whose grammar is compiled go where others go at once. While one is not, the gang stays awake."""
        for request, outcome in compiler.finished():
            if isinstance(outcome, GrammarError):
                self._link.send(Rejected(request.request_id, f"its grammar cannot be used: {outcome}"))
            else:
                self._add(request, outcome)
        self._scheduler.preparing = compiler.pending

    def _receive(self, message: ToRank) -> None:
        match message:
            case Add():
                self._scheduler.wake = max(self._scheduler.wake, message.wake)
                if self._chaos is not None:
                    self._chaos.taste(message)
                self._add(message)
            case Wake():
                self._scheduler.wake = max(self._scheduler.wake, message.wake)
            case Abort():
                for request_id in message.request_ids:
                    if self._compiler is None or not self._compiler.cancel(request_id):
                        self._scheduler.abort(request_id)
            case Ready():
                self._scheduler.wake = max(self._scheduler.wake, message.wake)
                self._scheduler.ready(message.request_id, message.error)
            case Pause():
                self._scheduler.wake = max(self._scheduler.wake, message.wake)
                self._scheduler.pause(message.mode)
            case ResetPrefixCache():
                self._scheduler.wake = max(self._scheduler.wake, message.wake)
                self._scheduler.reset_prefix_cache()
            case Fault():
                self._scheduler.wake = max(self._scheduler.wake, message.wake)
                if self._chaos is not None:
                    self._chaos.arm(message)
                else:
                    self._refused += 1
            case Shutdown():
                self._scheduler.wake = max(self._scheduler.wake, message.wake)
                self._scheduler.wants_stop = True

    def _report(self) -> Report:
        scheduler, counters = self._scheduler, self._counters
        return Report(
            running=scheduler.num_running,
            waiting=scheduler.num_unfinished - scheduler.num_running,
            used_blocks=scheduler.pool.num_used,
            num_blocks=scheduler.pool.capacity,
            prefill_steps=counters.steps[StepType.PREFILL],
            decode_steps=counters.steps[StepType.DECODE],
            idle_sleeps=counters.idle_sleeps,
            placeholder_steps=counters.placeholder_steps,
            mixed_steps=counters.steps[StepType.MIXED],
            prompt_tokens=scheduler.counters.prompt_tokens,
            generated_tokens=scheduler.counters.generated_tokens,
            preemptions=scheduler.counters.preemptions,
            aborted=scheduler.counters.aborted,
            prefix_query_tokens=scheduler.resources.queried_tokens,
            prefix_hit_tokens=scheduler.resources.hit_tokens,
            draft_tokens=scheduler.counters.draft_tokens,
            accepted_draft_tokens=scheduler.counters.accepted_draft_tokens,
            forks=scheduler.counters.forks,
            cached_blocks=scheduler.pool.num_cached,
            batched_tokens=counters.batched_tokens,
            sum_qk=counters.sum_qk,
            max_seqlen_k=counters.last.max_seqlen_k,
            min_seqlen_k=counters.last.min_seqlen_k,
            bad_messages=self._link.bad_messages + self._refused,
            ballots=counters.ballots,
            first_tokens=counters.first_tokens,
            experts=self._expert_report(),
        )

    def _expert_report(self) -> ExpertReport | None:
        """The figures are single numbers that only rise, so they may be read while the worker counts a step."""
        if self._rebalancer is None or not len(rows := self._rebalancer.rows()):
            return None
        counters = self._rebalancer.counters
        return ExpertReport(
            recent_rows=self._rebalancer.recent_rows(),
            rows=int(rows.sum()),
            rebalances=counters.rounds,
            layers_placed=counters.placed,
            received=counters.received,
            received_bytes=counters.received_bytes,
            held_s=counters.held_s,
            longest_held_s=counters.longest_s,
        )
