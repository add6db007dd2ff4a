"""Linear layers and experts on AMX tiles (kernels/amx.c). One thread; bf16 on the CPU."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import native

_ALIGNMENT = 64
_OVERRUN = 16 * 1024  # bytes the prefetch looks ahead; they need not be read, but must not be anyone's page fault


def usable(*weights: Tensor) -> bool:
    """Can all these weights [out, in] be packed here? With several threads oneDNN, which uses them, is better."""
    return (
        all(w.device.type == "cpu" and w.dtype == torch.bfloat16 and not any(d % 32 for d in w.shape) for w in weights)
        and torch.get_num_threads() == 1
        and native.amx() is not None
    )


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

    def __init__(self, weights: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """weights: gate and up [inner, hidden], down [hidden, inner] of each expert; at least one."""
        self._inner, self._hidden = weights[0][0].shape
        self._packed = []
        for gate, up, down in weights:
            both = torch.stack((gate.view(-1, 16, self._hidden), up.view(-1, 16, self._hidden)), 1).flatten(0, 2)
            self._packed.append((pack(both), pack(down)))
        pointers = ctypes.c_void_p * len(weights)
        self._gate_up = pointers(*(gate_up.data_ptr() for gate_up, _ in self._packed))
        self._down = pointers(*(down.data_ptr() for _, down in self._packed))
        self._counts = ctypes.c_long * len(weights)
        library = native.amx()
        assert library is not None
        self._experts = library.phalanx_amx_experts

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [R, hidden] sorted by local expert, counts[e] of them for expert e -> [R, hidden]."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        scratch = rows.new_empty(max(counts), self._inner)
        self._experts(
            rows.data_ptr(), self._counts(*counts), len(counts), self._gate_up, self._down, self._hidden, self._inner,
            scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out
