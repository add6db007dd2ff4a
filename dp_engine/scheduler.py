"""The scheduler of a rank, as far as both policies share it: requests, steps in flight, settlement.

Calls of one step, in this order:

    phased     facts, [try_prefill if the gang chose PREFILL,] plan(type), batch, settle
    unified    plan(MIXED), facts, batch, settle

With overlap on, the step before is settled between `plan` and `batch`: who runs is decided while it is in flight, what
exactly they run (tokens, drafts, who has ended meanwhile) when its result is known. A plan that finds too few blocks
is put off until then, so preemption never sees a step in flight and decides as it does without overlap.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

import numpy as np

from dp_engine.admission import Refused, prompt_limit, read_request
from dp_engine.batch import Batch
from dp_engine.binding import advance, constrain
from dp_engine.blocks import Admission
from dp_engine.config import EngineConfig
from dp_engine.drafting import PromptLookup, Proposer, fix_drafts
from dp_engine.forks import Branches, common_prefix
from dp_engine.grammar import Matcher
from dp_engine.ledger import Step
from dp_engine.messages import Add, PauseMode, TokenLogprobs
from dp_engine.output import Counters, StepOutput
from dp_engine.resources import Resources
from dp_engine.sequence import Sequence, Status
from dp_engine.settlement import commit
from dp_engine.waiting import FifoQueue, PriorityQueue
from vote.ballot import Facts
from vote.decision import StepType

NO_ROWS = np.zeros(0, np.int32)


class Scheduler(ABC):
    """Owns the queues of a rank.

    waiting: not yet prefilled to the end; its head blocks the rest on purpose. prompted: forks whose prompt is computed
    already, waiting for a place among the running. running: rows of sequences that have been admitted.
    """

    def __init__(
        self, config: EngineConfig, num_blocks: int, max_model_len: int, eos_token_ids: Iterable[int], wake: int = 0
    ) -> None:
        self.counters = Counters()
        self.max_model_len = max_model_len
        self.resources = Resources(config, num_blocks, max_model_len)
        self.pool = self.resources.pool
        self.ledgers = self.resources.ledgers
        self.wake = wake  # last wake-up number seen; the rank's inbox writes it
        self.wants_stop = False
        self.preparing = False  # requests are on their way to `add`; the rank's inbox writes this and wants_stop
        self.paused: PauseMode = "none"
        self.running = NO_ROWS
        self.waiting: FifoQueue | PriorityQueue = PriorityQueue() if config.order == "priority" else FifoQueue()
        self.prompted: deque[Sequence] = deque()
        self.propose: Proposer = PromptLookup(config.draft_ngram_max, config.draft_ngram_min)
        self._config = config
        self._prompt_limit = prompt_limit(config, max_model_len)
        self._eos = sorted(eos_token_ids)
        self._by_id: dict[int, Sequence] = {}
        self._branches = Branches()
        self._arrivals = 0
        self._planned: Step | None = None
        self._promoted = 0  # sequences from `prompted` in the planned step: theirs is not a prompt token to compute
        self._put_off: StepType | None = None  # a plan that has to wait for the step in flight
        self._in_flight: Step | None = None
        self._deferred: list[Sequence] = []  # ended while in flight; hold their blocks until settlement
        self.unreported: list[Sequence] = []  # ended, not yet in a StepOutput

    # ---- requests

    def add(self, request: Add, matcher: Matcher | None = None) -> None:
        """Queue a request. `matcher`: of its grammar, behind what has been emitted. Raises Refused if it can never run
        here."""
        if request.request_id in self._by_id:
            raise Refused(f"request id {request.request_id} is in use")
        seq = read_request(request, self._config, self.max_model_len, self.pool.capacity, matcher)
        self._arrivals += 1
        seq.number, seq.arrival = self._arrivals, time.monotonic()
        parent = self._by_id.get(request.parent) if request.parent else None
        self._by_id[seq.request_id] = seq
        if self._config.role == "decode":
            self.prompted.append(seq)  # its KV comes from the engine that prefilled it
        elif parent is None:
            self.waiting.push(seq)
        elif parent.has_row and self._computed(parent) >= self.resources.length(parent) - 1:
            self._fork(parent, seq)
        else:
            self._branches.attach(parent, [seq])
        if matcher is not None and matcher.failed:
            self.abort(seq.request_id, Status.STRUCTURED_OUTPUT_FAILED)

    def abort(self, request_id: int, status: Status = Status.ABORTED) -> None:
        """Forget a request; unknown ids are ignored. O(1) for one that waits."""
        seq = self._by_id.get(request_id)
        if seq is None:
            return
        self.counters.aborted += status is Status.ABORTED
        if status is not Status.ABORTED:
            self.unreported.append(seq)
        if seq.status is Status.RUNNING:
            self.running = self.running[self.running != seq.row]
        elif seq in self.waiting:
            self.waiting.remove(seq)
        elif seq in self.prompted:
            self.prompted.remove(seq)
        self._end(seq, status)

    def ready(self, request_id: int, error: str = "") -> None:
        """A request that was added unschedulable may run, or could not be prepared."""
        if error:
            self.abort(request_id, Status.PREPROCESS_FAILED)
        elif (seq := self._by_id.get(request_id)) is not None:
            seq.schedulable = True

    def pause(self, mode: PauseMode) -> None:
        self.paused = mode

    def reset_prefix_cache(self) -> None:
        self.resources.reset_prefix_cache()

    @property
    def num_unfinished(self) -> int:
        return len(self._by_id)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def in_flight(self) -> list[int]:
        """Requests of the step in flight."""
        return [] if self._in_flight is None else self.ledgers.request_id[self._in_flight.rows].tolist()

    # ---- one step

    @abstractmethod
    def facts(self) -> Facts:
        """This rank's side of the first ballot."""

    def try_prefill(self) -> bool:
        """Plan a prefill; True if there is something to run or to report. Phased policy only."""
        raise NotImplementedError("this policy has no prefill steps")

    @abstractmethod
    def plan(self, step_type: StepType) -> None:
        """Decide who runs in the next step; nobody, if this rank has nothing for a step of this type."""

    def batch(self) -> Batch:
        """The planned step, which is in flight from now on. The step before must be settled."""
        assert self._in_flight is None, "one step at a time"
        if self._put_off is not None:
            step_type, self._put_off = self._put_off, None
            self.plan(step_type)
        step, self._planned = self._planned, None
        assert step is not None, "plan comes first"
        if step.drafts_due:
            fix_drafts(step, self.ledgers, self.propose, clip=self._config.clip_drafts)
        masks = constrain(self.ledgers, step) if self.ledgers.num_bound else None
        self._in_flight = step
        batch = self.ledgers.batch(step, *self.resources.take_copies(), self.resources.take_hits(), masks)
        self._issue(step)
        return batch

    def settle(self, tokens: np.ndarray, logprobs: dict[int, TokenLogprobs] | None = None) -> StepOutput:
        """Account for the step in flight: what it has `Drawn`."""
        step, self._in_flight = self._in_flight, None
        assert step is not None and len(tokens) == len(step.rows) + int(step.num_drafts.sum())
        self.ledgers.inflight[step.rows] = 0
        self.resources.copies_made()
        dropped = self._release_deferred()
        output = self._commit(step, tokens, logprobs, dropped)
        self._report_ended(output)
        return output

    def check_integrity(self) -> None:
        """Raise if blocks are lost or shared by mistake. Cheap enough for whenever the gang falls asleep."""
        self.resources.check_integrity([seq for seq in self.ledgers.owner if seq is not None])

    # ---- for the policies

    def _facts(self, *, unfinished: bool, running: int = 0, **votes: bool) -> Facts:
        awake = unfinished or self.preparing
        return Facts(running=running, unfinished=awake, wants_stop=self.wants_stop, wake=self.wake, **votes)

    @property
    def _flying(self) -> bool:
        """A step in flight computes something of this rank; a placeholder step binds nobody here."""
        return self._in_flight is not None and len(self._in_flight.rows) > 0

    def _forks_to_come(self) -> bool:
        """The step in flight may compute the prompt that some forks wait for, and end their parent."""
        return self._in_flight is not None and bool(self._branches)

    def _head_may_run(self) -> bool:
        return self.paused == "none" and len(self.waiting) > 0 and self.waiting.head.schedulable

    def _continuing(self) -> np.ndarray:
        """Running rows but for those that the step in flight ends for certain."""
        if not self._flying:
            return self.running
        led = self.ledgers
        ending = (led.inflight[self.running] > 0) & (led.length[self.running] + 1 >= led.stop_len[self.running])
        return self.running[~ending]

    def _start(self, seq: Sequence, num_blocks: int) -> None:
        """Give the head of `waiting` what it needs to run; its blocks are known to be there."""
        if seq.forked:
            self.resources.own(seq, num_blocks)
        elif not seq.has_row:
            self.resources.start(seq, num_blocks)
        else:
            self.resources.append(seq.row, num_blocks - int(self.ledgers.num_blocks[seq.row]))

    def _admit_prompted(self, max_running: int) -> None:
        """Sequences whose prompt is computed start to run; a fork needs a block for that."""
        while self.prompted and len(self.running) < max_running and self.paused == "none":
            seq = self.prompted[0]
            if not self._fits(seq):
                if len(self.running) or self._flying:
                    return
                self._reclaim(seq)  # seq may wait for its prompt now
                continue
            self.prompted.popleft()
            self._start(seq, self.resources.blocks_for_start(seq))
            self.ledgers.num_tokens[seq.row] = self.ledgers.length[seq.row] - 1
            seq.status = Status.RUNNING
            self._promoted += 1
            self.running = np.append(self.running, np.int32(seq.row))

    def _reclaim(self, head: Sequence) -> None:
        """Nothing runs, and `head` of waiting or prompted lacks blocks: who waits with blocks starts anew, the last one
        first."""
        for seq in [*reversed(self.waiting), *reversed(self.prompted)]:
            if self._fits(head):
                return
            if seq is not head and seq.has_row:
                self.resources.release(seq)
                if seq not in self.waiting:
                    self.prompted.remove(seq)
                    self.waiting.push(seq)
        if head.forked and not self._fits(head):
            self.resources.release(head)  # what it shares of a parent that has gone is in its own way
            if head not in self.waiting:
                self.prompted.remove(head)
                self.waiting.push(head)

    def _admission(self, seq: Sequence) -> Admission:
        """A preempted sequence starts only with some room more, so that it is not preempted again at once."""
        return self.resources.can_start(seq, self._config.readmission_margin if seq.preemptions else 0)

    def _fits(self, seq: Sequence) -> bool:
        return self._admission(seq) is Admission.OK

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks: it ends, or is computed again from the head of `waiting`.

        The caller takes its row out of `running`. Never called with a step in flight.
        """
        assert not self._flying
        self.counters.preemptions += 1
        limit = self._config.max_preemptions
        spent = limit is not None and seq.preemptions >= limit
        too_long = self._config.refusal == "at_once" and self.resources.length(seq) > self._prompt_limit
        if self._config.preemption == "terminate" or seq.structured or spent or too_long:
            self.unreported.append(seq)
            self._end(seq, Status.PREEMPTED)
            return
        seq.preemptions += 1
        seq.status = Status.WAITING
        self.resources.release(seq)
        self.waiting.push_front(seq)

    # ---- ends

    def _end(self, seq: Sequence, status: Status) -> None:
        seq.status = status
        del self._by_id[seq.request_id]
        self._orphan(seq)
        self._let_go(seq)

    def _let_go(self, seq: Sequence) -> None:
        """Release what a finished sequence holds, after the step in flight if that may still write there."""
        if self._in_flight is not None and seq.has_row and (self._in_flight.rows == seq.row).any():
            self._deferred.append(seq)
            if self._planned is not None:
                self._planned = self._planned.without(np.array([seq.row], np.int32))
        else:
            self.resources.release(seq)

    def _release_deferred(self) -> np.ndarray | None:
        """Rows whose results are void, released now; None: there are none."""
        if not self._deferred:
            return None
        rows = np.array([seq.row for seq in self._deferred], np.int32)
        for seq in self._deferred:
            self.resources.release(seq)
        self._deferred = []
        return rows

    def _report_ended(self, output: StepOutput) -> None:
        if self.unreported:
            output.finished.extend((seq.request_id, seq.status.reason) for seq in self.unreported)
            self.unreported = []

    # ---- forks

    def _computed(self, seq: Sequence) -> int:
        """Tokens of `seq` whose KV is there, those of the step in flight not counted."""
        computed = int(self.ledgers.num_tokens[seq.row])
        if self._in_flight is not None:
            computed -= int(self._in_flight.seqlens_q[self._in_flight.rows == seq.row].sum())
        return computed

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the parent's computed KV as far as both have the same tokens; all but the child's last token."""
        computed = self._computed(parent)
        shared = common_prefix(self.ledgers, parent, child, computed)
        ahead = shared < computed - 1 or self._in_flight is not None  # the parent's state has seen more than is shared
        stateful = self.resources.slots is not None
        alone = shared == 0 or parent.salt != child.salt or (stateful and ahead)
        alone |= not child.schedulable or self._config.role != "both"
        if alone or not self.resources.fork(parent, child, shared):
            self.waiting.push(child)
            return
        self.counters.forks += 1
        if shared == len(child.tokens) - 1:
            self.prompted.append(child)
        else:
            self.waiting.push_front(child)

    def _fork_branches(self, rows: np.ndarray) -> None:
        """The prompts of these rows are computed: their forks may start."""
        for request_id in self._branches.parents_among(self.ledgers.request_id[rows].tolist()):
            parent = self._by_id[request_id]
            for child in self._branches.take(parent):
                self._fork(parent, child)

    def _orphan(self, parent: Sequence) -> None:
        """If the parent has gone before its prompt was computed, its first fork takes its place."""
        if self._branches and (children := self._branches.take(parent)):
            self.waiting.push(children[0])
            self._branches.attach(children[0], children[1:])

    # ---- issuing and settling

    def _issue(self, step: Step) -> None:
        """Advance optimistically: the step's tokens count as computed, its outputs as about to be committed."""
        led = self.ledgers
        if step.step_type is not StepType.DECODE:
            lacking = led.length[step.rows] - led.output_len[step.rows] - led.num_tokens[step.rows]
            self.counters.prompt_tokens += int(np.clip(lacking, 0, step.seqlens_q).sum()) - self._promoted
        self._promoted = 0
        led.num_tokens[step.rows] += step.seqlens_q
        led.inflight[step.rows] = (1 + step.num_drafts) * step.outputs  # none for a chunk

    def _commit(
        self, step: Step, tokens: np.ndarray, logprobs: dict[int, TokenLogprobs] | None, dropped: np.ndarray | None
    ) -> StepOutput:
        """Append what the step's outputs are worth, name blocks, end sequences."""
        kept, alive = step.outputs, step.rows
        if dropped is not None:
            keep = ~np.isin(step.rows, dropped)
            kept, alive = kept & keep, alive[keep]
        done = commit(self.ledgers, step, tokens, kept, self._eos, traced=bool(logprobs))
        if self.ledgers.num_bound:
            advance(self.ledgers, done)
        self.counters.generated_tokens += len(done.tokens)
        self.counters.draft_tokens += done.num_drafts
        self.counters.accepted_draft_tokens += done.num_accepted
        if self._branches and step.step_type is not StepType.DECODE:
            self._fork_branches(done.rows)
        if self._config.prefix_share == "computed":
            self.resources.name_blocks(alive, self.ledgers.num_tokens[alive])
        output = StepOutput(done.request_ids, done.tokens)
        if logprobs and done.origins is not None:
            output.logprobs = [logprobs.get(place) for place in done.origins.tolist()]
        if done.first.any():
            now = time.monotonic()
            output.first_token_s = [now - self.ledgers.seq_of(row).arrival for row in done.rows[done.first].tolist()]
        ended = done.ended if self._config.role != "prefill" else np.ones(len(done.rows), np.bool_)
        if ended.any():
            self._end_rows(done.rows[ended], done.stopped[ended], output)
        return output

    def _end_rows(self, rows: np.ndarray, stopped: np.ndarray, output: StepOutput) -> None:
        self._clear(rows)
        if self._planned is not None:
            self._planned = self._planned.without(rows)
        for row, by_token in zip(rows.tolist(), stopped.tolist(), strict=True):
            seq = self.ledgers.seq_of(row)
            at_end = self.ledgers.length[row] >= seq.stop_len
            status = Status.STOPPED if by_token else Status.LENGTH if at_end else Status.PREFILLED
            failed = seq.matcher is not None and seq.matcher.failed
            self._end(seq, Status.STRUCTURED_OUTPUT_FAILED if failed else status)
            output.finished.append((seq.request_id, seq.status.reason))

    def _clear(self, rows: np.ndarray) -> None:
        """Take rows that have ended out of `running`."""
        self.running = self.running[~np.isin(self.running, rows)]
