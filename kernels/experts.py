"""The gated feed-forward networks of a rank's experts over rows grouped by expert."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from kernels import strips
from kernels.expert_weights import Activation, ExpertWeights, Source, swiglu_oai
from kernels.linear import InvariantLinear, PackedLinear

__all__ = ["Activation", "Expert", "ExpertWeights", "Experts", "GroupedExperts", "Mlp", "make_experts", "make_mlp"]


@dataclass(frozen=True, slots=True)
class Expert:
    """gate and up: [intermediate, hidden]; down: [hidden, intermediate]."""

    gate: PackedLinear | InvariantLinear
    up: PackedLinear | InvariantLinear
    down: PackedLinear | InvariantLinear
    activation: Activation = "silu"

    @classmethod
    def of(cls, weights: ExpertWeights, activation: Activation, invariant: bool) -> "Expert":
        layer = InvariantLinear if invariant else PackedLinear
        return cls(
            layer(weights.gate, weights.gate_bias),
            layer(weights.up, weights.up_bias),
            layer(weights.down, weights.down_bias),
            activation,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)), or with the other activation; [N, hidden] -> [N, hidden]"""
        padded = self.gate.pad(x)
        if self.activation == "silu":
            inner = self.up.mul(padded, self.gate.silu(padded))
        else:
            inner = swiglu_oai(self.gate(padded), self.up(padded))
        return self.down(inner)[: len(x)]

    def weights(self) -> ExpertWeights:
        """What it was made of, bit for bit."""
        biases = self.gate.bias, self.up.bias, self.down.bias
        return ExpertWeights(self.gate.plain(), self.up.plain(), self.down.plain(), *biases)


class GroupedExperts:
    """The local experts of one layer. Owns their weights."""

    def __init__(self, experts: Sequence[Expert], activation: Activation = "silu", invariant: bool = False):
        self.experts = tuple(experts)
        self.activation = activation
        self.invariant = invariant

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

    def weights(self, slot: int) -> ExpertWeights:
        """What the slot was made of, bit for bit. Changes to the tensors may change the expert."""
        return self.experts[slot].weights()

    def rearranged(self, sources: Sequence[Source]) -> "Experts":
        """Experts with these slots: an old one by number, its packed weights shared, or one of new weights."""
        if not any(isinstance(source, int) for source in sources):
            weights = [source for source in sources if not isinstance(source, int)]
            return make_experts(weights, self.activation, self.invariant)
        experts = [
            self.experts[source] if isinstance(source, int) else Expert.of(source, self.activation, self.invariant)
            for source in sources
        ]
        return GroupedExperts(experts, self.activation, self.invariant)


Experts: TypeAlias = "strips.StripExperts | GroupedExperts"


def make_experts(weights: Iterable[ExpertWeights], activation: Activation = "silu", invariant: bool = False) -> Experts:
    """The fastest experts for these weights here, by slot; there may be none. All have the same shapes and types. Each
    is packed before the next is asked for, so that an iterator need not have them all in memory.

    invariant: each row's result has the same bits whatever rows are computed with it. In strips that is always so.
    """
    remaining = iter(weights)
    for first in remaining:
        every = chain([first], remaining)
        if strips.usable(*first.tensors()):
            return strips.StripExperts(every, activation)
        return GroupedExperts([Expert.of(expert, activation, invariant) for expert in every], activation, invariant)
    return GroupedExperts([], activation, invariant)


@dataclass(frozen=True, slots=True)
class Mlp:
    """An expert that every row goes to."""

    experts: Experts

    def __call__(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]"""
        return self.experts(x, [len(x)])


def make_mlp(weights: ExpertWeights, activation: Activation = "silu", invariant: bool = False) -> Mlp:
    """A dense feed-forward network, or the shared experts of a layer as one."""
    return Mlp(make_experts([weights], activation, invariant))
