"""Linear layers without bias, with the weight laid out once for the machine that runs it."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def packing_works() -> bool:
    """Whether this torch has oneDNN's packed bf16 linear (private operators) and it computes what `F.linear` does."""
    mkldnn = torch.ops.mkldnn
    if not (hasattr(mkldnn, "_reorder_linear_weight") and hasattr(mkldnn, "_linear_pointwise")):
        return False
    weight = torch.arange(-32, 32).view(4, 16).to(torch.bfloat16) / 8
    x = torch.arange(-16, 16).view(2, 16).to(torch.bfloat16) / 8
    try:
        packed = mkldnn._reorder_linear_weight(weight)
        plain = mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        added = mkldnn._linear_pointwise.binary(x, plain, packed, None, "add")
    except (RuntimeError, TypeError, AttributeError):  # no bf16 on this CPU, or another signature
        return False
    expected = F.linear(x, weight)
    return torch.allclose(plain, expected) and torch.allclose(added, expected + expected, rtol=0.02)


class PackedLinear:
    """`x @ weight.T` with a fixed weight [out, in].

    On a CPU in bf16 the weight is kept only in oneDNN's own layout, which reads memory up to twice as fast at few rows;
    otherwise as given. The object owns its weight; the caller drops the one passed in.
    """

    def __init__(self, weight: Tensor):
        self.out_features, self.in_features = weight.shape
        self.packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and packing_works()
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        else:
            self.weight = weight.contiguous()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [N, in] (any N, 0 included) -> [N, out]; plus `residual` [N, out] if given, rounded once where fused."""
        if not x.shape[0]:
            return x.new_empty(0, self.out_features)
        if not self.packed:
            out = F.linear(x, self.weight)
            return out if residual is None else out.add_(residual)
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, None, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, None, "add")
