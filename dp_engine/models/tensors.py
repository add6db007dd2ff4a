"""Tensors of a checkpoint as this rank's model takes them."""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dp_engine.checkpoint import Checkpoint, CheckpointError
from dp_engine.model_config import ModelConfig
from kernels.experts import ExpertWeights
from kernels.linear import Linear, make_linear, packing_works


class Tensors:
    """Takes tensors in the model's dtype onto the rank's device, and builds from them what does not depend on the
    family. Every method raises CheckpointError for what is missing or has another shape."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, device: torch.device):
        self.config, self.checkpoint, self.device = config, checkpoint, device
        self._packs = device.type != "cpu" or (config.dtype == torch.bfloat16 and packing_works())

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.checkpoint.take(name, shape, dtype or self.config.dtype).to(self.device)

    def weight(self, name: str, *shape: int) -> Tensor:
        """A weight for a layer, which must be dropped when the layer has been made: where that lays it out anew, it is
        not copied before."""
        take = self.checkpoint.borrow if self._packs else self.checkpoint.take
        return take(name, shape, self.config.dtype).to(self.device)

    def part(self, name: str, index: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """`tensor[index]` of a tensor of this shape."""
        return self.checkpoint.take_part(name, index, shape, dtype or self.config.dtype).to(self.device)

    def biases(self, names: Iterable[str], sizes: Iterable[int]) -> Tensor:
        """Biases of layers that are fused into one."""
        return torch.cat([self.take(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)])

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        """Layers of the same `inputs` fused into one, with `sizes` outputs each."""
        weights = [self.weight(f"{name}.weight", size, inputs) for name, size in zip(names, sizes, strict=True)]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return make_linear(weight, self.biases(names, sizes) if bias else None, self.config.batch_invariant)

    def gated(self, prefix: str, parts: Sequence[str], size: int, bias: bool = False) -> ExpertWeights:
        """The gated network at `prefix`, its gate, up and down named by `parts`."""
        hidden = self.config.hidden_size
        names = [f"{prefix}.{part}" for part in parts]
        outputs, inputs = (size, size, hidden), (hidden, hidden, size)
        weights = [self.weight(f"{name}.weight", *shape) for name, *shape in zip(names, outputs, inputs, strict=True)]
        biases = [self.take(f"{name}.bias", out) for name, out in zip(names, outputs, strict=True)] if bias else []
        return ExpertWeights(*weights, *biases)

    def skipped(self, foreign: Iterable[str]) -> str:
        """What the model does not use, in words, `foreign` experts aside; empty if there is nothing. Raises
        CheckpointError for an expert or a layer beyond the config's: wrong config."""
        config, others = self.config, set(foreign)
        lines: dict[str, int] = {}
        for name in self.checkpoint.unused():
            if name in others:
                continue
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            expert = re.search(r"\.experts\.(\d+)\.", name)
            if layer and config.num_layers <= int(layer[1]) < config.num_layers + config.num_extra_layers:
                name = f"layer {layer[1]}, which guesses further tokens"
            elif layer and int(layer[1]) >= config.num_layers:
                self._surplus(name, f"layer {layer[1]}", f"{config.num_layers} layers")
            elif expert and int(expert[1]) >= config.num_experts:
                self._surplus(name, f"expert {expert[1]}", f"{config.num_experts} experts")
            lines[name] = lines.get(name, 0) + 1
        if not lines:
            return ""
        words = (name if count == 1 else f"{count} of {name}" for name, count in lines.items())
        return f"skipped {sum(lines.values())} tensors that the model does not use: {', '.join(words)}"

    def _surplus(self, name: str, what: str, named: str) -> None:
        raise CheckpointError(f"{self.checkpoint.model_dir}: tensor {name} is of {what}, but config.json names {named}")
