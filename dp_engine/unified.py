"""The unified policy: no phases, every step moves sequences towards their present length (vLLM V1).

Running sequences first, in their order; only they preempt. Then, unless something was preempted, waiting ones with what
the prefix cache knows of them.
"""

import numpy as np

from dp_engine.drafting import draft_limits
from dp_engine.ledger import Step
from dp_engine.scheduler import NO_ROWS, Scheduler
from dp_engine.sequence import Sequence, Status
from dp_engine.waiting import place
from vote.ballot import Facts
from vote.decision import StepType

_NOBODY = (NO_ROWS, NO_ROWS, NO_ROWS)
Served = tuple[np.ndarray, np.ndarray, np.ndarray]  # int32 each: rows, tokens without drafts, drafts


class _Budget:
    """What is left of a step: tokens to schedule, and tokens that may enter the model, draft slots included."""

    def __init__(self, tokens: int, inputs: int) -> None:
        self._tokens = tokens
        self.inputs = inputs

    @property
    def left(self) -> int:
        return min(self._tokens, self.inputs)

    def spend(self, seqlen_q: int, drafts: int = 0) -> None:
        self._tokens -= seqlen_q
        self.inputs -= seqlen_q + drafts


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
        budget = _Budget(
            config.max_num_scheduled_tokens or config.max_num_batched_tokens, config.max_num_batched_tokens
        )
        served, admitted = [_NOBODY], []
        if self.paused != "all":
            rows = self._continuing()
            lacking = self._lacking(rows)
            drafts = self._drafts(rows, budget.inputs - int(lacking.sum()))
            preemptions = self.counters.preemptions
            at_once = self._serve_all(rows, lacking, drafts, budget)
            if at_once is None and self._flying:
                self._put_off = step_type
                return
            served = [at_once or self._serve_in_turn(rows, lacking, drafts, budget)]
            if self.paused == "none" and self.counters.preemptions == preemptions:
                admitted = self._admit(budget)
        if admitted:
            new = np.array(admitted, np.int32)
            served.append((new[:, 0], new[:, 1], np.zeros(len(new), np.int32)))
        self._planned = self._step(step_type, served)

    # ---- running

    def _lacking(self, rows: np.ndarray) -> np.ndarray:
        """Tokens that each row lacks; one for a row whose next token the step in flight will draw."""
        led = self.ledgers
        return self._capped(np.maximum(led.length[rows] - led.num_tokens[rows], 1))

    def _capped(self, lacking: np.ndarray) -> np.ndarray:
        """The cap on long prompts protects the others, so it does not hold for a lone request."""
        cap = self._config.long_prefill_token_threshold
        if cap and len(self.running) + len(self.waiting) > 1:
            return np.minimum(lacking, cap)
        return lacking

    def _drafts(self, rows: np.ndarray, spare: int) -> np.ndarray:
        """Drafts of rows that only lack their last token; upper bounds while a step is in flight."""
        drafts = np.zeros(len(rows), np.int32)
        if self._config.num_draft_tokens:
            led = self.ledgers
            decodes = np.flatnonzero(led.num_tokens[rows] >= led.length[rows] - 1)
            limits = draft_limits(self._config, led, rows[decodes], spare)
            if not self._flying:
                limits = self.propose(led, rows[decodes], limits)
            drafts[decodes] = limits
        return drafts

    def _serve_all(self, rows: np.ndarray, lacking: np.ndarray, drafts: np.ndarray, budget: _Budget) -> Served | None:
        """Serve all running rows at once, as far as the budget goes; None (and nothing done) if blocks are short."""
        led = self.ledgers
        seqlens_q = lacking
        if int(lacking.sum()) > budget.left:
            seqlens_q = np.minimum(lacking, np.maximum(budget.left - (np.cumsum(lacking) - lacking), 0))
            drafts = np.where(seqlens_q == lacking, drafts, 0)
        end = led.num_tokens[rows] + seqlens_q + drafts
        if self._config.clip_drafts and self._config.num_draft_tokens:
            end = np.minimum(end, led.stop_len[rows])
        missing = np.maximum(-(-end // self._config.block_size) - led.num_blocks[rows], 0)
        if missing.any():
            if int(missing.sum()) > self.pool.num_free:
                return None
            self.resources.grow(rows, missing)
        if self._config.prefix_share == "scheduled":
            self.resources.name_blocks(rows, np.minimum(led.num_tokens[rows] + seqlens_q, led.length[rows]))
        budget.spend(int(seqlens_q.sum()), int(drafts.sum()))
        if seqlens_q is not lacking:
            served = seqlens_q > 0
            rows, seqlens_q, drafts = rows[served], seqlens_q[served], drafts[served]
        return rows, seqlens_q, drafts

    def _serve_in_turn(self, rows: np.ndarray, lacking: np.ndarray, drafts: np.ndarray, budget: _Budget) -> Served:
        """Blocks are short: one after the other, each preempting from the tail (or the worst priority) until it fits or
        is the victim itself."""
        running = rows.tolist()
        wanted = dict(zip(running, zip(lacking.tolist(), drafts.tolist(), strict=True), strict=True))
        served: dict[int, tuple[int, int]] = {}
        index = 0
        while index < len(running) and budget.left > 0:
            row = running[index]
            seqlen_q, guesses = wanted[row]
            if seqlen_q > budget.left:
                seqlen_q, guesses = budget.left, 0
            guesses = min(guesses, budget.inputs - seqlen_q)
            if not self._make_room(row, seqlen_q + guesses, running, served, budget):
                break
            budget.spend(seqlen_q, guesses)
            served[row] = seqlen_q, guesses
            index = running.index(row) + 1
        self.running = np.array(running, np.int32)
        table = np.array([(row, *served[row]) for row in running if row in served], np.int32).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    def _make_room(
        self, row: int, count: int, running: list[int], served: dict[int, tuple[int, int]], budget: _Budget
    ) -> bool:
        """Preempt until `row` has blocks for `count` tokens more; False if it had to go itself. A victim that was
        served already gives its tokens back."""
        while not self._grow(row, count):
            victim = self._victim(running)
            running.remove(victim)
            if victim in served:
                seqlen_q, guesses = served.pop(victim)
                budget.spend(-seqlen_q, -guesses)
            self._preempt(self.ledgers.seq_of(victim))
            if victim == row:
                return False
        return True

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
        return max(running, key=lambda row: place(self.ledgers.seq_of(row)))

    # ---- waiting

    def _admit(self, budget: _Budget) -> list[tuple[int, int]]:
        """From the head of `waiting` while the budget lasts and the head's whole present length fits. Returns rows and
        their tokens."""
        admitted = []
        first = len(self.running)
        if budget.left > 0:
            self._admit_prompted(min(self._config.max_num_seqs, first + budget.left))  # one token each
        for row in self.running[first:].tolist():
            budget.spend(1)
            admitted.append((row, 1))
        while budget.left > 0 and len(self.running) < self._config.max_num_seqs and self._head_may_run():
            seq = self.waiting.head
            if not self._may_start(seq):
                break
            done = self.resources.computed(seq)
            lacking = int(self._capped(np.array([self.resources.length(seq) - done]))[0])
            seqlen_q = min(lacking, budget.left)
            if seqlen_q < lacking and not self._config.chunked_prefill:
                break
            self.waiting.remove(seq)
            self._start(seq, self._first_blocks(seq, done + seqlen_q))
            seq.status = Status.RUNNING
            self.running = np.append(self.running, np.int32(seq.row))
            budget.spend(seqlen_q)
            admitted.append((seq.row, seqlen_q))
            if self._config.prefix_share == "scheduled":
                self.resources.name_blocks(np.array([seq.row]), np.array([done + seqlen_q]))
        return admitted

    def _may_start(self, seq: Sequence) -> bool:
        if self._fits(seq):
            return True
        if len(self.running) or self._flying:
            return False
        self._reclaim(seq)
        return self._fits(seq)

    def _first_blocks(self, seq: Sequence, end: int) -> int:
        whole = self._config.admission == "full" or seq.forked
        return self.resources.blocks_for_start(seq) if whole else self.resources.blocks_of_length(end)

    # ---- the step

    def _step(self, step_type: StepType, served: list[Served]) -> Step:
        led = self.ledgers
        rows, seqlens_q, drafts = served[0] if len(served) == 1 else map(np.concatenate, zip(*served, strict=True))
        seqlens_q = seqlens_q + drafts
        outputs = led.num_tokens[rows] + seqlens_q >= led.length[rows]
        due = self._flying and self._config.num_draft_tokens > 0 and bool(drafts.any())
        return Step(step_type, rows, seqlens_q, drafts, outputs, due)
