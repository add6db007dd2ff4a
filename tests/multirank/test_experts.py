"""Experts over several ranks: bit for bit what one rank computes, whatever the ranks hold."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ep.alltoall import AllToAllDispatcher, tokens_travel_whole
from ep.dispatch import CPU, CollectiveFailed, Dispatcher, make_dispatcher
from ep.local import LocalDispatcher
from ep.moe import MoELayer
from ep.placement import ExpertPlacement
from kernels.experts import GroupedExperts
from kernels.linear import PackedLinear
from tests.multirank.gang import GangError, run_gang

HIDDEN, INNER, TOP_K = 32, 48, 2
ALWAYS, NEVER = 1 << 60, -(1 << 60)  # spare bytes: tokens travel whole, rows travel alone


def moe_layer(num_experts: int, experts: tuple[int, ...], dispatcher: Dispatcher, dtype: torch.dtype) -> MoELayer:
    """The layer with the given local experts; equal on all ranks where they are the same."""
    generator = torch.Generator().manual_seed(1)
    router = torch.randn(num_experts, HIDDEN, generator=generator)
    gate_up = torch.randn(num_experts, 2 * INNER, HIDDEN, generator=generator).to(dtype) / 4
    down = torch.randn(num_experts, HIDDEN, INNER, generator=generator).to(dtype) / 4
    local = GroupedExperts([PackedLinear(gate_up[e]) for e in experts], [PackedLinear(down[e]) for e in experts])
    return MoELayer(router, local, TOP_K, dispatcher)


def tokens_of_gang(counts: tuple[int, ...], dtype: torch.dtype, same: bool) -> list[Tensor]:
    """Each rank's tokens; `same`: all equal, so that all go to the same experts."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(counts), HIDDEN, generator=generator).to(dtype)
    if same and len(x):
        x[:] = x[0]
    return list(x.split(counts))


def on_rank(rank: int, group: Any, cases: list[tuple[int, tuple[int, ...], bool, torch.dtype]], spare: int) -> Any:
    """Outputs of all cases, one after the other on one dispatcher per placement, and the collective counts."""
    outputs, collectives = [], []
    for num_experts, counts, same, dtype in cases:
        placement = ExpertPlacement.contiguous(num_experts, group.size())
        dispatcher = AllToAllDispatcher(placement, rank, group, CPU, spare_bytes=spare)
        layer = moe_layer(num_experts, placement.local_experts(rank), dispatcher, dtype)
        x = tokens_of_gang(counts, dtype, same)[rank]
        with torch.inference_mode():
            dispatcher.begin_step(len(x))
            outputs.append(layer(layer(x)).clone())
        collectives.append(dispatcher.num_collectives)
    return outputs, collectives


def expected(case: tuple[int, tuple[int, ...], bool, torch.dtype]) -> Tensor:
    num_experts, counts, same, dtype = case
    placement = ExpertPlacement.contiguous(num_experts, 1)
    layer = moe_layer(num_experts, placement.local_experts(0), LocalDispatcher(placement, 0, CPU), dtype)
    x = torch.cat(tokens_of_gang(counts, dtype, same))
    with torch.inference_mode():
        return layer(layer(x))


def counts_for(world_size: int) -> list[tuple[int, ...]]:
    """Tokens per rank: some everywhere, none on some, one in the gang, none at all."""
    full = (5, 3, 7, 2)[:world_size]
    return [full, (0, *full[1:]), (*full[:-1], 0), (0,) * (world_size - 1) + (1,), (0,) * world_size, (40,) * world_size]


@pytest.mark.parametrize("spare", [ALWAYS, NEVER], ids=["tokens", "rows"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_compute_what_one_computes(world_size: int, spare: int) -> None:
    cases = [
        (num_experts, counts, same, dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for counts in counts_for(world_size)
        for num_experts, same in ((8, False), (8, True), (2, False))
    ]
    results = run_gang(on_rank, world_size, cases, spare)
    assert all(collectives == results[0][1] for _, collectives in results)
    for index, case in enumerate(cases):
        whole = torch.cat([outputs[index] for outputs, _ in results])
        assert torch.equal(whole, expected(case)), case


def test_whole_tokens_where_latency_counts_and_rows_where_bytes_do() -> None:
    assert tokens_travel_whole([4096, 4096], top_k=2, row_bytes=8192)  # as many bytes either way
    assert tokens_travel_whole([4, 0, 16, 1, 0, 0, 0, 0], top_k=2, row_bytes=1152)
    assert not tokens_travel_whole([512] * 8, top_k=2, row_bytes=1152)
    assert not tokens_travel_whole([0, 0, 0, 512], top_k=2, row_bytes=1152)


def replicated(rank: int, group: Any) -> Any:
    """Experts 0 and 1 have two copies: tokens go to the near one, outputs do not change."""
    placement = ExpertPlacement(3, (2, 2, 1), (0, 1, 1, 2, 0))
    dispatcher = AllToAllDispatcher(placement, rank, group, CPU)
    layer = moe_layer(3, placement.local_experts(rank), dispatcher, torch.float32)
    x = tokens_of_gang((4, 4, 4), torch.float32, False)[rank]
    with torch.inference_mode():
        dispatcher.begin_step(len(x))
        return layer(x).clone()


def test_replicas() -> None:
    case = (3, (4, 4, 4), False, torch.float32)
    placement = ExpertPlacement.contiguous(3, 1)
    layer = moe_layer(3, (0, 1, 2), LocalDispatcher(placement, 0, CPU), torch.float32)
    with torch.inference_mode():
        alone = layer(torch.cat(tokens_of_gang(*case[1:2], torch.float32, False)))
    torch.testing.assert_close(torch.cat(run_gang(replicated, 3)), alone)


def leaving(rank: int, group: Any) -> str:
    """Rank 1 goes away before the second dispatch."""
    dispatcher = make_dispatcher("auto", ExpertPlacement.contiguous(4, 2), rank, group)
    dispatcher.begin_step(rank)
    if rank == 1:
        return "gone"
    try:
        dispatcher.dispatch(torch.zeros(0, HIDDEN), torch.zeros(0, TOP_K, dtype=torch.int64))
    except CollectiveFailed as error:
        return str(error)
    return "nothing happened"


def test_a_missing_rank_is_named_as_a_failed_collective() -> None:
    answers = run_gang(leaving, 2, timeout_s=60)
    assert answers[1] == "gone"
    assert answers[0].startswith("rank 0: all-to-all number 2 failed: ")


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
        run_gang(functools.partial(_hang), 2, timeout_s=5)


def _hang(rank: int, group: Any) -> None:
    import time

    time.sleep(600)


def refusals() -> list[tuple[Callable[[], Any], str]]:
    two = ExpertPlacement.contiguous(8, 2)
    return [
        (lambda: make_dispatcher("local", two, 0, None), "local is for dp 1, not 2"),
        (lambda: make_dispatcher("auto", two, 0, None), "needs a process group"),
        (lambda: make_dispatcher("pigeons", two, 0, None), "unknown experts.backend 'pigeons'"),
    ]


@pytest.mark.parametrize("index", range(3))
def test_backends_that_do_not_fit_are_refused(index: int) -> None:
    call, words = refusals()[index]
    with pytest.raises(ValueError, match=words):
        call()
