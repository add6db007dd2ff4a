"""How much of a prompt the next chunk takes: a pure rule over the limits of a prefill step, in DeepInfer's order."""

from dp_engine.config import EngineConfig
from dp_engine.sequence import Sequence


class Chunker:
    """Budget with context-parallel alignment (chunks are charged, and the budget is cut, in multiples of it),
    checkpoints, image spans, smallest chunk."""

    def __init__(self, config: EngineConfig) -> None:
        self._budget = config.max_num_batched_tokens
        self._alignment = config.cp_alignment
        self._smallest = max(config.lookahead_tokens, 1)

    def charge(self, seqlen_q: int) -> int:
        """What a chunk costs of the budget."""
        return -(-seqlen_q // self._alignment) * self._alignment

    def seqlen_q(self, seq: Sequence, done: int, rest: int, used: int, first: bool) -> int:
        """Tokens for `seq`, of which `done` are computed and `rest` are not; 0: not in this step.

        `used`: of the budget by those before it; `first`: there are none.
        """
        smallest = min(self._smallest, rest)
        chunk = min(rest, (self._budget - used) // self._alignment * self._alignment)
        checkpoint = next((mark for mark in seq.checkpoints if mark >= done + smallest), None)
        if checkpoint is not None and done + chunk >= checkpoint:
            chunk = checkpoint - done
        if chunk < rest:
            chunk = self._outside_spans(seq, done, chunk, used, first)
        return chunk if chunk >= smallest or first else 0  # alone, a span may leave less than the smallest chunk

    def _outside_spans(self, seq: Sequence, done: int, chunk: int, used: int, first: bool) -> int:
        """Shrink to before a span that the boundary would cut; alone in the batch, take the whole span if that leaves
        nothing."""
        span = next(((start, stop) for start, stop in seq.spans if start < done + chunk < stop), None)
        if span is None:
            return chunk
        before, behind = span[0] - done, span[1] - done
        if before < self._smallest and first and used + behind <= self._budget:
            return behind
        return max(before, 0)
