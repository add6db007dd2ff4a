"""Linear layers, with the weight laid out once for the machine that runs it."""

from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import invariance, strips
from kernels.invariance import FixedRows


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
        swish = mkldnn._linear_pointwise(x, packed, None, "swish", [], "")
        added = mkldnn._linear_pointwise.binary(x, plain, packed, None, "add")
        times = mkldnn._linear_pointwise.binary(x, plain, packed, None, "mul")
    except (RuntimeError, TypeError, AttributeError):  # no bf16 on this CPU, or another signature
        return False
    expected = F.linear(x, weight)
    pairs = ((plain, expected), (swish, F.silu(expected)), (added, expected + expected), (times, expected * expected))
    return all(torch.allclose(ours, theirs, rtol=0.02) for ours, theirs in pairs)


def bucket(rows: int) -> int:
    """The number of rows to compute for `rows`: itself up to 16, then up to an eighth more.

    oneDNN compiles a kernel for every new number of rows, which takes longer than the product itself; with buckets
    there are some sixty of them up to 2048 rows, and they are soon all compiled.
    """
    if rows <= 16:
        return rows
    step = max(16, 1 << (rows.bit_length() - 4))
    return -(-rows // step) * step


class PackedLinear:
    """`x @ weight.T + bias` with a fixed weight [out, in] and bias [out] or none, alone or with what follows it.

    On a CPU in bf16 the weight is kept only in oneDNN's own layout, which reads memory up to twice as fast at few rows,
    and what follows is computed in fp32 before the only rounding; otherwise weight and roundings are as in `F.linear`.
    x is [N, in] with any N, 0 included. The object owns its weight; the caller drops the one passed in.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and packing_works()
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        else:
            self.weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[N, out]"""
        return self._unary(x, "none") if self.packed else F.linear(x, self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        """silu of it, [N, out]"""
        return self._unary(x, "swish") if self.packed else F.silu(F.linear(x, self.weight, self.bias))

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Plus `other` [N, out]."""
        return self._binary(x, other, "add") if self.packed else F.linear(x, self.weight, self.bias).add_(other)

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """Times `other` [N, out], element by element."""
        return self._binary(x, other, "mul") if self.packed else F.linear(x, self.weight, self.bias).mul_(other)

    def plain(self) -> Tensor:
        """The weight as it was given, bit for bit; not a copy where it is kept so."""
        return self.weight.to_dense() if self.packed else self.weight

    def pad(self, x: Tensor) -> Tensor:
        """x with rows of zeros up to its bucket, where this matters: for several products of the same rows."""
        missing = bucket(len(x)) - len(x) if self.packed else 0
        return F.pad(x, (0, 0, 0, missing)) if missing else x

    def _unary(self, x: Tensor, name: str) -> Tensor:
        rows = len(x)
        if not rows:
            return x.new_empty(0, self.out_features)
        out = torch.ops.mkldnn._linear_pointwise.default(self.pad(x), self.weight, self.bias, name, [], "")
        return out if len(out) == rows else out[:rows]

    def _binary(self, x: Tensor, other: Tensor, name: str) -> Tensor:
        rows = len(x)
        if not rows:
            return x.new_empty(0, self.out_features)
        out = torch.ops.mkldnn._linear_pointwise.binary(self.pad(x), self.pad(other), self.weight, self.bias, name)
        return out if len(out) == rows else out[:rows]


class InvariantLinear:
    """A PackedLinear whose rows have the same bits whatever rows are computed with them."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self._linear = PackedLinear(weight, bias)
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._key = (self.out_features, self.in_features, weight.dtype, weight.device, bias is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, out]"""
        return self._run("__call__", x)

    def silu(self, x: Tensor) -> Tensor:
        """silu of it, [N, out]"""
        return self._run("silu", x) if self._linear.packed else invariance.silu(self(x))

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Plus `other` [N, out]."""
        return self._run("add", x, other)

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """Times `other` [N, out], element by element."""
        return self._run("mul", x, other)

    def plain(self) -> Tensor:
        """The weight as it was given, bit for bit; not a copy where it is kept so."""
        return self._linear.plain()

    def pad(self, x: Tensor) -> Tensor:
        """x: every product pads for itself."""
        return x

    def _run(self, method: str, *inputs: Tensor) -> Tensor:
        if not len(inputs[0]):
            return inputs[0].new_empty(0, self.out_features)
        return _proved(method, *self._key, torch.get_num_threads())(getattr(self._linear, method), *inputs)


@cache
def _proved(
    method: str, outer: int, inner: int, dtype: torch.dtype, device: torch.device, with_bias: bool, threads: int
) -> FixedRows:
    """Rows in which this method of layers of this shape may compute; `threads` is only part of the key."""
    x, weight = invariance.cancelling(inner, outer, dtype, device)
    layer = PackedLinear(weight, weight[:, 0].clone() if with_bias else None)
    other = torch.linspace(-1, 1, outer, dtype=dtype, device=device).expand(len(x), -1).contiguous()
    inputs = (x, other) if method in ("add", "mul") else (x,)
    return invariance.prove(getattr(layer, method), *inputs, most=invariance.MOST_WORK // (outer * inner))


Linear: TypeAlias = "strips.StripLinear | PackedLinear | InvariantLinear"


def make_linear(weight: Tensor, bias: Tensor | None = None, invariant: bool = False) -> Linear:
    """The fastest layer for this weight [out, in] here: strips, oneDNN, or plain `F.linear`.

    invariant: each row's result has the same bits whatever rows are computed with it. In strips that is always so.
    """
    if strips.usable(weight) and (bias is None or strips.usable(bias)):
        return strips.StripLinear(weight, bias)
    return InvariantLinear(weight, bias) if invariant else PackedLinear(weight, bias)
