"""The memory of a rank's KV blocks."""

import math

import numpy as np
import torch
from torch import Tensor

from dp_engine.config import EngineConfig
from dp_engine.model_config import ModelConfig, ModelConfigError


def block_bytes(config: ModelConfig, engine: EngineConfig) -> int:
    """Bytes of one block over all layers."""
    return config.num_layers * engine.block_size * math.prod(config.kv_shape) * config.dtype.itemsize


def num_blocks_for(config: ModelConfig, engine: EngineConfig) -> int:
    """Blocks of a rank's pool, null block included: `num_blocks`, else what fits into `kv_memory_gib`.

    Never more than all `max_num_seqs` sequences can fill at full length. Raises ModelConfigError when not even one
    block besides the null block fits.
    """
    if engine.num_blocks is not None:
        return engine.num_blocks
    per_sequence = -(-config.max_model_len // engine.block_size)
    fitting = int(engine.kv_memory_gib * 2**30) // block_bytes(config, engine)
    if fitting < 2:
        raise ModelConfigError(
            f"engine.kv_memory_gib {engine.kv_memory_gib} holds {fitting} KV blocks of "
            f"{block_bytes(config, engine)} bytes, at least 2 are needed"
        )
    return min(fitting, engine.max_num_seqs * per_sequence + 1)


class KVCache:
    """`layers[i]`: [num_blocks, block_size, *ModelConfig.kv_shape]: keys then values of every head, or one latent row.

    Zeros at first; later whatever was written, always finite, since attention masks stale entries by weight 0. Which
    block belongs to whom is the block pool's business.
    """

    def __init__(self, config: ModelConfig, engine: EngineConfig, num_blocks: int, device: torch.device):
        shape = (num_blocks, engine.block_size, *config.kv_shape)
        self.layers: list[Tensor] = [
            torch.zeros(shape, dtype=config.dtype, device=device) for _ in range(config.num_layers)
        ]
        self.num_blocks = num_blocks
        self.block_size = engine.block_size

    def copy_blocks(self, copies: np.ndarray) -> None:
        """Copy blocks in every layer: int64 [C, 2], (source, destination). All sources are read before anything is
        written; destinations are distinct."""
        if not len(copies):
            return
        sources, destinations = torch.from_numpy(copies.T.copy()).to(self.layers[0].device)
        for layer in self.layers:
            layer.index_copy_(0, destinations, layer.index_select(0, sources))

    def clear_null_block(self) -> None:
        """Undo what warm-up wrote."""
        for layer in self.layers:
            layer[0].zero_()
