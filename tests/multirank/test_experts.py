"""Experts over several ranks: bit for bit what one rank computes, whatever the ranks hold."""

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ep.alltoall import AllToAllDispatcher, tokens_travel_whole
from ep.dispatch import CPU, Dispatcher
from ep.local import LocalDispatcher
from ep.moe import MoELayer
from ep.placement import ExpertPlacement, Placements
from ep.routing import Router, Routing
from kernels.experts import Expert, GroupedExperts
from kernels.linear import PackedLinear
from tests.multirank.gang import GangError, run_gang

HIDDEN, INNER, TOP_K = 32, 48, 2
SPARE = {"tokens": 1 << 60, "rows": -(1 << 60)}  # bytes to spare that make tokens travel whole, or rows alone


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Case:
    """Tokens per rank; `same`: all equal, so that all go to the same experts."""

    counts: tuple[int, ...]
    num_experts: int = 8
    same: bool = False
    dtype: torch.dtype = torch.float32
    way: str = "tokens"

    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(sum(self.counts), HIDDEN, generator=generator).to(self.dtype)
        if self.same and len(x):
            x[:] = x[0]
        return x

    def layer(self, dispatcher: Dispatcher) -> MoELayer:
        """With the experts of the dispatcher's rank; equal on all ranks where they are the same."""
        generator = torch.Generator().manual_seed(1)
        router = torch.randn(self.num_experts, HIDDEN, generator=generator)
        shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        weights = [torch.randn(self.num_experts, *s, generator=generator).to(self.dtype) / 4 for s in shapes]
        own = dispatcher.placements.layers[0].local_experts(dispatcher.rank)
        experts = [Expert(*(PackedLinear(part[expert]) for part in weights)) for expert in own]
        return MoELayer(0, Router(Routing(TOP_K, normalize=True), router), GroupedExperts(experts), dispatcher)


def outputs_of(case: Case, dispatcher: Dispatcher, share: slice) -> tuple[Tensor, Tensor]:
    """Of this rank's tokens: what the experts make of them, routed as all tokens are, and the layer's output."""
    layer, x = case.layer(dispatcher), case.tokens()
    weights, topk_ids = layer.router(x)
    x, topk_ids, weights = x[share], topk_ids[share], weights[share]
    with torch.inference_mode():
        dispatcher.begin_step(len(x))
        dispatched = dispatcher.dispatch(0, x, topk_ids, weights)
        assert sum(dispatched.counts) == len(dispatched.rows)
        outputs = dispatcher.combine(layer.experts(dispatched.rows, dispatched.counts), dispatched.handle)
        return outputs.clone(), layer(x).clone()


def on_rank(rank: int, group: Any, cases: list[Case]) -> list[tuple[Tensor, Tensor, int]]:
    results = []
    for case in cases:
        placements = Placements.contiguous(1, case.num_experts, group.size())
        dispatcher = AllToAllDispatcher(placements, rank, group, CPU, spare_bytes=SPARE[case.way])
        start = sum(case.counts[:rank])
        outputs = outputs_of(case, dispatcher, slice(start, start + case.counts[rank]))
        results.append((*outputs, dispatcher.num_collectives))
    return results


def alone(case: Case) -> tuple[Tensor, Tensor]:
    dispatcher = LocalDispatcher(Placements.contiguous(1, case.num_experts, 1), 0, CPU)
    return outputs_of(case, dispatcher, slice(None))


def counts_for(world_size: int) -> list[tuple[int, ...]]:
    """Tokens per rank: some everywhere, none on some, one in the gang, none at all, many."""
    full = (5, 3, 7, 2)[:world_size]
    one = (0,) * (world_size - 1) + (1,)
    return [full, (0, *full[1:]), (*full[:-1], 0), one, (0,) * world_size, (40,) * world_size]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_compute_what_one_computes(world_size: int) -> None:
    """Bit for bit, both ways, few and many tokens, one expert for all, fewer experts than ranks."""
    cases = [
        Case(counts, num_experts, same, dtype, way)
        for way in SPARE
        for dtype in (torch.float32, torch.bfloat16)
        for counts in counts_for(world_size)
        for num_experts, same in ((8, False), (8, True), (2, False))
    ]
    results = run_gang(on_rank, world_size, cases)
    for case, *parts in zip(cases, *results, strict=True):
        outputs, layer = alone(case)
        assert torch.equal(torch.cat([part[0] for part in parts]), outputs), case
        tolerance = 1e-4 if case.dtype == torch.float32 else 0.05
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), layer, rtol=tolerance, atol=tolerance)
        assert {part[2] for part in parts} == {5 if case.way == "tokens" else 7}, case


def test_an_idle_rank_changes_no_bit() -> None:
    busy = Case((5, 3), dtype=torch.bfloat16)
    with_idle = Case((5, 3, 0), dtype=torch.bfloat16)
    two, three = run_gang(on_rank, 2, [busy]), run_gang(on_rank, 3, [with_idle])
    for rank in range(2):
        assert torch.equal(two[rank][0][1], three[rank][0][1])


def test_whole_tokens_where_latency_counts_and_rows_where_bytes_do() -> None:
    assert tokens_travel_whole([4096, 4096], top_k=2, row_bytes=8192)  # as many bytes either way
    assert tokens_travel_whole([4, 0, 16, 1, 0, 0, 0, 0], top_k=2, row_bytes=1152)
    assert not tokens_travel_whole([512] * 8, top_k=2, row_bytes=1152)
    assert not tokens_travel_whole([0, 0, 0, 512], top_k=2, row_bytes=1152)


REPLICATED = ExpertPlacement(3, (2, 2, 1), (0, 1, 1, 2, 0))


def replicated(rank: int, group: Any, case: Case) -> Tensor:
    dispatcher = AllToAllDispatcher(Placements((REPLICATED,)), rank, group, CPU, spare_bytes=SPARE[case.way])
    return outputs_of(case, dispatcher, slice(4 * rank, 4 * rank + 4))[0]


def test_copies_of_an_expert_answer_alike() -> None:
    """Up to last bits: each copy sees fewer rows than the only one would."""
    case = Case((4, 4, 4), num_experts=3, way="rows")
    torch.testing.assert_close(torch.cat(run_gang(replicated, 3, case)), alone(case)[0])


def failing(rank: int, group: Any, how: str) -> None:
    if rank == 1 and how == "raise":
        raise KeyError("rank one's own")
    if rank == 1 and how == "exit":
        raise SystemExit(3)
    group.barrier().wait()


@pytest.mark.parametrize(("how", "words"), [("raise", "rank one's own"), ("exit", "SystemExit: 3")])
def test_gang_surfaces_the_failure_of_a_rank(how: str, words: str) -> None:
    with pytest.raises(GangError, match=words):
        run_gang(failing, 2, how)


def test_gang_ends_ranks_that_hang() -> None:
    with pytest.raises(GangError, match=r"ranks \[0, 1\] did not end in time"):
        run_gang(_hang, 2, timeout_s=2)


def _hang(rank: int, group: Any) -> None:
    time.sleep(600)
