"""Linear layers and experts over weights packed in strips (kernels/strips.c): bf16 on the CPU.

A row's sums are its own, in an order that knows neither its place nor the other rows nor the number of threads: all of
this is batch invariant.
"""

import ctypes
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import native
from kernels.expert_weights import Activation, ExpertWeights, Source

_ALIGNMENT = 64
_OVERRUN = 16 * 1024  # bytes the prefetch looks ahead; they need not be read, but must not be anyone's page fault


def usable(*weights: Tensor) -> bool:
    """Can all these weights [out, in] be packed here?"""
    return (
        all(w.device.type == "cpu" and w.dtype == torch.bfloat16 and not any(d % 32 for d in w.shape) for w in weights)
        and native.kernels() is not None
    )


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in the order it is used (see strips.c)."""
    weight = _rows(weight)
    return _packed(weight, weight[16:], 32)


def pack_interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Two weights [out, in] as one: 16 outputs of gate, the same 16 of up, and so on."""
    gate, up = _rows(gate), _rows(up)
    if gate.stride(0) != up.stride(0):
        gate, up = gate.contiguous(), up.contiguous()
    return _packed(gate, up, 16)


def _packed(left: Tensor, right: Tensor, step: int) -> Tensor:
    outer, inner = len(left) * 32 // step, left.shape[1]
    room = torch.empty(outer * inner + (_OVERRUN + _ALIGNMENT) // 2, dtype=torch.bfloat16)
    packed = room[(-room.data_ptr() % _ALIGNMENT) // 2 :]
    native.loaded().phalanx_pack(
        left.data_ptr(), right.data_ptr(), left.stride(0), step, outer // 32, inner, packed.data_ptr()
    )
    return packed


def _rows(weight: Tensor) -> Tensor:
    """With the numbers of a row side by side."""
    return weight if weight.stride(1) == 1 else weight.contiguous()


def unpack(packed: Tensor, outer: int, inner: int) -> Tensor:
    """The weight [outer, inner] that `pack` was given."""
    tiles = packed[: outer * inner].view(outer // 32, inner // 32, 2, 16, 16, 2)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(outer, inner)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """16 of gate [out, ...] and the same 16 of up, [2 * out, ...]"""
    return torch.stack((gate.unflatten(0, (-1, 16)), up.unflatten(0, (-1, 16))), 1).flatten(0, 2)


def separate(both: Tensor) -> tuple[Tensor, Tensor]:
    """What `interleave` was given."""
    gate, up = both.unflatten(0, (-1, 2, 16)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)


class StripLinear:
    """`x @ weight.T + bias`, sums in fp32, rounded once."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        self._packed = pack(weight)
        self._linear = native.loaded().phalanx_linear

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in], N may be 0 -> [N, out]"""
        return self._product(x, None)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Plus `other` [N, out], before the rounding."""
        return self._product(x, other.contiguous())

    def plain(self) -> Tensor:
        """The weight as it was given, bit for bit; a copy."""
        return unpack(self._packed, self.out_features, self.in_features)

    def _product(self, x: Tensor, other: Tensor | None) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), self.out_features)
        self._linear(
            x.data_ptr(), len(x), x.stride(0), self._packed.data_ptr(), self.out_features, self.in_features,
            _address(self.bias), _address(other), out.data_ptr(),
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class _Packed:
    """An expert as the kernel reads it: gate and up interleaved."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class StripExperts:
    """The local experts of a layer in one call, each `down(silu(gate(x)) * up(x))` or with the other activation.

    gate and up lie together, 16 outputs of one and the same 16 of the other, so that a strip gives finished products.
    """

    def __init__(self, weights: Iterable[ExpertWeights], activation: Activation = "silu") -> None:
        """At least one; all of the same shapes."""
        packed = []
        for expert in weights:
            self._inner, self._hidden = expert.gate.shape
            packed.append(_pack_expert(expert))
        self._clamped = activation == "swiglu_oai"
        self._take(packed)
        self._experts = native.loaded().phalanx_experts

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [R, hidden] sorted by local expert, counts[e] of them for expert e -> [R, hidden]."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        scratch = rows.new_empty(max(counts, default=0), self._inner)
        self._experts(
            rows.data_ptr(), self._counts(*counts), len(counts), *self._addresses, self._hidden, self._inner,
            self._clamped, scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def weights(self, slot: int) -> ExpertWeights:
        """What the slot was made of, bit for bit; copies."""
        packed = self._packed[slot]
        gate, up = separate(unpack(packed.gate_up, 2 * self._inner, self._hidden))
        down = unpack(packed.down, self._hidden, self._inner)
        if packed.gate_up_bias is None:
            return ExpertWeights(gate, up, down)
        return ExpertWeights(gate, up, down, *separate(packed.gate_up_bias), packed.down_bias)

    def rearranged(self, sources: Sequence[Source]) -> "StripExperts":
        """Experts with these slots: an old one by number, its packed weights shared, or one of new weights."""
        other = copy(self)
        other._take([self._packed[s] if isinstance(s, int) else _pack_expert(s) for s in sources])
        return other

    def _take(self, packed: list[_Packed]) -> None:
        self._packed = packed
        pointers = ctypes.c_void_p * len(packed)
        self._addresses = (
            pointers(*(expert.gate_up.data_ptr() for expert in packed)),
            pointers(*(expert.down.data_ptr() for expert in packed)),
            pointers(*(_address(expert.gate_up_bias) for expert in packed)),
            pointers(*(_address(expert.down_bias) for expert in packed)),
        )
        self._counts = ctypes.c_long * len(packed)


def _pack_expert(weights: ExpertWeights) -> _Packed:
    bias = None
    if weights.gate_bias is not None and weights.up_bias is not None:
        bias = interleave(weights.gate_bias, weights.up_bias)
    down_bias = None if weights.down_bias is None else weights.down_bias.contiguous()
    return _Packed(pack_interleaved(weights.gate, weights.up), pack(weights.down), bias, down_bias)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
