"""The phased policy: a step is either prefill or decode. The rules are DeepInfer's unless said otherwise."""

from collections.abc import Iterable

import numpy as np

from dp_engine.blocks import Admission
from dp_engine.chunk import Chunker
from dp_engine.config import EngineConfig
from dp_engine.drafting import draft_limits
from dp_engine.ledger import Step
from dp_engine.scheduler import NO_ROWS, Scheduler
from dp_engine.sequence import Sequence, Status
from vote.ballot import Facts
from vote.decision import StepType

_NO_FLAGS = np.zeros(0, np.bool_)
NOTHING = (NO_ROWS, NO_ROWS, NO_ROWS, _NO_FLAGS)


class PhasedScheduler(Scheduler):
    """Prefill from the head of `waiting`; decode last come, first served: the youngest are sure of their place and the
    oldest make room.

    With `release` next_decode (DeepInfer), what has ended stays where it is until the next decode step: in `waiting`
    or among `running` (whence it goes to `cleared`).
    """

    def __init__(
        self, config: EngineConfig, num_blocks: int, max_model_len: int, eos_token_ids: Iterable[int], wake: int = 0
    ) -> None:
        super().__init__(config, num_blocks, max_model_len, eos_token_ids, wake)
        self.cleared: list[Sequence] = []  # dropped from `running` by the last plan
        self._chunker = Chunker(config)
        self._headroom = 0 if config.admission == "full" else config.decode_headroom
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)  # a decode step takes all of them
        self._lazy = config.release == "next_decode"
        self._num_dead = 0  # lazy: ended sequences still in `waiting`
        self._wanted = False  # what the last `facts` said
        self._attempt: Step | None = None

    def facts(self) -> Facts:
        has_decode = self._has_decode()
        head_may_run = self._head_may_run()
        self._wanted = head_may_run and self._wants_prefill(self.waiting.head)
        return self._facts(
            wants_prefill=self._wanted,
            has_decode=has_decode,
            backlog=self._wanted and self._backlog(self.waiting.head),
            running=len(self.running),
            unfinished=has_decode or self._forks_to_come() or (head_may_run and self._config.role != "decode"),
        )

    def _has_decode(self) -> bool:
        if self.unreported:
            return True
        if self._config.role == "prefill" or self.paused == "all":
            return False
        if self._num_dead or (self.prompted and self.paused == "none"):
            return True
        return len(self._continuing()) > 0

    def _backlog(self, head: Sequence) -> bool:
        """A prompt is half computed, or at least two could start, and twice as many as run."""
        could_start = min(len(self.waiting), self._max_running - len(self.running))
        return (head.has_row and not head.forked) or could_start >= 2 * max(len(self.running), 1)

    def _wants_prefill(self, head: Sequence) -> bool:
        """Could the head of `waiting` be prefilled now?

        `want` head is DeepInfer's rule: it looks neither at blocks nor at the sequence limit (the second ballot then
        repairs that), and stays false above the watermark even while nothing runs, so that half-prefilled sequences
        can hold the pool for ever.
        """
        config, pool = self._config, self.pool
        if config.role == "decode":
            return False
        idle = config.watermark_escape and not len(self.running)
        above = np.float32(1 - pool.num_free / pool.num_blocks) > np.float32(config.kv_watermark)
        if config.want == "head":
            return idle or not above
        if len(self.running) >= self._max_running:
            return False
        if idle and not self._flying and not self.prompted:
            return True  # `add` let in nothing that an otherwise empty rank cannot hold
        if head.has_row and not head.forked:
            return idle or not above
        return (idle or not above) and self._fits(head)

    # ---- prefill

    def try_prefill(self) -> bool:
        """Plan a prefill; True if there is something to run or to report. A rank that did not want one has nothing."""
        self.cleared = []
        self._attempt = self._plan_prefill() if self._wanted else Step(StepType.PREFILL, *NOTHING)
        return len(self._attempt.rows) > 0 or bool(self.unreported)

    def _plan_prefill(self) -> Step:
        """From the head of `waiting` until the first limit. All tests of a sequence pass before anything changes."""
        rows: list[int] = []
        lengths: list[int] = []
        used, sum_k, whole = 0, 0, True
        config = self._config
        while self.waiting and whole:  # a chunk that does not finish its prompt ends the batch
            seq = self.waiting.head
            if self._ignore(seq):
                continue
            if not self._head_may_run() or not self._may_start(seq, bool(rows)):
                break
            length = self.resources.length(seq)
            if len(self.running) + len(rows) + 1 > self._max_running:
                break
            if config.prefill_max_sum_seqlen_k is not None and sum_k + length > config.prefill_max_sum_seqlen_k:
                break
            done = self.resources.computed(seq)
            seqlen_q = self._chunker.seqlen_q(seq, done, length - done, used, first=not rows)
            if seqlen_q == 0 or (seqlen_q < length - done and not config.chunked_prefill):
                break
            whole = seqlen_q == length - done
            self._start(seq, self.resources.blocks_for_start(seq))
            sum_k += length
            used += self._chunker.charge(seqlen_q)
            rows.append(seq.row)
            lengths.append(seqlen_q)
            seq.checkpoints = tuple(mark for mark in seq.checkpoints if mark > done + seqlen_q)
            if whole:
                self.waiting.remove(seq)
                seq.status = Status.RUNNING
        return self._prefill_step(rows, lengths, whole)

    def _prefill_step(self, rows: list[int], lengths: list[int], whole: bool) -> Step:
        """`whole`: the last one too is prefilled to the end. A chunk's sequence stays at the head of `waiting`."""
        taken = np.array(rows, np.int32)
        outputs = np.ones(len(rows), np.bool_)
        if rows and not whole:
            outputs[-1] = False
        self.running = np.concatenate((self.running, taken[outputs]))
        return Step(StepType.PREFILL, taken, np.array(lengths, np.int32), np.zeros(len(rows), np.int32), outputs)

    def _ignore(self, seq: Sequence) -> bool:
        """Drop a head that has ended or can never run (the latter is refused on arrival unless `refusal` says so)."""
        if not seq.status.finished:
            if self._config.refusal == "at_once" or not seq.schedulable or seq.has_row:
                return False
            never = self._admission(seq) is Admission.NEVER
            if len(seq.tokens) <= self._prompt_limit and not never:
                return False
            self._end_in_place(seq, Status.IGNORED)
        self._drop_waiting(seq)
        return True

    def _may_start(self, seq: Sequence, batched: bool) -> bool:
        if (seq.has_row and not seq.forked) or self._fits(seq):
            return True
        if batched or len(self.running) or self._flying or not self._config.watermark_escape:
            return False
        self._reclaim(seq)
        return self._fits(seq)

    # ---- decode

    def plan(self, step_type: StepType) -> None:
        if step_type is StepType.PREFILL:
            self._planned, self._attempt = self._attempt, None
            assert self._planned is not None, "try_prefill comes first"
            return
        self._attempt = None
        self.cleared = []
        if self._config.role == "prefill" or self.paused == "all":
            self._planned = Step(step_type, *NOTHING)
            return
        finished = self._clear_finished()
        self._sweep_waiting()
        self._admit_prompted(self._max_running)
        self._planned = self._plan_decode()
        for seq in finished:
            self.resources.release(seq)

    def _plan_decode(self) -> Step | None:
        """Every running sequence; None if this has to wait for the step in flight."""
        led, rows = self.ledgers, self._continuing()
        order = rows[np.argsort(-self._ahead(led.output_len, rows), kind="stable")]
        drafts = self._drafts(order)
        needed = self._blocks_needed(order, drafts)
        change = needed - led.num_blocks[order]
        if change.any() or self._headroom:
            grow = int(np.maximum(change, 0).sum())
            short = grow + (self._headroom if len(order) else 0) > self.pool.num_free
            if short and self._flying:
                self._put_off = StepType.DECODE
                return None
            if short:
                order, drafts = self._make_room(order, needed, drafts)
            elif change.any():
                self._resize(order, change)
        order, drafts = order[::-1], drafts[::-1]  # the youngest first
        by_length = np.argsort(-self._ahead(led.length, order), kind="stable")
        order, drafts = order[by_length], drafts[by_length]
        if not self._flying:
            self.running = order
        due = self._flying and bool(drafts.any())
        return Step(StepType.DECODE, order, 1 + drafts, drafts, np.ones(len(order), np.bool_), due)

    def _ahead(self, lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """A ledger's lengths of these rows, with all that the step in flight may commit."""
        return lengths[rows] + self.ledgers.inflight[rows] if self._flying else lengths[rows]

    def _drafts(self, rows: np.ndarray) -> np.ndarray:
        """Drafts per row; upper bounds while a step is in flight."""
        if not self._config.num_draft_tokens:
            return np.zeros(len(rows), np.int32)
        limits = draft_limits(self._config, self.ledgers, rows, self._config.max_num_batched_tokens - len(rows))
        return limits if self._flying else self.propose(self.ledgers, rows, limits)

    def _blocks_needed(self, rows: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """ceil((L + I + D) / P): committed, in flight, drafts; or what was reserved for the whole length."""
        led = self.ledgers
        if self._config.admission == "full":
            return led.num_blocks[rows]
        length = self._ahead(led.length, rows)
        if self._config.num_draft_tokens:
            length = length + drafts
            if self._config.clip_drafts:
                np.minimum(length, led.stop_len[rows], out=length)
        return -(-length // self._config.block_size)

    def _resize(self, rows: np.ndarray, change: np.ndarray) -> None:
        """Give back what drafts left over, then hand out new blocks, youngest first."""
        led = self.ledgers
        for index in np.flatnonzero(change < 0).tolist():
            self.resources.shrink(int(rows[index]), int(led.num_blocks[rows[index]] + change[index]))
        self.resources.grow(rows[::-1], change[::-1])

    def _make_room(self, order: np.ndarray, needed: np.ndarray, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Serve from the youngest, sacrifice from the oldest. Returns who stays, oldest first, and their drafts."""
        rows, wanted = order.tolist(), needed.tolist()
        left, right = 0, len(rows)
        kept: list[int] = []
        while left < right:
            row = rows[right - 1]
            count = wanted[right - 1] - int(self.ledgers.num_blocks[row])
            room = max(count, self._headroom)
            while self.pool.num_free < room and right - left > 1:
                self._preempt(self.ledgers.seq_of(rows[left]))
                left += 1
            if self.pool.num_free >= room:
                self._serve(row, wanted[right - 1], count)
                kept.append(right - 1)
            else:
                self._preempt(self.ledgers.seq_of(row))
            right -= 1
        stay = np.array(kept[::-1], np.int64)
        self.running = order[stay]
        return order[stay], drafts[stay]

    def _serve(self, row: int, needed: int, count: int) -> None:
        if count < 0:
            self.resources.shrink(row, needed)
        else:
            self.resources.append(row, count)

    # ---- what has ended (release next_decode)

    def abort(self, request_id: int, status: Status = Status.ABORTED) -> None:
        seq = self._by_id.get(request_id)
        if not self._lazy or seq is None or not (seq.status is Status.RUNNING or seq in self.waiting):
            super().abort(request_id, status)
            return
        self.counters.aborted += status is Status.ABORTED
        self._num_dead += seq in self.waiting
        self._end_in_place(seq, status)

    def _end_in_place(self, seq: Sequence, status: Status) -> None:
        """Ended, but where it was."""
        seq.status = status
        del self._by_id[seq.request_id]
        self._orphan(seq)

    def _let_go(self, seq: Sequence) -> None:
        if self._lazy and seq.status in (Status.STOPPED, Status.LENGTH):
            return  # until it is cleared
        super()._let_go(seq)

    def _clear(self, rows: np.ndarray) -> None:
        if not self._lazy:
            super()._clear(rows)

    def _drop_waiting(self, seq: Sequence) -> None:
        self._num_dead -= seq.status is not Status.IGNORED
        self.waiting.remove(seq)
        self.resources.release(seq)
        self.unreported.append(seq)

    def _clear_finished(self) -> list[Sequence]:
        """Take what has ended out of `running`; its blocks are released after the plan."""
        if not self._lazy:
            return []
        finished = [seq for row in self.running.tolist() if (seq := self.ledgers.seq_of(row)).status.finished]
        if finished:
            rows = np.array([seq.row for seq in finished], np.int32)
            self.running = self.running[~np.isin(self.running, rows)]
        self.cleared = finished
        return finished

    def _sweep_waiting(self) -> None:
        """A dead head would veto every ALL point for ever."""
        if self._num_dead:
            for seq in [seq for seq in self.waiting if seq.status.finished]:
                self._drop_waiting(seq)
