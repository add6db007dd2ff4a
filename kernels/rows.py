"""What is computed row by row, in C (kernels/rows.c): bf16 and fp32 on the CPU.

These are the short operations between the products. As chains of torch operators each takes longer to start than to
compute at the few rows of a decode step.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native

MOST_EXPERTS = 1024  # as in rows.c
Scoring = Literal["softmax", "topk_softmax", "sigmoid"]
_SCORINGS: tuple[Scoring, ...] = ("softmax", "topk_softmax", "sigmoid")
_STRIP = 16  # outputs that are computed together; as in rows.c


def usable(*tensors: Tensor, step: int) -> bool:
    """May these go to C? All of one dtype, `step` divides their last dimension, whose numbers lie side by side."""
    first = tensors[0]
    return (
        first.dtype in (torch.bfloat16, torch.float32)
        and all(x.dtype == first.dtype and x.is_cpu and x.stride(-1) == 1 and not x.shape[-1] % step for x in tensors)
        and native.kernels() is not None
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, H], weight [H]; H is a multiple of 32."""
    out = torch.empty(x.shape, dtype=x.dtype)
    native.loaded().phalanx_rms_norm(
        x.dtype == torch.float32, x.data_ptr(), len(x), x.stride(0), x.shape[1], weight.data_ptr(), eps, out.data_ptr()
    )
    return out


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """heads [T, n, dim] in place; cos and sin [T, 1, dim], contiguous; dim is a multiple of 32."""
    rows, count, dim = heads.shape
    native.loaded().phalanx_rotate(
        heads.dtype == torch.float32,
        heads.data_ptr(),
        rows,
        heads.stride(0),
        count,
        heads.stride(1),
        dim,
        cos.data_ptr(),
        sin.data_ptr(),
    )


def weighted_sum(pairs: Tensor, weights: Tensor) -> Tensor:
    """pairs [T, k, H], contiguous, weights fp32 [T, k] -> [T, H]; H is a multiple of 16."""
    tokens, top_k, dim = pairs.shape
    out = torch.empty(tokens, dim, dtype=pairs.dtype)
    native.loaded().phalanx_weighted_sum(
        pairs.dtype == torch.float32,
        pairs.data_ptr(),
        weights.data_ptr(),
        tokens,
        top_k,
        dim,
        out.data_ptr(),
    )
    return out


def put(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Rows [T, W] into places `slots`, int64 [T], of a contiguous cache [..., W]."""
    size = rows.element_size()
    native.loaded().phalanx_put_rows(
        cache.data_ptr(), slots.data_ptr(), rows.data_ptr(), len(rows), rows.stride(0) * size, rows.shape[1] * size
    )


def route(
    logits: Tensor, top_k: int, scoring: Scoring, correction: Tensor | None, normalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`ep.routing.route` without groups. logits fp32 [T, E], contiguous, are lost."""
    tokens, experts = logits.shape
    weights, ids = torch.empty(tokens, top_k), torch.empty(tokens, top_k, dtype=torch.int64)
    native.loaded().phalanx_route(
        logits.data_ptr(), tokens, experts, top_k, _SCORINGS.index(scoring),
        None if correction is None else correction.data_ptr(), normalize, scale, weights.data_ptr(), ids.data_ptr(),
    )  # fmt: skip
    return weights, ids


class Scores:
    """`x @ weight.T + bias` in fp32 for few outputs; x may be bf16, and is not rounded. A row's bits are its own."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        """weight [E, H], bias [E], fp32."""
        self.num_outputs, self.bias = len(weight), None if bias is None else bias.contiguous()
        strips = F.pad(weight, (0, 0, 0, -len(weight) % _STRIP)).unflatten(0, (-1, _STRIP))
        self._packed = strips.transpose(1, 2).contiguous()
        self._addresses = self._packed.data_ptr(), None if self.bias is None else self.bias.data_ptr()

    @staticmethod
    def fit(weight: Tensor) -> bool:
        """Can it be a weight [E, H]?"""
        return weight.dtype == torch.float32 and usable(weight, step=16)

    @property
    def weight(self) -> Tensor:
        """As it was given; a copy."""
        return self._packed.transpose(1, 2).flatten(0, 1)[: self.num_outputs].contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[N, H] -> fp32 [N, E]"""
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(len(x), self.num_outputs)
        native.loaded().phalanx_scores(
            x.dtype == torch.float32, x.data_ptr(), len(x), x.stride(0), *self._addresses, self.num_outputs,
            x.shape[1], out.data_ptr(),
        )  # fmt: skip
        return out
