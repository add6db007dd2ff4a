"""Names of full KV blocks: a block's name stands for all tokens up to its end and for whatever else shapes their KV."""

from hashlib import blake2b

import numpy as np

KEY_BYTES = 16


def root_key(generation: int, salt: str) -> bytes:
    """The name that chains of a cache generation and a salt begin with."""
    return blake2b(f"{generation}:{salt}".encode(), digest_size=KEY_BYTES).digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: np.ndarray, num_blocks: int, block_size: int) -> None:
    """Name the blocks up to `num_blocks`: key i = H(key i-1, tokens of block i). tokens: int32, at least that many."""
    parent = keys[-1] if keys else root
    content = tokens[len(keys) * block_size : num_blocks * block_size].tobytes()
    width = 4 * block_size
    for start in range(0, len(content), width):
        parent = blake2b(parent + content[start : start + width], digest_size=KEY_BYTES).digest()
        keys.append(parent)
