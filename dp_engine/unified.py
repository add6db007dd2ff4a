"""The unified policy: no phases, every step moves sequences towards their present length (vLLM V1).

Running sequences first, in their order; only they preempt. Then, unless something was preempted, waiting ones with what
the prefix cache knows of them.
"""

import numpy as np

from dp_engine.ledger import Step
from dp_engine.scheduler import Scheduler
from dp_engine.sequence import Sequence, Status
from vote.ballot import Facts
from vote.decision import StepType


class _Plan:
    """A step in the making: rows in order with their tokens, and what is left of both budgets."""

    def __init__(self, tokens: int, inputs: int) -> None:
        self.tokens = tokens  # may still be scheduled
        self.inputs = inputs  # may still enter the model, draft slots included
        self.seqlens: dict[int, int] = {}  # by row, drafts not counted
        self.drafts: dict[int, int] = {}

    @property
    def left(self) -> int:
        return min(self.tokens, self.inputs)

    def serve(self, row: int, seqlen_q: int, drafts: int = 0) -> None:
        self.seqlens[row] = seqlen_q
        self.drafts[row] = drafts
        self.tokens -= seqlen_q
        self.inputs -= seqlen_q + drafts

    def take_back(self, row: int) -> None:
        if row in self.seqlens:
            seqlen_q = self.seqlens.pop(row)
            self.tokens += seqlen_q
            self.inputs += seqlen_q + self.drafts.pop(row)


class UnifiedScheduler(Scheduler):
    """`running` holds half-prefilled sequences too, in order of admission."""

    def facts(self) -> Facts:
        runs = len(self._continuing()) > 0 and self.paused != "all"
        planned = self._put_off is not None or (self._planned is not None and len(self._planned.rows) > 0)
        may_start = self._head_may_run() or (bool(self.prompted) and self.paused == "none")
        unfinished = runs or may_start or self._forks_to_come() or bool(self.unreported)
        return self._facts(unfinished=unfinished, scheduled=planned or bool(self.unreported))

    def plan(self, step_type: StepType) -> None:
        self._planned = None
        config = self._config
        budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        plan = _Plan(budget, config.max_num_batched_tokens)
        preemptions = self.counters.preemptions
        if self.paused != "all":
            rows = self._continuing()
            wanted = self._wanted(rows)
            drafts = self._drafts(rows, wanted, plan)
            if not self._serve_all(rows, wanted, drafts, plan):
                if self._in_flight is not None:
                    self._put_off = step_type
                    return
                each = zip(wanted.tolist(), drafts.tolist(), strict=True)
                self._serve_in_turn(dict(zip(rows.tolist(), each, strict=True)), plan)
            if self.paused == "none" and self.counters.preemptions == preemptions:
                self._admit(plan)
        self._planned = self._step(step_type, plan)

    # ---- running

    def _wanted(self, rows: np.ndarray) -> np.ndarray:
        """Tokens that each row lacks; one for a row whose next token the step in flight will draw."""
        led = self.ledgers
        return self._capped(np.maximum(led.length[rows] - led.num_tokens[rows], 1))

    def _capped(self, wanted: np.ndarray) -> np.ndarray:
        """The cap on long prompts protects the others, so it does not hold for a lone request."""
        cap = self._config.long_prefill_token_threshold
        if cap and len(self.running) + len(self.waiting) > 1:
            return np.minimum(wanted, cap)
        return wanted

    def _drafts(self, rows: np.ndarray, wanted: np.ndarray, plan: _Plan) -> np.ndarray:
        """Drafts of rows that only lack their last token; upper bounds while a step is in flight."""
        drafts = np.zeros(len(rows), np.int32)
        if self._config.num_draft_tokens:
            led = self.ledgers
            decodes = np.flatnonzero(led.num_tokens[rows] >= led.length[rows] - 1)
            limits = self._draft_limits(rows[decodes], plan.inputs - int(wanted.sum()))
            if self._in_flight is None:
                limits = self.propose(led, rows[decodes], limits)
            drafts[decodes] = limits
        return drafts

    def _serve_all(self, rows: np.ndarray, wanted: np.ndarray, drafts: np.ndarray, plan: _Plan) -> bool:
        """Serve all running rows at once, as far as the budget goes; False (and nothing done) if blocks are short."""
        led = self.ledgers
        before = np.cumsum(wanted) - wanted
        seqlens_q = np.minimum(wanted, np.maximum(plan.left - before, 0))
        drafts = np.where(seqlens_q == wanted, drafts, 0)
        end = led.num_tokens[rows] + seqlens_q + drafts
        if self._config.clip_drafts:
            end = np.minimum(end, led.stop_len[rows])
        missing = np.maximum(-(-end // self._config.block_size) - led.num_blocks[rows], 0)
        total = int(missing.sum())
        if total > self.pool.num_free:
            return False
        if total:
            for index in np.flatnonzero(missing).tolist():
                self.resources.append(int(rows[index]), int(missing[index]))
        if self._config.prefix_share == "scheduled":
            self.resources.name_blocks(rows, np.minimum(led.num_tokens[rows] + seqlens_q, led.length[rows]))
        served = np.flatnonzero(seqlens_q)
        plan.seqlens = dict(zip(rows[served].tolist(), seqlens_q[served].tolist(), strict=True))
        plan.drafts = dict(zip(rows[served].tolist(), drafts[served].tolist(), strict=True))
        plan.tokens -= int(seqlens_q.sum())
        plan.inputs -= int(seqlens_q.sum() + drafts.sum())
        return True

    def _serve_in_turn(self, wanted: dict[int, tuple[int, int]], plan: _Plan) -> None:
        """Blocks are short: one after the other, each preempting from the tail (or the worst priority) until it fits or
        is the victim itself."""
        running = self.running.tolist()
        index = 0
        while index < len(running) and plan.left > 0:
            row = running[index]
            seqlen_q, drafts = wanted[row]
            if seqlen_q > plan.left:
                seqlen_q, drafts = plan.left, 0
            drafts = min(drafts, plan.inputs - seqlen_q)
            while not self._grow(row, seqlen_q + drafts):
                victim = self._victim(running)
                at = running.index(victim)
                del running[at]
                index -= at < index
                plan.take_back(victim)
                self._preempt(self.ledgers.seq_of(victim))
                if victim == row:
                    break
            else:
                plan.serve(row, seqlen_q, drafts)
                index += 1
                continue
            break
        self.running = np.array(running, np.int32)

    def _grow(self, row: int, count: int) -> bool:
        """Blocks for `count` tokens more."""
        led = self.ledgers
        end = int(led.num_tokens[row]) + count
        missing = self.resources.blocks_of_length(end) - int(led.num_blocks[row])
        if missing > self.pool.num_free:
            return False
        self.resources.append(row, missing)
        if self._config.prefix_share == "scheduled":
            self.resources.name_blocks(np.array([row]), np.array([min(end, led.length[row])]))
        return True

    def _victim(self, running: list[int]) -> int:
        if self._config.order == "fcfs":
            return running[-1]
        return max(running, key=lambda row: self._place(self.ledgers.seq_of(row)))

    @staticmethod
    def _place(seq: Sequence) -> tuple[int, int]:
        return seq.priority, seq.number

    # ---- waiting

    def _admit(self, plan: _Plan) -> None:
        """From the head of `waiting` while both budgets last and the head's whole present length fits."""
        before = len(self.running)
        self._admit_prompted()
        for row in self.running[before:].tolist():
            if plan.left > 0:
                plan.serve(row, 1)
        while self._head_may_run() and plan.left > 0 and len(self.running) < self._config.max_num_seqs:
            seq = self.waiting.head
            if not self._may_start(seq, plan):
                return
            done = self._cached(seq)
            rest = self.resources.length(seq) - done
            capped = int(self._capped(np.array([rest]))[0])
            seqlen_q = min(capped, plan.left)
            if seqlen_q < capped and not self._config.chunked_prefill:
                return
            self.waiting.remove(seq)
            self._start(seq, self._first_blocks(seq, done + seqlen_q))
            seq.status = Status.RUNNING
            self.running = np.append(self.running, np.int32(seq.row))
            plan.serve(seq.row, seqlen_q)
            self.counters.prompt_tokens += seqlen_q
            if self._config.prefix_share == "scheduled":
                self.resources.name_blocks(np.array([seq.row]), np.array([done + seqlen_q]))

    def _may_start(self, seq: Sequence, plan: _Plan) -> bool:
        if self._fits(seq):
            return True
        if plan.seqlens or len(self.running) or self._in_flight is not None:
            return False
        self._reclaim(seq)
        return self._fits(seq)

    def _cached(self, seq: Sequence) -> int:
        if seq.has_row:
            return int(self.ledgers.num_tokens[seq.row])
        return len(self.resources.match(seq)) * self._config.block_size

    def _first_blocks(self, seq: Sequence, end: int) -> int:
        whole = self._config.admission == "full" or seq.forked
        return self.resources.blocks_for_start(seq) if whole else self.resources.blocks_of_length(end)

    # ---- the step

    def _step(self, step_type: StepType, plan: _Plan) -> Step:
        led, count = self.ledgers, len(plan.seqlens)
        rows = np.fromiter(plan.seqlens.keys(), np.int32, count)
        drafts = np.fromiter(plan.drafts.values(), np.int32, count)
        seqlens_q = np.fromiter(plan.seqlens.values(), np.int32, count) + drafts
        outputs = led.num_tokens[rows] + seqlens_q >= led.length[rows]
        due = self._in_flight is not None and bool(drafts.any())
        return Step(step_type, rows, seqlens_q, drafts, outputs, due)
