"""One rank with a fake model whose KV cache can be read back: whatever is shared, copied, freed or scheduled wrongly
changes a token.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from dp_engine.batch import Batch
from dp_engine.config import EngineConfig
from dp_engine.ledger import Ledgers
from dp_engine.messages import Add, Sampling
from dp_engine.output import StepOutput
from dp_engine.policies import make_scheduler
from dp_engine.proof.pretended import continuation, next_token
from dp_engine.scheduler import Scheduler
from dp_engine.sequence import Sequence
from vote.decision import StepType

EOS = 2
WRONG = 9  # a draft that the model never says
expected = continuation


def prompt_of(request_id: int, length: int) -> list[int]:
    return [100 + request_id * 7 + i for i in range(length)]


class World:
    """Arrivals and steps of one rank. With overlap, a step is settled when the one after it has been planned."""

    def __init__(
        self, num_blocks: int = 257, max_model_len: int = 512, eos_token_ids: tuple[int, ...] = (EOS,), **config: Any
    ) -> None:
        self.config = EngineConfig(**config)
        self.scheduler: Scheduler = make_scheduler(self.config, num_blocks, max_model_len, eos_token_ids)
        self.outputs: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, str] = {}
        self.steps: list[tuple[StepType, list[int]]] = []  # that computed something
        self.ran: list[list[tuple[int, int]]] = []  # of the same steps: requests and their query lengths
        self.noted: list[StepOutput] = []
        self.cache: dict[int, int] = {}  # slot -> token whose KV it holds
        self.state: dict[int, int] = {}  # state slot -> tokens it has seen
        self.pending: np.ndarray | None = None  # result of the step in flight

    def add(self, request_id: int, prompt: int | list[int], max_tokens: int = 4, **more: Any) -> None:
        tokens = prompt_of(request_id, prompt) if isinstance(prompt, int) else prompt
        names = ("parent", "priority", "cache_salt", "schedulable", "structured", "chunk_checkpoints", "spans")
        marks = {name: more.pop(name) for name in names if name in more}
        self.scheduler.add(Add(1, request_id, tokens, Sampling(max_tokens, **more), **marks))

    def step(self, step_type: StepType | None = None) -> Batch | None:
        """One vote of a gang of one; without a type, prefill whenever it is wanted. None: nobody had work."""
        scheduler = self.scheduler
        if self.config.policy == "unified":
            step_type = StepType.MIXED
            scheduler.plan(step_type)
            facts = scheduler.facts()
            compute = facts.scheduled
        else:
            facts = scheduler.facts()
            wanted = step_type is StepType.PREFILL or (step_type is None and facts.wants_prefill)
            step_type = StepType.PREFILL if wanted and scheduler.try_prefill() else StepType.DECODE
            compute = step_type is StepType.PREFILL or facts.has_decode
            if compute:
                scheduler.plan(step_type)
        self.settle()
        if not compute:
            scheduler.check_integrity()
            asleep = not facts.unfinished
            assert not asleep or not scheduler.facts().unfinished, "asleep with work"
            return None
        batch = scheduler.batch()
        self.pending = self.model(batch)
        self.steps.append((step_type, batch.seqlens_q.tolist()))
        self.ran.append(list(zip(self.in_flight(), batch.seqlens_q.tolist(), strict=True)))
        if not self.config.overlap:
            self.settle()
        scheduler.check_integrity()
        return batch

    def in_flight(self) -> list[int]:
        """Requests of the step in flight, in order."""
        return self.scheduler.in_flight

    def settle(self) -> None:
        if self.pending is not None:
            tokens, self.pending = self.pending, None
            self.note(self.scheduler.settle(tokens))

    def note(self, output: StepOutput) -> None:
        self.noted.append(output)
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            assert request_id not in self.finished, "a token after the end"
            self.outputs[request_id].append(token)
        for request_id, reason in output.finished:
            assert request_id not in self.finished, "two ends"
            self.finished[request_id] = reason

    def model(self, batch: Batch) -> np.ndarray:
        """Copy, write the KV, read each sequence's context back through its block table, derive tokens from it."""
        self.copy(batch)
        for slot, token in zip(batch.slots.tolist(), batch.input_ids.tolist(), strict=True):
            assert slot >= self.config.block_size, "the null block is written"
            self.cache[slot] = token
        lengths = zip(batch.seqlens_k.tolist(), batch.seqlens_q.tolist(), batch.num_drafts.tolist(), strict=True)
        result: list[int] = []
        for index, (length, seqlen_q, drafts) in enumerate(lengths):
            assert seqlen_q > drafts, "a sequence without a token of its own"
            context = self.context(batch.block_tables[index], length)
            result += [self.answer(context[: length - drafts + j]) for j in range(drafts + 1)]
            if self.config.num_state_slots:
                self.touch(int(batch.state_slots[index]), length, seqlen_q, drafts)
        return np.array(result, np.int64)

    def answer(self, context: list[int]) -> int:
        return next_token(context)

    def copy(self, batch: Batch) -> None:
        size = self.config.block_size
        moved = {
            target * size + at: self.cache.get(source * size + at)
            for source, target in batch.block_copies.tolist()
            for at in range(size)
        }
        self.cache.update({slot: token for slot, token in moved.items() if token is not None})
        states = {target: self.state.get(source, 0) for source, target in batch.state_copies.tolist()}
        self.state.update(states)

    def context(self, table: np.ndarray, length: int) -> list[int]:
        size = self.config.block_size
        return [self.cache[int(table[i // size]) * size + i % size] for i in range(length)]

    def touch(self, slot: int, length: int, seqlen_q: int, drafts: int) -> None:
        """A state area has seen what its sequence has computed (drafts may have been rejected meanwhile)."""
        assert slot > 0, "no state slot"
        if length > seqlen_q and not drafts and not self.config.num_draft_tokens and not self.config.prefix_cache:
            assert self.state[slot] in (length - seqlen_q, length - seqlen_q + 1)
        self.state[slot] = length

    # ---- what tests ask

    def scheduled(self, step_type: StepType | None = None) -> list[tuple[int, int]]:
        """One step; which requests ran in it, in order, with their query lengths."""
        return self.ran[-1] if self.step(step_type) is not None else []

    def prefill(self) -> list[tuple[int, int]]:
        return self.scheduled(StepType.PREFILL)

    def decode(self) -> list[tuple[int, int]]:
        return self.scheduled(StepType.DECODE)

    def seq(self, request_id: int) -> Sequence:
        return self.scheduler._by_id[request_id]

    def blocks(self, request_id: int) -> list[int]:
        seq = self.seq(request_id)
        return self.scheduler.ledgers.blocks_of(seq.row).tolist() if seq.has_row else []

    def computed(self, request_id: int) -> int:
        seq = self.seq(request_id)
        return int(self.scheduler.ledgers.num_tokens[seq.row]) if seq.has_row else 0

    def waiting(self) -> list[int]:
        return [seq.request_id for seq in self.scheduler.waiting]

    def running(self) -> list[int]:
        return self.scheduler.ledgers.request_id[self.scheduler.running].tolist()

    def guess(self, right: int) -> None:
        """From now on as many drafts as are allowed, of which the first `right` are what the model will say."""

        def propose(ledgers: Ledgers, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
            for row, limit in zip(rows.tolist(), limits.tolist(), strict=True):
                context = ledgers.tokens[row, : ledgers.length[row]].tolist()
                for number in range(limit):
                    token = self.answer(context)
                    ledgers.tokens[row, len(context)] = token if number < right else WRONG
                    context.append(token)
            return limits

        self.scheduler.propose = propose

    def run(self, limit: int = 3000) -> None:
        """Until nothing is left; checks that everything has come home. A vote may find nothing to do (the only sequence
        that ran has just been preempted), but not two in a row."""
        idle_votes = 0
        for _ in range(limit):
            if not self.scheduler.num_unfinished and self.pending is None and not self.scheduler.facts().unfinished:
                break
            may_wait = self.pending is not None or not self.scheduler.num_unfinished
            idle_votes = 0 if self.step() is not None or may_wait else idle_votes + 1
            assert idle_votes < 2, "nobody runs, but some wait"
        assert not self.scheduler.num_unfinished, f"{self.scheduler.num_unfinished} requests never ended"
        self.check_drained()

    def check_drained(self) -> None:
        scheduler = self.scheduler
        assert scheduler.pool.num_used == 0
        assert scheduler.resources.slots is None or scheduler.resources.slots.num_used == 0
        assert not len(scheduler.running) and not scheduler.waiting and not scheduler.prompted
        facts = scheduler.facts()
        assert not (facts.wants_prefill or facts.has_decode or facts.unfinished)
