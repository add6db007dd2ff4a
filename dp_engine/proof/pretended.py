"""A model for simulations whose KV cache can be read back: whatever is shared, copied, freed or scheduled wrongly
changes a token."""

from collections.abc import Sequence

import numpy as np

from dp_engine.batch import Batch


def next_token(context: Sequence[int]) -> int:
    """A function of the whole context that often repeats what was said before; 10 at least."""
    mixed = sum((i + 1) * token for i, token in enumerate(context))
    return context[-3] if mixed % 4 and len(context) > 3 else 10 + mixed % 83


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What the model says to a prompt."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


class PretendedModel:
    """Owns the KV cache of a rank: which token each slot holds."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._cache = np.full((num_blocks, block_size), -1, np.int64)

    def run(self, batch: Batch) -> np.ndarray:
        """Copy blocks, write the tokens, read each sequence's context through its block table, draw from it."""
        cache = self._cache
        if len(batch.block_copies):
            cache[batch.block_copies[:, 1]] = cache[batch.block_copies[:, 0]]
        cache.reshape(-1)[batch.slots] = batch.input_ids
        tokens: list[int] = []
        sizes = zip(batch.seqlens_k.tolist(), batch.num_drafts.tolist(), strict=True)
        for table, (length, drafts) in zip(batch.block_tables, sizes, strict=True):
            context = cache[table].reshape(-1)[:length].tolist()
            assert -1 not in context, "a token that was never computed is read"
            tokens += [next_token(context[: length - drafts + number]) for number in range(drafts + 1)]
        return np.array(tokens, np.int64)
