"""The experts of a checkpoint, in whatever layout it has them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dp_engine.models.tensors import Tensors
from dp_engine.mxfp4 import BLOCK, dequantize
from ep.placement import Placements
from ep.routing import Router
from kernels.experts import ExpertWeights


class ExpertTensors:
    """Routers, and the experts that this rank owns, layer by layer. I is an expert's intermediate size.

    - per expert, as checkpoints have them: `mlp.experts.3.gate_proj.weight` [I, H] (Mixtral has names of its own);
    - fused, as transformers has them in memory: `mlp.experts.gate_up_proj` [E, 2I, H], `down_proj` [E, H, I];
    - fused and transposed (GPT-OSS): [E, H, 2I] with gate and up in turns, [E, I, H], and biases; or in the same places
      `gate_up_proj_blocks` and `_scales` in MXFP4, not transposed.
    """

    def __init__(self, tensors: Tensors, placements: Placements, rank: int):
        self.tensors, self.config, self.family = tensors, tensors.config, tensors.config.family
        sparse = [index for index, layer in enumerate(self.config.layers) if layer.sparse]
        self.owned = {
            index: placement.local_experts(rank) for index, placement in zip(sparse, placements.layers, strict=True)
        }
        first = f"model.layers.{sparse[0]}.mlp.experts.gate_up_proj" if sparse else ""
        self.quantized = f"{first}_blocks" in tensors.checkpoint
        self.fused = first in tensors.checkpoint or self.quantized

    def prefix(self, layer: int) -> str:
        return f"model.layers.{layer}.{'mlp' if self.fused else self.family.experts_prefix}"

    def foreign_names(self) -> list[str]:
        """Tensors that must exist, although this rank may not read them."""
        return [name for layer in self.owned for name in (self._fused(layer) if self.fused else self._foreign(layer))]

    def _fused(self, layer: int) -> list[str]:
        forms = ("_blocks", "_scales") if self.quantized else ("",)
        endings = (*forms, "_bias") if self.family.transposed else forms
        parts = [f"{part}{ending}" for part in ("gate_up_proj", "down_proj") for ending in endings]
        return [f"{self.prefix(layer)}.experts.{part}" for part in parts]

    def _foreign(self, layer: int) -> list[str]:
        own = set(self.owned[layer])
        return [
            f"{self.prefix(layer)}.experts.{expert}.{part}.weight"
            for expert in range(self.config.num_experts)
            if expert not in own
            for part in self.family.expert_parts
        ]

    def router(self, layer: int) -> Router:
        mixture = self.config.mixture
        assert mixture is not None
        name, count = f"{self.prefix(layer)}.{self.family.router}", mixture.num_experts

        def take(part: str, *shape: int) -> Tensor:
            return self.tensors.take(f"{name}.{part}", *shape, dtype=torch.float32)

        return Router(
            mixture.routing,
            take("weight", count, self.config.hidden_size),
            take("bias", count) if self.family.router_bias else None,
            take("e_score_correction_bias", count) if self.family.score_correction else None,
            self.config.batch_invariant,
        )

    def experts(self, layer: int) -> Iterator[ExpertWeights]:
        """The rank's experts of this layer, by slot, each loaded when the one before is packed."""
        load = self._of_fused if self.fused else self._alone
        return (load(self.prefix(layer), expert) for expert in self.owned[layer])

    def _alone(self, prefix: str, expert: int) -> ExpertWeights:
        assert self.config.mixture is not None
        return self.tensors.gated(f"{prefix}.experts.{expert}", self.family.expert_parts, self.config.mixture.size)

    def _of_fused(self, prefix: str, expert: int) -> ExpertWeights:
        assert self.config.mixture is not None
        hidden, size, count = self.config.hidden_size, self.config.mixture.size, self.config.num_experts
        gate_up = self._part(f"{prefix}.experts.gate_up_proj", expert, 2 * size, hidden)
        down = self._part(f"{prefix}.experts.down_proj", expert, hidden, size)
        if not self.family.transposed:
            gate, up = gate_up.chunk(2)
            return ExpertWeights(gate, up, down)
        bias = self.tensors.part(f"{prefix}.experts.gate_up_proj_bias", expert, count, 2 * size)
        down_bias = self.tensors.part(f"{prefix}.experts.down_proj_bias", expert, count, hidden)
        gate_bias, up_bias = bias[::2].contiguous(), bias[1::2].contiguous()
        return ExpertWeights(gate_up[::2], gate_up[1::2], down, gate_bias, up_bias, down_bias)

    def _part(self, name: str, expert: int, outputs: int, inputs: int) -> Tensor:
        """One expert's weight [outputs, inputs]."""
        count = self.config.num_experts
        if self.quantized:
            shape = (count, outputs, -(-inputs // BLOCK))
            blocks = self.tensors.part(f"{name}_blocks", expert, *shape, BLOCK // 2, dtype=torch.uint8)
            scales = self.tensors.part(f"{name}_scales", expert, *shape, dtype=torch.uint8)
            return dequantize(blocks, scales).to(self.config.dtype)
        if self.family.transposed:
            return self.tensors.part(name, expert, count, inputs, outputs).T
        return self.tensors.part(name, expert, count, outputs, inputs)
