"""Mixtral: grouped-query attention and a mixture of experts in every layer."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_engine.checkpoint import Checkpoint, CheckpointError
from dp_engine.kv_cache import KVCache
from dp_engine.model_config import ModelConfig
from ep.dispatch import Dispatcher
from ep.moe import MoELayer
from kernels.attention import AttentionPlan, paged_attention, write_kv
from kernels.experts import ExpertWeights, GroupedExperts, make_experts
from kernels.linear import Linear, bucket, make_linear
from kernels.norm import rms_norm
from kernels.rotary import RotaryTable, rotate_

WARM_ROWS = 128


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one forward share. T rows, N outputs."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]
    output_rows: Tensor  # int64 [N] rows whose logits are wanted
    attention: AttentionPlan


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear  # q heads, then k heads, then v heads
    out: Linear
    moe_norm: Tensor
    moe: MoELayer


class Mixtral:
    """The decoder with this rank's share of the experts. Built complete from a checkpoint, so nothing in it is ever
    uninitialised."""

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
        loader = _Loader(config, checkpoint, dispatcher)
        checkpoint.require(loader.foreign_names())
        self.embedding = loader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = []
        for index in range(config.num_layers):
            self.layers.append(loader.layer(index))
            progress(f"loaded layer {index + 1} of {config.num_layers}")
        self.norm = loader.take("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = make_linear(
            self.embedding if tied else loader.take("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        self.rotary = RotaryTable(
            config.head_dim, config.rope_theta, config.max_model_len, config.dtype, dispatcher.device
        )
        if skipped := loader.finish():
            progress(f"skipped {len(skipped)} tensors that the model does not use: {', '.join(skipped)}")

    @property
    def moe_layers(self) -> list[MoELayer]:
        """In order."""
        return [layer.moe for layer in self.layers]

    def forward(self, step: Step, cache: KVCache) -> Tensor:
        """Logits [N, vocab] at the output rows. Enters every collective, whatever T and N are."""
        self.dispatcher.begin_step(len(step.input_ids))
        eps = self.config.rms_norm_eps
        cos, sin = self.rotary.at(step.positions)
        x = F.embedding(step.input_ids, self.embedding)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            if len(x):
                x = self._attention(layer, x, cos, sin, step, layer_cache)
            x = layer.moe(rms_norm(x, layer.moe_norm, eps)).add_(x)
        outputs = x.index_select(0, step.output_rows)
        return self.lm_head(rms_norm(outputs, self.norm, eps))

    def warm_up(self) -> None:
        """Have what oneDNN compiles per number of rows compiled for decode steps. Enters no collective."""
        layer, width = self.layers[0], self.config.num_heads * self.config.head_dim
        experts = layer.moe.experts.experts[:1] if isinstance(layer.moe.experts, GroupedExperts) else ()
        for rows in sorted({bucket(rows) for rows in range(1, WARM_ROWS + 1)}):
            x = self.embedding.new_zeros(rows, self.config.hidden_size)
            layer.out.add(layer.qkv(x)[:, :width].contiguous(), x)
            for expert in experts:
                expert(x)
            self.lm_head(x[:16])

    def _attention(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, step: Step, cache: Tensor) -> Tensor:
        """x [T, H] plus its attention."""
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = layer.qkv(rms_norm(x, layer.input_norm, self.config.rms_norm_eps))
        by_head = qkv.view(-1, heads + 2 * kv_heads, head_dim)
        rotate_(by_head[:, : heads + kv_heads], cos, sin)
        write_kv(cache, step.slots, qkv[:, heads * head_dim :])
        return layer.out.add(paged_attention(by_head, cache, step.attention, heads), x)


class _Loader:
    """Takes Mixtral's tensors from a checkpoint, in either layout of the experts:

    - `block_sparse_moe.gate`, `block_sparse_moe.experts.3.w1` (gate), `w3` (up), `w2` (down): what checkpoints use;
    - `mlp.gate`, `mlp.experts.gate_up_proj` [E, 2I, H], `mlp.experts.down_proj` [E, H, I]: transformers 5 in memory.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dispatcher: Dispatcher):
        self.config, self.checkpoint, self.dispatcher = config, checkpoint, dispatcher
        self.fused = "model.layers.0.mlp.experts.gate_up_proj" in checkpoint
        self.local_experts = dispatcher.placements.layers[0].local_experts(dispatcher.rank)

    def take(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.take(name, shape, self.config.dtype).to(self.dispatcher.device)

    def foreign_names(self) -> list[str]:
        """Tensors of experts that other ranks load; that they exist is every rank's business."""
        config = self.config
        prefixes = [f"model.layers.{layer}" for layer in range(config.num_layers)]
        if self.fused:
            return [f"{prefix}.mlp.experts.{part}" for prefix in prefixes for part in ("gate_up_proj", "down_proj")]
        foreign = [expert for expert in range(config.num_experts) if expert not in self.local_experts]
        return [
            f"{prefix}.block_sparse_moe.experts.{expert}.{part}.weight"
            for prefix in prefixes
            for expert in foreign
            for part in ("w1", "w2", "w3")
        ]

    def layer(self, index: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{index}"
        hidden, q_width, kv_width = (
            config.hidden_size,
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        widths = {"q": q_width, "k": kv_width, "v": kv_width}
        qkv = [self.take(f"{prefix}.self_attn.{part}_proj.weight", width, hidden) for part, width in widths.items()]
        gate = f"{prefix}.{'mlp' if self.fused else 'block_sparse_moe'}.gate.weight"
        return _Layer(
            input_norm=self.take(f"{prefix}.input_layernorm.weight", hidden),
            qkv=make_linear(torch.cat(qkv)),
            out=make_linear(self.take(f"{prefix}.self_attn.o_proj.weight", hidden, q_width)),
            moe_norm=self.take(f"{prefix}.post_attention_layernorm.weight", hidden),
            moe=MoELayer(
                index,
                self.take(gate, config.num_experts, hidden),
                make_experts([self._expert(prefix, expert) for expert in self.local_experts]),
                config.top_k,
                self.dispatcher,
            ),
        )

    def _expert(self, prefix: str, expert: int) -> ExpertWeights:
        """One logical expert."""
        config = self.config
        hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
        if self.fused:
            name, device = f"{prefix}.mlp.experts", self.dispatcher.device
            shapes = {"gate_up_proj": (count, 2 * inner, hidden), "down_proj": (count, hidden, inner)}
            gate_up, down = (
                self.checkpoint.take_part(f"{name}.{part}", expert, shape, self.config.dtype).to(device)
                for part, shape in shapes.items()
            )
            gate, up = gate_up.chunk(2)
        else:
            name = f"{prefix}.block_sparse_moe.experts.{expert}"
            gate, up = (self.take(f"{name}.{part}.weight", inner, hidden) for part in ("w1", "w3"))
            down = self.take(f"{name}.w2.weight", hidden, inner)
        return ExpertWeights(gate, up, down)

    def finish(self) -> list[str]:
        """Names that nobody uses. An expert or a layer beyond the config's is an error: wrong config."""
        foreign = set(self.foreign_names())
        unused = [name for name in self.checkpoint.unused() if name not in foreign]
        for name in unused:
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            expert = re.search(r"\.experts\.(\d+)\.", name)
            if layer and int(layer[1]) >= self.config.num_layers:
                raise CheckpointError(
                    f"{self.checkpoint.model_dir}: tensor {name} is of layer {layer[1]}, but config.json names "
                    f"{self.config.num_layers} layers"
                )
            if expert and int(expert[1]) >= self.config.num_experts:
                raise CheckpointError(
                    f"{self.checkpoint.model_dir}: tensor {name} is of expert {expert[1]}, but config.json names "
                    f"{self.config.num_experts} experts"
                )
        return unused
