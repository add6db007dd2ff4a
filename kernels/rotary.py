"""Rotary position embedding, half-split (neox) layout."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels import rows


@dataclass(frozen=True, slots=True)
class Rope:
    """Which angles positions have.

    dim: rotated features of a head, even. theta: base of the wavelengths.
    kind, and what it looks at:
        default
        linear: positions are divided by `factor`.
        dynamic: from position `original_length` on, a token is rotated as in a sequence that ends with it, with theta
            grown so that `factor` times that length keeps its resolution. So a token's angles follow from its position
            alone, whatever is computed beside it or before.
        yarn: wavelengths with more than `beta_fast` turns over `original_length` stay, those with fewer than
            `beta_slow` grow by `factor`, those between in part; `truncate` rounds the limits to whole features.
        llama3: the same with `high_freq_factor` and `low_freq_factor`, in parts by wavelength instead of by feature.
    amplitude: of cos and sin.
    """

    dim: int
    theta: float
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    amplitude: float = 1.0


def inverse_frequencies(rope: Rope, num_positions: int) -> Tensor:
    """Radians per position, fp32 [dim / 2]; for `dynamic` [num_positions, dim / 2], those of each position."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    if rope.kind == "dynamic":
        return _dynamic(rope, num_positions, exponents)
    inverse = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "yarn":
        return _between(inverse / rope.factor, inverse, _yarn_share(rope))
    if rope.kind == "llama3":
        turns = rope.original_length * inverse / (2 * math.pi)
        share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return _between(inverse / rope.factor, inverse, share.clamp(0, 1))
    return inverse


def _between(scaled: Tensor, plain: Tensor, share: Tensor) -> Tensor:
    return scaled * (1 - share) + plain * share


def _yarn_share(rope: Rope) -> Tensor:
    """How much of each feature's wavelength stays as it is, [dim / 2]."""
    low, high = (
        rope.dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    return 1 - ramp.clamp(0, 1)


def _dynamic(rope: Rope, num_positions: int, exponents: Tensor) -> Tensor:
    length = torch.arange(1, num_positions + 1, dtype=torch.float32).clamp_(min=rope.original_length)
    growth = rope.factor * length / rope.original_length - (rope.factor - 1)
    theta = rope.theta * growth ** (rope.dim / (rope.dim - 2))
    return 1.0 / theta[:, None] ** exponents


class RotaryTable:
    """cos and sin of every position, [max_positions, 1, dim], the rotated half's sign already in sin."""

    def __init__(self, rope: Rope, max_positions: int, dtype: torch.dtype, device: torch.device):
        inverse = inverse_frequencies(rope, max_positions)
        angles = (torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse).to(device)
        cos, sin = angles.cos(), angles.sin()
        if rope.amplitude != 1.0:
            cos, sin = cos * rope.amplitude, sin * rope.amplitude
        self.cos = torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1)
        self.sin = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [T, 1, dim] of int64 positions [T]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [T, n, dim] in place; cos and sin from `RotaryTable.at`."""
    if rows.usable(heads, cos, sin, step=32):
        rows.rotate_(heads, cos, sin)
        return heads
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.add(heads * cos, swapped.mul_(sin), out=heads)
