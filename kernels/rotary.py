"""Rotary position embedding, half-split (neox) layout."""

import torch
from torch import Tensor


class RotaryTable:
    """cos and sin of every position, [max_positions, 1, head_dim], the rotated half's sign already in sin."""

    def __init__(self, head_dim: int, theta: float, max_positions: int, dtype: torch.dtype, device: torch.device):
        inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim))
        angles = torch.arange(max_positions, dtype=torch.float32, device=device)[:, None] * inverse
        sin = angles.sin()
        self.cos = torch.cat((angles, angles), dim=-1).cos_().to(dtype).unsqueeze(1)
        self.sin = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [T, 1, head_dim] of int64 positions [T]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [T, n, head_dim] in place; cos and sin from `RotaryTable.at`."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.add(heads * cos, swapped.mul_(sin), out=heads)
