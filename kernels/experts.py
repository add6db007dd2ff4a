"""The gated feed-forward networks of a rank's experts over rows grouped by expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels import amx
from kernels.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """An expert as in the checkpoint. gate and up: [intermediate, hidden]; down: [hidden, intermediate]."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class Expert:
    """gate and up: [intermediate, hidden]; down: [hidden, intermediate]."""

    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear

    def __call__(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)), [N, hidden] -> [N, hidden]"""
        padded = self.gate.pad(x)
        return self.down(self.up.mul(padded, self.gate.silu(padded)))[: len(x)]


class GroupedExperts:
    """The local experts of one layer. Owns their weights."""

    def __init__(self, experts: Sequence[Expert]):
        self.experts = tuple(experts)

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [R, hidden] sorted by local expert, counts[e] of them for expert e (R = sum) -> [R, hidden].

        Reads only the weights of experts that have rows.
        """
        outputs = []
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                outputs.append(expert(rows[start : start + count]))
                start += count
        if not outputs:
            return torch.empty_like(rows)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


Experts: TypeAlias = "amx.AmxExperts | GroupedExperts"


def make_experts(weights: Sequence[ExpertWeights]) -> Experts:
    """The fastest experts for these weights here, by slot."""
    if weights and amx.usable(*(tensor for expert in weights for tensor in expert.tensors())):
        return amx.AmxExperts([(expert.gate, expert.up, expert.down) for expert in weights])
    return GroupedExperts([Expert(*(PackedLinear(tensor) for tensor in expert.tensors())) for expert in weights])
