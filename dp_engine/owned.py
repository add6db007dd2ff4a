"""Which bytes of a checkpoint belong to a rank, told from the names of its tensors and the placement of the experts."""

import re
from collections.abc import Mapping

from dp_engine.shards import Stored
from ep.placement import Placements

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.layers\.(\d+)\..*?\.experts\.(?:(\d+)\.)?")

Parts = tuple[int | None, ...]
"""What a rank takes of a tensor: indices of its first axis, or None for all of it."""


def owned_parts(tensors: Mapping[str, Stored], placements: Placements, rank: int) -> dict[str, Parts]:
    """Tensor -> what this rank takes of it; tensors it does not take are left out.

    Experts are known by `.experts.3.` (one tensor each) or `.experts.` (all in one tensor, the first axis counts them);
    layers that have some count as MoE layers, in their order. Layers beyond the placed ones are taken by nobody.
    """
    found = {name: match for name in tensors if (match := _EXPERT.search(name))}
    order = sorted({int(match[1]) for match in found.values()})
    local = {
        layer: sorted(set(placement.local_experts(rank)))
        for layer, placement in zip(order, placements.layers, strict=False)
    }
    beyond = set(order[len(placements.layers) :])
    parts: dict[str, Parts] = {}
    for name, stored in tensors.items():
        layer = _LAYER.search(name)
        if layer and int(layer[1]) in beyond:
            continue
        if name not in found:
            parts[name] = (None,)
        elif (expert := found[name][2]) is None:
            parts[name] = tuple(index for index in local[int(found[name][1])] if index < (stored.shape or (0,))[0])
        elif int(expert) in local[int(found[name][1])]:
            parts[name] = (None,)
    return {name: wanted for name, wanted in parts.items() if wanted}


def taking_order(name: str) -> int:
    """Sorts tensors as decoders take them: the embedding, the layers, the rest."""
    layer = _LAYER.search(name)
    return int(layer[1]) if layer else -1 if "embed" in name else 1 << 30


def num_bytes(tensors: Mapping[str, Stored], parts: Mapping[str, Parts]) -> int:
    """Of all these parts."""
    spans = [tensors[name].span(index) for name, wanted in parts.items() for index in wanted]
    return sum(end - begin for begin, end in spans)
