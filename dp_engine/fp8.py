"""Weights stored as float8 (e4m3) with one scale per block, as DeepSeek-V3 checkpoints have them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dp_engine.shards import CheckpointError

SCALE = "_scale_inv"  # `X.weight` is stored in fp8, `X.weight_scale_inv` has its scales
FP8 = "F8_E4M3"
_STRIP_ELEMENTS = 4 << 20  # computed at once in fp32: 16 MB


def block_size(config: Path) -> tuple[int, int]:
    """(rows, columns) that share a scale, from a config.json. Raises CheckpointError for any other quantisation."""
    loaded = json.loads(config.read_bytes())
    quantization: Any = loaded.get("quantization_config") if isinstance(loaded, dict) else None
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{config}: weights are stored in fp8, but quantization_config is missing")
    method = quantization.get("quant_method")
    if method != "fp8":
        raise CheckpointError(f"{config}: quantization_config.quant_method {method!r} is not supported, only 'fp8'")
    block = quantization.get("weight_block_size")
    if block is None:
        raise CheckpointError(
            f"{config}: quantization_config has no weight_block_size: one scale per tensor is not supported, only "
            "one per block"
        )
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise CheckpointError(
            f"{config}: quantization_config.weight_block_size must be two positive integers, not {block!r}"
        )
    return block[0], block[1]


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Of the scales of weights [..., out, in]; the last block of a row or column may be cut off."""
    *stack, rows, columns = shape
    return (*stack, -(-rows // block[0]), -(-columns // block[1]))


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """weight [..., out, in] fp8 times its scales [..., ceil(out/rows), ceil(in/columns)], in fp32, rounded once to
    `dtype`."""
    if weight.dim() > 2:
        return torch.stack([dequantize(*pair, block, dtype) for pair in zip(weight, scale, strict=True)])
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=dtype)
    wide = scale.float().repeat_interleave(block[1], 1)[:, :columns]
    step = max(1, _STRIP_ELEMENTS // max(1, columns * block[0])) * block[0]
    for start in range(0, rows, step):
        strip = to_float(weight[start : start + step])
        for at in range(0, len(strip), block[0]):
            strip[at : at + block[0]].mul_(wide[(start + at) // block[0]])
        result[start : start + step] = strip
    return result


def to_float(weight: Tensor) -> Tensor:
    """e4m3 as fp32, exactly, several times as fast as torch does it on a CPU.

    seeeemmm becomes s0eeeemmm0000000, which fp16 reads as 1/256 of the same number, subnormal ones included; NaN alone
    is another number there.
    """
    codes = weight.view(torch.int8)
    if weight.numel() and (codes & 0x7F).max() == 0x7F:
        return weight.float()
    halves = (codes.to(torch.int16) << 7).bitwise_and_(~0x4000)
    return halves.view(torch.float16).float().mul_(256)
