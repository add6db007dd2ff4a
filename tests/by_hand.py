"""Batches made by hand: as little scheduling as it takes to run a ModelRunner."""

from dataclasses import dataclass, field

import numpy as np

from dp_engine.batch import Batch, SamplingBatch
from dp_engine.runner import ModelRunner
from vote.decision import StepType


@dataclass
class HandSequence:
    """A prompt, the tokens drawn so far, and its own blocks."""

    prompt: list[int]
    blocks: list[int]
    max_new: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    output: list[int] = field(default_factory=list)
    computed: int = 0

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


def make_batch(scheduled: list[tuple[HandSequence, int]], block_size: int) -> Batch:
    """Each sequence with its number of query tokens."""
    ids, positions, slots, tables = [], [], [], []
    for sequence, count in scheduled:
        span = range(sequence.computed, sequence.computed + count)
        ids += sequence.tokens[span.start : span.stop]
        positions += span
        slots += [sequence.blocks[at // block_size] * block_size + at % block_size for at in span]
        tables.append(sequence.blocks[: -(-span.stop // block_size)])
    width = max((len(table) for table in tables), default=0)
    padded = np.zeros((len(tables), width), np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    sequences = [sequence for sequence, _ in scheduled]
    return Batch(
        step_type=StepType.MIXED,
        input_ids=np.array(ids, np.int64),
        positions=np.array(positions, np.int64),
        slots=np.array(slots, np.int64),
        seqlens_q=np.array([count for _, count in scheduled], np.int32),
        seqlens_k=np.array([sequence.computed + count for sequence, count in scheduled], np.int32),
        block_tables=padded,
        sampling=SamplingBatch(
            temperature=np.array([s.temperature for s in sequences], np.float32),
            top_p=np.array([s.top_p for s in sequences], np.float32),
            top_k=np.array([s.top_k for s in sequences], np.int32),
            seed=np.array([s.seed for s in sequences], np.uint64),
            position=np.array([s.computed + count for s, count in scheduled], np.int64),
        ),
    )


def run_sequences(runner: ModelRunner, sequences: list[HandSequence], chunk: int, block_size: int, steps: int) -> None:
    """Exactly `steps` forwards, empty ones at the end; prompts go in chunks beside the decodes of shorter ones."""
    for _ in range(steps):
        scheduled = []
        for sequence in sequences:
            if not sequence.finished:
                scheduled.append((sequence, min(chunk, len(sequence.tokens) - sequence.computed)))
        tokens = runner.run(make_batch(scheduled, block_size))
        for (sequence, count), token in zip(scheduled, tokens.tolist(), strict=True):
            sequence.computed += count
            if sequence.computed == len(sequence.tokens):
                sequence.output.append(token)
    assert all(sequence.finished for sequence in sequences)


def steps_needed(prompts: list[list[int]], max_new: int, chunk: int) -> int:
    return max((-(-len(prompt) // chunk) for prompt in prompts), default=0) + max_new - 1
