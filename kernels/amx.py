"""Linear layers and experts on AMX tiles (kernels/amx.c). One thread; bf16 on the CPU."""

import ctypes
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from kernels import native
from kernels.expert_weights import Activation, ExpertWeights, Source

_ALIGNMENT = 64
_OVERRUN = 16 * 1024  # bytes the prefetch looks ahead; they need not be read, but must not be anyone's page fault


def usable(*weights: Tensor) -> bool:
    """Can all these weights [out, in] be packed here? With several threads oneDNN, which uses them, is better."""
    return (
        all(w.device.type == "cpu" and w.dtype == torch.bfloat16 and not any(d % 32 for d in w.shape) for w in weights)
        and torch.get_num_threads() == 1
        and native.amx() is not None
    )


def experts_usable(weights: Sequence[ExpertWeights], activation: Activation) -> bool:
    """Can all these experts be packed here?"""
    tensors = [tensor for expert in weights for tensor in expert.tensors()]
    return activation == "silu" and all(t.dim() == 2 for t in tensors) and usable(*tensors)


def unpack(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The weight [out, in] that `pack` was given."""
    tiles = packed[: out_features * in_features].view(out_features // 32, in_features // 32, 2, 16, 16, 2)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(out_features, in_features)


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in the order its tiles are used."""
    weight = weight.contiguous()
    room = torch.empty(weight.numel() + (_OVERRUN + _ALIGNMENT) // 2, dtype=torch.bfloat16)
    packed = room[(-room.data_ptr() % _ALIGNMENT) // 2 :]
    library = native.amx()
    assert library is not None
    library.phalanx_amx_pack(weight.data_ptr(), *weight.shape, packed.data_ptr())
    return packed


class AmxLinear:
    """`x @ weight.T`, sums in fp32, rounded once."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = pack(weight)
        library = native.amx()
        assert library is not None
        self._linear = library.phalanx_amx_linear

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in], N may be 0 -> [N, out]"""
        return self._product(x, None)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Plus `other` [N, out], before the rounding."""
        return self._product(x, other.contiguous())

    def _product(self, x: Tensor, other: Tensor | None) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), self.out_features)
        addend = None if other is None else other.data_ptr()
        self._linear(
            x.data_ptr(), len(x), x.stride(0), self._packed.data_ptr(), self.out_features, self.in_features, addend,
            out.data_ptr(),
        )  # fmt: skip
        return out


class AmxExperts:
    """The local experts of a layer in one call, each `down(silu(gate(x)) * up(x))`.

    gate and up lie together, 16 outputs of one and the same 16 of the other, so that a strip gives finished products.
    """

    def __init__(self, weights: Sequence[ExpertWeights]) -> None:
        """At least one; all of the same shapes."""
        self._inner, self._hidden = weights[0].gate.shape
        self._take([self._pack(expert) for expert in weights])
        library = native.amx()
        assert library is not None
        self._experts = library.phalanx_amx_experts

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [R, hidden] sorted by local expert, counts[e] of them for expert e -> [R, hidden]."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        scratch = rows.new_empty(max(counts, default=0), self._inner)
        self._experts(
            rows.data_ptr(), self._counts(*counts), len(counts), self._gate_up, self._down, self._hidden, self._inner,
            scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def weights(self, slot: int) -> ExpertWeights:
        """What the slot was made of, bit for bit; copies."""
        gate_up, down = self._packed[slot]
        both = unpack(gate_up, 2 * self._inner, self._hidden).view(-1, 2, 16, self._hidden)
        gate, up = (both[:, half].reshape(self._inner, self._hidden) for half in (0, 1))
        return ExpertWeights(gate, up, unpack(down, self._hidden, self._inner))

    def rearranged(self, sources: Sequence[Source]) -> "AmxExperts":
        """Experts with these slots: an old one by number, its packed weights shared, or one of new weights."""
        other = copy(self)
        other._take([self._packed[s] if isinstance(s, int) else self._pack(s) for s in sources])
        return other

    def _pack(self, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
        pair = (weights.gate.view(-1, 16, self._hidden), weights.up.view(-1, 16, self._hidden))
        return pack(torch.stack(pair, 1).flatten(0, 2)), pack(weights.down)

    def _take(self, packed: list[tuple[Tensor, Tensor]]) -> None:
        self._packed = packed
        pointers = ctypes.c_void_p * len(packed)
        self._gate_up = pointers(*(gate_up.data_ptr() for gate_up, _ in packed))
        self._down = pointers(*(down.data_ptr() for _, down in packed))
        self._counts = ctypes.c_long * len(packed)
