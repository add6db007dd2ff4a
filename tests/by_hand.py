"""Batches made by hand: as little scheduling as it takes to run a ModelRunner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dp_engine.batch import Batch, SamplingBatch
from dp_engine.drafts import accepted
from dp_engine.runner import ModelRunner
from vote.decision import StepType


@dataclass
class HandSequence:
    """A prompt, the tokens drawn so far, guesses of the next ones, and its own blocks."""

    prompt: list[int]
    blocks: list[int]
    max_new: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    computed: int = 0
    accepted: int = 0
    rejected: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def finished(self) -> bool:
        return len(self.output) == self.max_new


def lay_out(prompts: list[list[int]], max_new: int, block_size: int, **sampling: float) -> list[HandSequence]:
    """Sequences whose blocks are dealt out in turns, so that no table is a plain range."""
    sizes = [-(-(len(prompt) + max_new) // block_size) for prompt in prompts]
    blocks: list[list[int]] = [[] for _ in prompts]
    block = 1
    for turn in range(max(sizes, default=0)):
        for index, size in enumerate(sizes):
            if turn < size:
                blocks[index].append(block)
                block += 1
    return [HandSequence(prompt, own, max_new, **sampling) for prompt, own in zip(prompts, blocks, strict=True)]  # type: ignore[arg-type]


def make_batch(
    scheduled: list[tuple[HandSequence, int]], block_size: int, copies: Sequence[tuple[int, int]] = ()
) -> Batch:
    """Each sequence with its number of query tokens, drafts included, and blocks to copy before."""
    ids: list[int] = []
    positions: list[int] = []
    slots, tables = [], []
    for sequence, count in scheduled:
        span = range(sequence.computed, sequence.computed + count)
        ids += (sequence.tokens + sequence.drafts)[span.start : span.stop]
        positions += span
        slots += [sequence.blocks[at // block_size] * block_size + at % block_size for at in span]
        tables.append(sequence.blocks[: -(-span.stop // block_size)])
    width = max((len(table) for table in tables), default=0)
    padded = np.zeros((len(tables), width), np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    sequences = [sequence for sequence, _ in scheduled]
    seqlens_q = np.array([count for _, count in scheduled], np.int32)
    seqlens_k = np.array([sequence.computed for sequence in sequences], np.int32) + seqlens_q
    num_drafts = np.array([len(sequence.drafts) for sequence in sequences], np.int32)
    return Batch(
        step_type=StepType.MIXED,
        input_ids=np.array(ids, np.int64),
        positions=np.array(positions, np.int64),
        slots=np.array(slots, np.int64),
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        num_drafts=num_drafts,
        block_tables=padded,
        block_copies=np.array(copies, np.int64).reshape(-1, 2),
        state_slots=np.zeros(len(sequences), np.int32),
        state_copies=np.zeros((0, 2), np.int64),
        sampling=SamplingBatch(
            temperature=np.array([s.temperature for s in sequences], np.float32),
            top_p=np.array([s.top_p for s in sequences], np.float32),
            top_k=np.array([s.top_k for s in sequences], np.int32),
            seed=np.array([s.seed for s in sequences], np.uint64),
            position=(seqlens_k - num_drafts).astype(np.int64),
        ),
    )


def settle(scheduled: list[tuple[HandSequence, int]], tokens: np.ndarray) -> None:
    """Give the sequences what a step drew for them: the accepted drafts and one token more."""
    num_drafts = np.array([len(sequence.drafts) for sequence, _ in scheduled], np.int32)
    drafts = np.array([token for sequence, _ in scheduled for token in sequence.drafts], np.int64)
    right = accepted(tokens, drafts, num_drafts).tolist()
    start = 0
    for (sequence, count), num_right in zip(scheduled, right, strict=True):
        guessed, sequence.drafts = len(sequence.drafts), []
        sequence.computed += count - guessed
        if sequence.computed == len(sequence.tokens):
            sequence.output += tokens[start : start + num_right + 1].tolist()
            sequence.computed += num_right
        sequence.accepted += num_right
        sequence.rejected += guessed - num_right
        start += guessed + 1


def run_sequences(
    runner: ModelRunner,
    sequences: list[HandSequence],
    chunk: int,
    block_size: int,
    steps: int,
    guess: Callable[[HandSequence], list[int]] = lambda sequence: [],
) -> None:
    """Exactly `steps` forwards, empty ones at the end; prompts go in chunks beside the decodes of shorter ones.

    `guess` gives the drafts of a sequence whose next token is to be drawn.
    """
    for _ in range(steps):
        scheduled = []
        for sequence in sequences:
            if sequence.finished:
                continue
            count = min(chunk, len(sequence.tokens) - sequence.computed)
            if sequence.computed + count == len(sequence.tokens):
                sequence.drafts = guess(sequence)[: sequence.max_new - len(sequence.output) - 1]
            scheduled.append((sequence, count + len(sequence.drafts)))
        settle(scheduled, runner.run(make_batch(scheduled, block_size)).tokens)
    assert all(sequence.finished for sequence in sequences)


def steps_needed(prompts: list[list[int]], max_new: int, chunk: int) -> int:
    return max((-(-len(prompt) // chunk) for prompt in prompts), default=0) + max_new - 1
