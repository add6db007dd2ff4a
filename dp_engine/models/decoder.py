"""The decoder of all families: attention and a feed-forward part, over and over. Its config says which kinds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from dp_engine.attention_config import GroupedQueries
from dp_engine.checkpoint import Checkpoint
from dp_engine.kv_cache import KVCache
from dp_engine.layer_config import LayerConfig
from dp_engine.model_config import ModelConfig
from dp_engine.models.attention import Context, GroupedQueryAttention, MultiHeadLatentAttention
from dp_engine.models.experts import ExpertTensors
from dp_engine.models.tensors import Tensors
from ep.dispatch import Dispatcher
from ep.moe import MoELayer
from kernels.attention import AttentionPlan
from kernels.experts import GroupedExperts, Mlp, make_experts, make_mlp
from kernels.invariance import sigmoid
from kernels.linear import Linear, bucket, make_linear
from kernels.norm import rms_norm
from kernels.rotary import RotaryTable

WARM_ROWS = 128
MLP_PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one forward share. T rows, N outputs."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]
    output_rows: Tensor  # int64 [N] rows whose logits are wanted
    attention: Mapping[int | None, AttentionPlan]  # by the window of the layers


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """What every token goes through beside its experts, weighted by a gate of its own if the family has one."""

    mlp: Mlp
    gate: "Linear | None"

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        out = self.mlp(x)
        return out if self.gate is None else out.mul_(sigmoid(self.gate(x)))


@dataclass(frozen=True, slots=True)
class Layer:
    config: LayerConfig
    input_norm: Tensor
    attention: GroupedQueryAttention | MultiHeadLatentAttention
    ffn_norm: Tensor
    ffn: MoELayer | Mlp


class Decoder:
    """The decoder with this rank's share of the experts. Built complete from a checkpoint, so nothing in it is ever
    uninitialised.

    `moe_layers[i]` is the i-th MoE layer, which the dispatcher knows by this number; without any, a forward enters no
    collective.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dispatcher: Dispatcher,
        progress: Callable[[str], None],
    ):
        """Load everything but foreign experts. Raises CheckpointError unless the checkpoint fits the config exactly."""
        self.config = config
        self.dispatcher = dispatcher
        loader = _Loader(config, Tensors(config, checkpoint, dispatcher.device), dispatcher)
        checkpoint.require(loader.experts.foreign_names())
        self.embedding = loader.tensors.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers: list[Layer] = []
        for index in range(config.num_layers):
            self.layers.append(loader.layer(index))
            progress(f"loaded layer {index + 1} of {config.num_layers}")
        self.moe_layers = [layer.ffn for layer in self.layers if isinstance(layer.ffn, MoELayer)]
        self.norm = loader.tensors.take("model.norm.weight", config.hidden_size)
        self.lm_head = loader.lm_head(self.embedding)
        self.rotary = {
            rope: RotaryTable(rope, config.max_model_len, config.dtype, dispatcher.device)
            for rope in dict.fromkeys(layer.rope for layer in config.layers)
        }
        if skipped := loader.tensors.skipped(loader.experts.foreign_names()):
            progress(skipped)

    def forward(self, step: Step, cache: KVCache) -> Tensor:
        """Logits [N, vocab] at the output rows. Enters every collective, whatever T and N are."""
        if self.moe_layers:
            self.dispatcher.begin_step(len(step.input_ids))
        eps = self.config.rms_norm_eps
        contexts = self._contexts(step)
        x = F.embedding(step.input_ids, self.embedding)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            if len(x):
                context = contexts[layer.config.rope, layer.config.window]
                x = layer.attention(rms_norm(x, layer.input_norm, eps), x, context, layer_cache)
            x = layer.ffn(rms_norm(x, layer.ffn_norm, eps)).add_(x)
        outputs = x.index_select(0, step.output_rows)
        return self.lm_head(rms_norm(outputs, self.norm, eps))

    def warm_up(self) -> None:
        """Have what oneDNN compiles per number of rows compiled for decode steps. Enters no collective."""
        kinds = {layer.config.sparse: layer for layer in self.layers}.values()
        for rows in sorted({bucket(rows) for rows in range(1, WARM_ROWS + 1)}):
            x = self.embedding.new_zeros(rows, self.config.hidden_size)
            for layer in kinds:
                layer.attention.warm_up(x)
                for network in _networks(layer.ffn):
                    network(x)
            self.lm_head(x[:16])

    def _contexts(self, step: Step) -> dict[tuple[object, int | None], Context]:
        """By rope and window of the layers."""
        rotations = {rope: table.at(step.positions) for rope, table in self.rotary.items()}
        kinds = dict.fromkeys((layer.rope, layer.window) for layer in self.config.layers)
        return {(rope, window): Context(*rotations[rope], step.slots, step.attention[window]) for rope, window in kinds}


def _networks(ffn: MoELayer | Mlp) -> list[Callable[[Tensor], Tensor]]:
    """What of a layer's feed-forward part works on this rank's own rows, one expert standing for all."""
    if isinstance(ffn, Mlp):
        return [ffn]
    experts = ffn.experts.experts[:1] if isinstance(ffn.experts, GroupedExperts) else ()
    return [*experts, *([ffn.shared] if ffn.shared else [])]


class _Loader:
    """Builds the layers."""

    def __init__(self, config: ModelConfig, tensors: Tensors, dispatcher: Dispatcher):
        self.config, self.tensors, self.dispatcher = config, tensors, dispatcher
        self.experts = ExpertTensors(tensors, dispatcher.placements, dispatcher.rank)
        self.num_moe_layers = 0

    def layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}"
        shape = config.attention
        attention = GroupedQueryAttention if isinstance(shape, GroupedQueries) else MultiHeadLatentAttention
        return Layer(
            config=config.layers[index],
            input_norm=self.tensors.take(f"{prefix}.input_layernorm.weight", config.hidden_size),
            attention=attention(shape, self.tensors, f"{prefix}.self_attn"),  # type: ignore[arg-type]
            ffn_norm=self.tensors.take(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            ffn=self._mixture(index) if config.layers[index].sparse else self._mlp(f"{prefix}.mlp", config.dense_size),
        )

    def lm_head(self, embedding: Tensor) -> Linear:
        config = self.config
        if config.tie_word_embeddings:
            return make_linear(embedding, None, config.batch_invariant)
        return self.tensors.linear(["lm_head"], [config.vocab_size], config.hidden_size)

    def _mlp(self, prefix: str, size: int) -> Mlp:
        weights = self.tensors.gated(prefix, MLP_PARTS, size, self.config.mlp_bias)
        return make_mlp(weights, "silu", self.config.batch_invariant)

    def _mixture(self, index: int) -> MoELayer:
        activation, invariant = self.config.family.activation, self.config.batch_invariant
        layer = self.num_moe_layers
        self.num_moe_layers += 1
        router = self.experts.router(index)
        experts = make_experts(self.experts.experts(index), activation, invariant)
        return MoELayer(layer, router, experts, self.dispatcher, self._shared(f"model.layers.{index}.mlp"))

    def _shared(self, prefix: str) -> SharedExperts | None:
        config, family = self.config, self.config.family
        if config.mixture is None or not config.mixture.shared_size:
            return None
        mlp = self._mlp(f"{prefix}.{family.shared}", config.mixture.shared_size)
        gate = family.shared_gate
        return SharedExperts(mlp, self.tensors.linear([f"{prefix}.{gate}"], [1], config.hidden_size) if gate else None)
