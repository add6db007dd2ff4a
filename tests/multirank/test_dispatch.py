"""Backends: the same bits from all of them, whatever the load and the placement, and an error in time if a rank fails."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep.alltoall import AllToAllDispatcher
from ep.deepep import DeepEPDispatcher
from ep.dispatch import CPU, BackendUnavailable, CollectiveFailed, Dispatcher, make_dispatcher, weighted_sum
from ep.placement import ExpertPlacement, Placements
from tests import fake_deepep
from tests.multirank.gang import run_gang
from tests.multirank.loads import HIDDEN, Load, expected, loads_for, run

MAX_TOKENS = 40
WAIT_S = 0.5  # for a rank that does not come
ROWS = -(1 << 60)  # bytes to spare that make rows travel alone


def dispatchers(placements: Placements, rank: int, group: Any) -> dict[str, Dispatcher]:
    """All that these ranks can have."""
    size = group.size()
    names = ["alltoall", "allgather", "shm", *(["local"] if size == 1 else [])]
    made: dict[str, Dispatcher] = {
        name: make_dispatcher(name, placements, rank, size, group, max_tokens=MAX_TOKENS, timeout_s=WAIT_S)
        for name in names
    }
    made["rows"] = AllToAllDispatcher(placements, rank, group, CPU, spare_bytes=ROWS, max_tokens=MAX_TOKENS)
    modules = {"deepep": fake_deepep.V2, "deepep exact": fake_deepep.V2}
    if size in (2, 4):
        modules["legacy"] = fake_deepep.LEGACY
    for name, module in modules.items():
        made[name] = DeepEPDispatcher(
            placements, rank, group, CPU, module, exact="exact" in name, max_tokens=MAX_TOKENS
        )
    return made


def exact(name: str, load: Load) -> bool:
    """Whether sums of this backend are in k order. DeepEP's are by rank: no difference for two in fp32."""
    return name not in ("deepep", "legacy") or (load.top_k <= 2 and load.dtype == torch.float32)


def run_loads(rank: int, group: Any, loads: list[Load]) -> list[dict[str, tuple[list[tuple[Tensor, Tensor]], int]]]:
    """Per load and backend: what `run` gave, before and after the layers changed places, and collectives entered."""
    results = []
    with torch.inference_mode():
        for load in loads:
            answers = {}
            swapped = replace(load, placements=load.placements[::-1])
            for name, dispatcher in dispatchers(Placements(load.placements), rank, group).items():
                found = run(dispatcher, load)
                for layer, placement in enumerate(swapped.placements):
                    dispatcher.place(layer, placement)
                answers[name] = [*found, *run(dispatcher, swapped)], dispatcher.num_collectives
            results.append(answers)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_backends_give_the_same_bits(world_size: int) -> None:
    """Random placements, replicas, ranks without experts or tokens, no token at all, all to one expert."""
    loads = loads_for(world_size, rounds=2)
    by_rank = run_gang(run_loads, world_size, loads)
    for number, load in enumerate(loads):
        before, after = expected(load), expected(replace(load, placements=load.placements[::-1]))
        for rank in range(world_size):
            for name, (found, collectives) in by_rank[rank][number].items():
                assert collectives == by_rank[0][number][name][1]
                for (rows, tokens), wanted in zip(found, [*before[rank], *after[rank]], strict=True):
                    assert torch.equal(rows, wanted[0]), (name, rank, load)
                    if exact(name, load):
                        assert torch.equal(tokens, wanted[1]), (name, rank, load)
                    else:
                        torch.testing.assert_close(tokens, wanted[1], rtol=0.02, atol=0.02)
