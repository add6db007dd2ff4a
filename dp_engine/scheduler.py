"""The phased scheduler of a rank: a step is either prefill or decode. The rules are DeepInfer's unless said otherwise.

Calls of one step, in this order: `facts`, `try_prefill` (if the gang chose PREFILL), `take`, `settle`. Requests arrive
(`add`) and leave (`abort`) only between steps, so nothing that a step in flight writes is ever freed under it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from dp_engine.batch import Batch
from dp_engine.blocks import Admission, BlockPool
from dp_engine.config import EngineConfig
from dp_engine.ledger import Ledgers, blocks_for
from dp_engine.messages import Add
from dp_engine.sequence import Sequence, Status
from vote.ballot import Facts
from vote.decision import StepType

_NOTHING = np.zeros(0, np.int32)


class Refused(ValueError):
    """A request this rank can never run; the message says why."""


@dataclass(slots=True)
class Counters:
    """Cumulative since the engine's start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class StepOutput:
    """What a step gave: one token per request in `request_ids`, and the requests that ended with it."""

    request_ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[tuple[int, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Scheduled:
    """Rows of the step that is being computed, and their query lengths."""

    rows: np.ndarray
    seqlens_q: np.ndarray
    chunk: Sequence | None = None  # the sequence whose prompt is not finished by this step; always the last row


class PhasedScheduler:
    """Owns queues, ledgers and block pool of a rank.

    waiting: not yet prefilled, in order of arrival; its head blocks the rest on purpose. A half-prefilled sequence
    stays at the head and holds its blocks. running: rows that decode.
    """

    def __init__(
        self, config: EngineConfig, num_blocks: int, max_model_len: int, eos_token_ids: Iterable[int], wake: int = 0
    ) -> None:
        self.counters = Counters()
        self.max_model_len = max_model_len
        self.pool = BlockPool(num_blocks)
        self.wake = wake  # last wake-up number seen; the rank's inbox writes it
        self.wants_stop = False
        self._config = config
        self._eos = np.array(sorted(eos_token_ids), np.int64)
        self._ledgers = Ledgers(config.max_num_seqs + 1, max_model_len, config.block_size)
        self._waiting: deque[Sequence] = deque()
        self._running = _NOTHING
        self._by_id: dict[int, Sequence] = {}
        self._attempt: _Scheduled | None = None
        self._in_step: _Scheduled | None = None
        self._preempted: list[Sequence] = []  # ended by preemption, not yet reported

    # ---- requests

    def add(self, request: Add) -> None:
        """Queue a request. Raises Refused if it can never run here."""
        seq = self._sequence(request)
        self._by_id[seq.request_id] = seq
        self._waiting.append(seq)

    def abort(self, request_id: int) -> None:
        """Forget a request; unknown ids are ignored. Its place in `waiting` is swept when it becomes the head."""
        seq = self._by_id.get(request_id)
        if seq is None:
            return
        if seq.status is Status.RUNNING:
            self._running = self._running[self._running != seq.row]
        self._end(seq, Status.ABORTED)
        self._sweep_waiting()

    @property
    def num_unfinished(self) -> int:
        return len(self._by_id)

    @property
    def num_running(self) -> int:
        return len(self._running)

    # ---- one step

    def facts(self) -> Facts:
        """This rank's side of the first ballot."""
        return Facts(
            wants_prefill=self._wants_prefill(),
            has_decode=len(self._running) > 0,
            unfinished=bool(self._by_id),
            wants_stop=self.wants_stop,
            wake=self.wake,
        )

    def try_prefill(self) -> bool:
        """Schedule a prefill; True if there is something to run."""
        self._attempt = self._schedule_prefill()
        return len(self._attempt.rows) > 0

    def take(self, step_type: StepType) -> Batch:
        """The batch of this step; empty if this rank has nothing to run in a step of this type."""
        if step_type is StepType.PREFILL:
            assert self._attempt is not None
            self._in_step = self._attempt
        else:
            self._in_step = self._schedule_decode()
        self._attempt = None
        return self._ledgers.batch(step_type, self._in_step.rows, self._in_step.seqlens_q)

    def settle(self, tokens: np.ndarray) -> StepOutput:
        """Account for a computed step. `tokens`: int64 [B], one per sequence of the batch `take` returned."""
        step = self._in_step
        assert step is not None and len(tokens) == len(step.rows)
        self._in_step = None
        self._ledgers.num_tokens[step.rows] += step.seqlens_q
        rows = step.rows
        if step.chunk is not None:
            self._waiting.appendleft(step.chunk)
            rows, tokens = rows[:-1], tokens[:-1]
        output = self._append(rows, tokens)
        output.finished.extend((seq.request_id, seq.status.reason) for seq in self._preempted)
        self._preempted.clear()
        return output

    def check_integrity(self) -> None:
        """Raise if blocks are lost or shared by mistake. Cheap enough for whenever the gang falls asleep."""
        self.pool.check_integrity()
        held = sum(int(self._ledgers.num_blocks[seq.row]) for seq in self._by_id.values() if seq.has_row)
        if held != self.pool.num_used:
            raise RuntimeError(f"scheduler: {self.pool.num_used} blocks in use, sequences hold {held}")

    # ---- admission

    def _sequence(self, request: Add) -> Sequence:
        length = len(request.prompt)
        prompt_len = length - request.num_emitted
        stop_len = min(prompt_len + request.sampling.max_tokens, self.max_model_len)
        if request.request_id in self._by_id:
            raise Refused(f"request id {request.request_id} is in use")
        if prompt_len < 1:
            raise Refused("the prompt is empty")
        if stop_len <= length:
            raise Refused(
                f"a prompt of {length} tokens leaves no room for a new token: "
                f"the model takes {self.max_model_len}, the request asks for {request.sampling.max_tokens}"
            )
        if not self._config.chunked_prefill and length > self._config.max_num_batched_tokens:
            raise Refused(
                f"a prompt of {length} tokens exceeds the token budget of a step "
                f"({self._config.max_num_batched_tokens}) and chunked prefill is off"
            )
        needed = int(blocks_for(stop_len, self._config.block_size))
        if self.pool.can_allocate(needed) is Admission.NEVER:
            raise Refused(f"{stop_len} tokens need {needed} KV blocks, a rank has {self.pool.capacity}")
        return Sequence(
            request_id=request.request_id,
            tokens=np.array(request.prompt, np.int32),
            prompt_len=prompt_len,
            stop_len=stop_len,
            sampling=request.sampling,
            stop_token_ids=frozenset(request.sampling.stop_token_ids),
        )

    def _wants_prefill(self) -> bool:
        """Could the head of `waiting` be prefilled now?

        Differs from DeepInfer's want, which does not look at blocks and sequence limit (its second ballot then repairs
        that at the cost of a ballot), and which stays false above the watermark even when nothing runs, so that
        half-prefilled sequences could hold the pool for ever.
        """
        if not self._waiting or len(self._running) >= self._config.max_num_seqs:
            return False
        head = self._waiting[0]
        if not len(self._running) or head.has_row:
            return True  # `add` let in nothing that an otherwise empty rank cannot hold
        if self.pool.num_used > self._config.kv_watermark * self.pool.capacity:
            return False
        return self._fits(head)

    def _fits(self, seq: Sequence) -> bool:
        """A new sequence gets all blocks of its prompt at once, a preempted one only if its whole context and one more
        token fit, so that it is not preempted again at once.
        """
        length = len(seq.tokens) + (seq.preemptions > 0)
        return self.pool.can_allocate(int(blocks_for(length, self._config.block_size))) is Admission.OK

    def _reclaim(self, head: Sequence) -> None:
        """Nothing runs and the head lacks blocks: half-prefilled sequences behind it start anew, the last one first."""
        for seq in reversed(self._waiting):
            if self._fits(head):
                return
            if seq is not head:
                self._release(seq)

    # ---- prefill

    def _schedule_prefill(self) -> _Scheduled:
        """From the head of `waiting` until the first limit. All tests of a sequence pass before anything changes."""
        rows: list[int] = []
        lengths: list[int] = []
        budget = self._config.max_num_batched_tokens
        while self._waiting:
            seq = self._waiting[0]
            if len(self._running) + len(rows) + 1 > self._config.max_num_seqs:
                break
            done = int(self._ledgers.num_tokens[seq.row]) if seq.has_row else 0
            rest = self._length(seq) - done
            seqlen_q = min(rest, budget)
            if seqlen_q < 1 or (seqlen_q < rest and not self._config.chunked_prefill):
                break
            if not seq.has_row and not self._fits(seq):
                if rows or len(self._running):
                    break
                self._reclaim(seq)
            self._waiting.popleft()
            rows.append(self._open(seq))
            lengths.append(seqlen_q)
            budget -= seqlen_q
            self.counters.prompt_tokens += seqlen_q
            if seqlen_q < rest:
                self._sweep_waiting()
                return self._scheduled(rows, lengths, chunk=seq)
            seq.status = Status.RUNNING
            self._sweep_waiting()
        return self._scheduled(rows, lengths)

    def _scheduled(self, rows: list[int], lengths: list[int], chunk: Sequence | None = None) -> _Scheduled:
        scheduled = _Scheduled(np.array(rows, np.int32), np.array(lengths, np.int32), chunk)
        completed = scheduled.rows if chunk is None else scheduled.rows[:-1]
        self._running = np.concatenate((self._running, completed))
        return scheduled

    def _length(self, seq: Sequence) -> int:
        return int(self._ledgers.length[seq.row]) if seq.has_row else len(seq.tokens)

    def _open(self, seq: Sequence) -> int:
        if not seq.has_row:
            needed = int(blocks_for(len(seq.tokens), self._config.block_size))
            row = self._ledgers.open(seq)
            self._ledgers.append_blocks(row, self.pool.allocate(needed))
        return seq.row

    def _sweep_waiting(self) -> None:
        """Invariant: the head of `waiting` is alive."""
        while self._waiting and self._waiting[0].status.finished:
            self._waiting.popleft()

    # ---- decode

    def _schedule_decode(self) -> _Scheduled:
        """Every running sequence, youngest first (LCFS by output length); the oldest make room when blocks run out."""
        led = self._ledgers
        order = self._running[np.argsort(-led.output_len[self._running], kind="stable")]
        missing = np.maximum(blocks_for(led.length[order], self._config.block_size) - led.num_blocks[order], 0)
        total = int(missing.sum())
        if total > self.pool.num_free:
            order = self._make_room(order, missing)
        elif total:
            self._grow(order, missing, self.pool.allocate(total))
        self._running = order
        return _Scheduled(order[::-1], np.ones(len(order), np.int32))

    def _grow(self, order: np.ndarray, missing: np.ndarray, blocks: np.ndarray) -> None:
        """Hand out `blocks` to the rows of `order`, youngest first. A decode step needs at most one block a row."""
        rows = order[::-1][missing[::-1] > 0]
        assert len(rows) == len(blocks), "a decode step advances by one token"
        self._ledgers.block_table[rows, self._ledgers.num_blocks[rows]] = blocks
        self._ledgers.num_blocks[rows] += 1

    def _make_room(self, order: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Serve from the youngest, sacrifice from the oldest; returns the rows that stay, oldest first."""
        rows, counts = order.tolist(), missing.tolist()
        left, right = 0, len(rows)
        kept: list[int] = []
        while left < right:
            row, count = rows[right - 1], counts[right - 1]
            while self.pool.num_free < count and right - left > 1:
                self._preempt(self._ledgers.seq_of(rows[left]))
                left += 1
            if self.pool.num_free >= count:
                self._ledgers.append_blocks(row, self.pool.allocate(count))
                kept.append(row)
            else:
                self._preempt(self._ledgers.seq_of(row))
            right -= 1
        return np.array(kept[::-1], np.int32)

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks: it ends, or it is computed again from the head of `waiting`.

        The caller takes its row out of `running`.
        """
        self.counters.preemptions += 1
        if self._config.preemption == "terminate" or seq.preemptions >= self._config.max_preemptions:
            self._end(seq, Status.PREEMPTED)
            self._preempted.append(seq)
            return
        seq.preemptions += 1
        seq.status = Status.WAITING
        self._release(seq)
        self._waiting.appendleft(seq)

    # ---- settlement

    def _append(self, rows: np.ndarray, tokens: np.ndarray) -> StepOutput:
        """Commit one token per row, then end the sequences that are done."""
        led = self._ledgers
        lengths = led.length[rows]
        led.tokens[rows, lengths] = tokens
        led.length[rows] = lengths + 1
        led.output_len[rows] += 1
        self.counters.generated_tokens += len(rows)
        stopped = np.isin(tokens, self._eos) & ~led.ignore_eos[rows]
        for index in np.flatnonzero(led.has_stop_ids[rows]).tolist():
            stopped[index] |= int(tokens[index]) in led.seq_of(int(rows[index])).stop_token_ids
        ended = stopped | (lengths + 1 >= led.stop_len[rows])
        output = StepOutput(led.request_id[rows].tolist(), tokens.tolist())
        if ended.any():
            self._running = self._running[~np.isin(self._running, rows[ended])]
            for index in np.flatnonzero(ended).tolist():
                seq = led.seq_of(int(rows[index]))
                self._end(seq, Status.STOPPED if stopped[index] else Status.LENGTH)
                output.finished.append((seq.request_id, seq.status.reason))
        return output

    def _end(self, seq: Sequence, status: Status) -> None:
        seq.status = status
        self._release(seq)
        del self._by_id[seq.request_id]

    def _release(self, seq: Sequence) -> None:
        """Give back blocks and row, if it has any. Idempotent per sequence."""
        if seq.has_row:
            self.pool.free(self._ledgers.blocks_of(seq.row))
            self._ledgers.close(seq)
