"""An expert's weights, and the activations between them."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kernels.invariance import sigmoid

Activation = Literal["silu", "swiglu_oai"]

SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """An expert as in the checkpoint. gate and up: [intermediate, hidden]; down: [hidden, intermediate]; biases
    [intermediate] and [hidden], all three or none."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Those there are, in the order of the fields."""
        every = (self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias)
        return tuple(tensor for tensor in every if tensor is not None)


# What `rearranged` makes a slot of: an old slot, kept as it is packed, or new weights.
Source = int | ExpertWeights


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """GPT-OSS's activation: both clamped, gate * sigmoid(1.702 * gate) * (up + 1), in fp32."""
    gate = gate.float().clamp(max=SWIGLU_LIMIT)
    wide = up.float().clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1)
    return wide.mul_(gate).mul_(sigmoid(gate * SWIGLU_ALPHA)).to(up.dtype)
