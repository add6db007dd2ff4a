"""Weights in MXFP4: blocks of 32 numbers of 4 bits that share a power of two."""

import torch
from torch import Tensor

BLOCK = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the exponents


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [..., B, 16], two numbers a byte, the lower half first; scales uint8 [..., B] -> fp32 [..., B * 32].
    Exact."""
    values = torch.tensor(_VALUES + tuple(-value for value in _VALUES), device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    numbers = values[halves.long()]
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - _BIAS).flatten(-2)
