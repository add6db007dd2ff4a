"""The model runner: turns a batch into tokens."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dp_engine.batch import Batch, Drawn, SamplingBatch
from dp_engine.checkpoint import Checkpoint, OnBytes
from dp_engine.config import EngineConfig
from dp_engine.kv_cache import KVCache, num_blocks_for
from dp_engine.logprobs import token_logprobs
from dp_engine.model_config import ModelConfig, ModelConfigError
from dp_engine.models.decoder import Decoder, Step
from dp_engine.sampler import constrain, per_output, sample
from ep.dispatch import Dispatcher
from ep.moe import MoELayer
from kernels import walk
from kernels.attention import plan_attention
from vote.decision import StepType

WARM_UP_TOKENS = (1, 16)


def max_step_tokens(engine: EngineConfig) -> int:
    """Most tokens of a forward, warm-up included."""
    return max(engine.max_num_batched_tokens, *WARM_UP_TOKENS)


class ModelRunner:
    """Owns the model and its KV cache. What the blocks mean is the scheduler's business."""

    def __init__(self, config: ModelConfig, model: Decoder, cache: KVCache, device: torch.device):
        self.model_config = config
        self._model = model
        self._cache = cache
        self._device = device

    @classmethod
    def load(
        cls,
        model_dir: Path,
        engine: EngineConfig,
        dispatcher: Dispatcher,
        device: torch.device,
        progress: Callable[[str], None],
        on_bytes: OnBytes | None = None,
    ) -> "ModelRunner":
        """Load this rank's share of the checkpoint. Raises ModelConfigError, CheckpointError, and ValueError when
        dispatcher and model do not belong together."""
        config = ModelConfig.load(model_dir, engine)
        if engine.num_state_slots is not None:
            raise ModelConfigError(
                f"engine.num_state_slots is {engine.num_state_slots}, but {config.model_type} keeps no state per "
                "sequence; leave it out"
            )
        if engine.num_draft_tokens and not engine.clip_drafts:
            raise ModelConfigError(
                "engine.clip_drafts is off: drafts would run past the model's last position; it is for replays only"
            )
        placed = [layer.num_logical for layer in dispatcher.placements.layers]
        if placed != [config.num_experts] * config.num_moe_layers:
            raise ValueError(
                f"the model has {config.num_experts} experts in {config.num_moe_layers} layers, the dispatcher {placed}"
            )
        if dispatcher.device != device:
            raise ValueError(f"the model is to run on {device}, its dispatcher on {dispatcher.device}")
        with torch.inference_mode():
            checkpoint = Checkpoint(model_dir, on_bytes)
            checkpoint.expect(dispatcher.placements, dispatcher.rank)
            model = Decoder(config, checkpoint, dispatcher, progress)
            cache = KVCache(config, engine, num_blocks_for(config, engine), device)
        return cls(config, model, cache, device)

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def moe_layers(self) -> list[MoELayer]:
        """In order; empty for a dense model. Their experts may be replaced between two steps."""
        return self._model.moe_layers

    @property
    def num_collectives(self) -> int:
        """Data collectives entered since the start; equal on all ranks between two steps."""
        return self._model.dispatcher.num_collectives

    @torch.inference_mode()
    def run(self, batch: Batch) -> Drawn:
        """The next 1 + num_drafts[i] tokens of each sequence. Enters every collective of a forward, also with an empty
        batch.

        Raises CollectiveFailed when another rank does not take part, ValueError for a batch that copies state.
        """
        if len(batch.state_copies):
            raise ValueError(f"{self.model_config.model_type} keeps no state per sequence that could be copied")
        self._cache.copy_blocks(batch.block_copies)
        logits = self._model.forward(self._step(batch), self._cache)
        allowed = logits if batch.masks is None else constrain(logits, batch.masks)
        tokens = sample(allowed, per_output(batch.sampling, batch.num_drafts))
        if batch.logprobs is None:
            return Drawn(tokens)
        return Drawn(tokens, token_logprobs(logits, tokens, np.repeat(batch.logprobs, batch.num_drafts + 1)))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run forwards of fixed shapes, the same on every rank, so that no request pays for first times. Uses the null
        block alone, and cleans it and the layers' counters."""
        self._model.warm_up()
        for num_tokens in WARM_UP_TOKENS:
            self.run(_warm_up_batch(num_tokens, self._cache.block_size))
        self._cache.clear_null_block()
        for layer in self.moe_layers:
            layer.num_rows = 0

    def _step(self, batch: Batch) -> Step:
        shape = self.model_config.attention
        walks = walk.most_queries(self.model_config.dtype, self._device, shape.num_heads, *shape.cached_dims)
        attention = {
            window: plan_attention(
                batch.seqlens_q,
                batch.seqlens_k,
                batch.block_tables,
                self._cache.block_size,
                self.model_config.dtype,
                self._device,
                window,
                self.model_config.batch_invariant,
                walks,
            )
            for window in self.model_config.windows
        }
        return Step(
            input_ids=self._tensor(batch.input_ids),
            positions=self._tensor(batch.positions),
            slots=self._tensor(batch.slots),
            output_rows=self._tensor(output_rows(batch.seqlens_q, batch.num_drafts)),
            attention=attention,
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def output_rows(seqlens_q: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    """The last 1 + num_drafts[i] of the seqlens_q[i] rows of each sequence, int64 [sum(1 + num_drafts)]."""
    last = np.cumsum(seqlens_q, dtype=np.int64) - 1
    if not num_drafts.any():
        return last
    counts = num_drafts + 1
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) + np.repeat(last + 1 - ends, counts)


def _warm_up_batch(num_tokens: int, block_size: int) -> Batch:
    """`num_tokens` sequences of one token each, all in the null block."""
    zeros, ones = np.zeros(num_tokens, np.int64), np.ones(num_tokens, np.int32)
    return Batch(
        step_type=StepType.DECODE,
        input_ids=zeros,
        positions=zeros,
        slots=np.arange(num_tokens) % block_size,
        seqlens_q=ones,
        seqlens_k=ones * min(2, block_size),
        num_drafts=np.zeros(num_tokens, np.int32),
        block_tables=np.zeros((num_tokens, 1), np.int32),
        block_copies=np.zeros((0, 2), np.int64),
        state_slots=np.zeros(num_tokens, np.int32),
        state_copies=np.zeros((0, 2), np.int64),
        sampling=SamplingBatch(
            temperature=np.zeros(num_tokens, np.float32),
            top_p=np.ones(num_tokens, np.float32),
            top_k=np.zeros(num_tokens, np.int32),
            seed=np.zeros(num_tokens, np.uint64),
            position=zeros,
        ),
    )
