"""RMS normalisation."""

import torch
from torch import Tensor

from kernels import rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, H] scaled to unit root mean square, then by weight [H].

    Rounds where transformers' MixtralRMSNorm and LlamaRMSNorm do: fp32 up to the normalised value, back to x's dtype,
    then times the weight.
    """
    if x.ndim == 2 and weight.ndim == 1 and rows.usable(x, weight, step=32):
        return rows.rms_norm(x, weight, eps)
    wide = x.float()
    scale = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = wide * scale
    return normed.mul_(weight) if x.dtype == torch.float32 else normed.to(x.dtype).mul_(weight)
