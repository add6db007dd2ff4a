"""Backends: the same bits from all, whatever the load and the placement, and an error in time if a rank fails."""

import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep import region
from ep.alltoall import AllToAllDispatcher
from ep.deepep import DeepEPDispatcher
from ep.dispatch import CPU, BackendUnavailable, CollectiveFailed, Dispatcher, make_dispatcher, weighted_sum
from ep.placement import Placements
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


TWO = Placements.contiguous(1, 4, 2)
LOAD = Load((3, 2), 2, torch.float32, TWO.layers)


def failure(call: Callable[[], Any]) -> tuple[str, float]:
    """What the error says, and after how many seconds."""
    began = time.monotonic()
    try:
        call()
    except (CollectiveFailed, ValueError) as error:
        return str(error), time.monotonic() - began
    return "nothing happened", time.monotonic() - began


def missing(rank: int, group: Any) -> dict[str, tuple[str, float]]:
    """Rank 1 does not come to the second forward, leaves, and in the end dies. A group that has failed is of no more
    use, so each backend has its own."""
    made = {}
    for name in ("alltoall", "allgather", "deepep", "shm: late", "shm: left", "shm: died", "alltoall: died"):
        own = dist.new_group(backend="gloo")
        made[name] = dispatchers(TWO, rank, own)[name.partition(":")[0]]
        run(made[name], LOAD)
        if name != "alltoall: died":
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=WAIT_S), own)
    if rank == 1:
        made["shm: left"].close()
        time.sleep(6 * WAIT_S)
        os._exit(1)
    made["shm: died"]._board.timeout_s = 60.0  # type: ignore[attr-defined]
    return {name: failure(lambda d=dispatcher: run(d, LOAD)) for name, dispatcher in made.items()}  # type: ignore[misc]


def test_a_rank_that_does_not_come_leaves_or_dies_is_noticed_in_time() -> None:
    (answers,) = run_gang(missing, 2, answers=[0], timeout_s=60)
    for name, (words, seconds) in answers.items():
        assert words.startswith("rank 0: "), (name, words)
        assert seconds < (20.0 if "died" in name else 10 * WAIT_S), (name, seconds)
    assert answers["shm: late"][0] == f"rank 0: ranks [1] did not come within {WAIT_S:g} s"
    assert answers["shm: left"][0] == "rank 0: ranks [1] have left" and answers["shm: left"][1] < WAIT_S
    assert answers["shm: died"][0] == "rank 0: ranks [1] have died"
    assert "collective number" in answers["alltoall"][0] and "DeepEP's dispatch" in answers["deepep"][0]


class Lied(ValueError):
    """Rank 1 has done its worst."""


def lie_about_tokens(dispatcher: Any) -> None:
    dispatcher.max_tokens = 1000
    dispatcher.begin_step = lambda num_tokens: type(dispatcher).begin_step(dispatcher, 900)


def lie_about_tokens_on_the_board(dispatcher: Any) -> None:
    publish = dispatcher._board.publish
    dispatcher._board.publish = lambda kind, number, facts: publish(kind, number, (*facts[:-1], -1))


def lie_about_rows(dispatcher: Any) -> None:
    exchange = dispatcher._exchange

    def exchange_and_end(kind: bytes, rows: Tensor, *splits: Any) -> Tensor:
        if kind != b"expert counts":
            received: Tensor = exchange(kind, rows, *splits)
            return received
        exchange(kind, rows * (1 << 61), *splits)
        raise Lied

    dispatcher._exchange = exchange_and_end


def name_no_expert(dispatcher: Any) -> None:
    share, collect = dispatcher._share, dispatcher._collect
    dispatcher._share = lambda records: share(torch.cat((records[:, :-4], records[:, -4:] | 0x40), 1))

    def collect_and_end(*arguments: Any) -> None:
        collect(*arguments)
        raise Lied

    dispatcher._collect = collect_and_end


def name_no_expert_in_memory(dispatcher: Any) -> None:
    exchange = dispatcher._exchange

    def write_and_exchange(*arguments: Any) -> None:
        (areas,) = dispatcher._areas.values()
        areas.ids[1, 0] = -5
        exchange(*arguments)

    dispatcher._exchange = write_and_exchange


def be_placed_otherwise(dispatcher: Any) -> None:
    dispatcher.place(0, TWO.layers[0])


LIES: list[tuple[str, Callable[[Any], None], str]] = [
    ("alltoall", lie_about_tokens, "rank 1 announces 900 tokens for a step; agreed are 0 to 40"),
    ("allgather", lie_about_tokens, "rank 1 announces 900 tokens for a step; agreed are 0 to 40"),
    ("shm", lie_about_tokens_on_the_board, "rank 1 announces -1 tokens for a step; agreed are 0 to 40"),
    ("rows", lie_about_rows, "rank 1 announces rows .* for my experts, but has 2 tokens of 2 experts each"),
    ("alltoall", name_no_expert, "rank 1 sends tokens to an expert that does not exist"),
    ("allgather", name_no_expert, "rank 1 sends tokens to an expert that does not exist"),
    ("shm", name_no_expert_in_memory, "rank 1 sends tokens to an expert that does not exist"),
    ("shm", be_placed_otherwise, r"rank 1 dispatches \(.*\) \(0, 1, 2, 64\), this rank \(0, 0, 2, 64\)"),
]


def lying(rank: int, group: Any) -> list[str]:
    """What the others say when rank 1 announces what it must not, or names experts that do not exist."""
    answers = []
    for backend, lie, _ in LIES:
        dispatcher = dispatchers(TWO, rank, group)[backend]
        if rank == 1:
            lie(dispatcher)
        answers.append(failure(lambda dispatcher=dispatcher: run(dispatcher, LOAD))[0])  # type: ignore[misc]
    return answers


def refused(rank: int, group: Any) -> dict[str, tuple[str, int, bool]]:
    """What each backend says to one token too many, the collectives it has entered then, and whether it goes on."""
    answers = {}
    for name, dispatcher in dispatchers(TWO, rank, group).items():
        with pytest.raises(ValueError, match="is to dispatch 41 tokens") as error:
            dispatcher.begin_step(MAX_TOKENS + 1)
        entered = dispatcher.num_collectives
        run(dispatcher, LOAD)
        with pytest.raises(ValueError, match="announced 3 tokens and dispatches 2" if rank == 0 else "announced 2"):
            dispatcher.dispatch(0, *(tensor[: 2 - rank] for tensor in LOAD.tokens(0)))
        answers[name] = str(error.value), entered, True
    return answers


def apart(rank: int, group: Any, names: list[str]) -> list[str]:
    """What ranks get that cannot open each other's memory."""
    if rank == 1:
        region._open = lambda *_: None
    made = []
    for name in names:
        try:
            made.append(type(make_dispatcher(name, TWO, rank, 2, group)).__name__)
        except BackendUnavailable as error:
            made.append(str(error))
    return made


def refused_and_apart(rank: int, group: Any) -> tuple[Any, ...]:
    auto = type(make_dispatcher("auto", TWO, rank, 2, group)).__name__
    return lying(rank, group), refused(rank, group), auto, apart(rank, group, ["auto", "shm"])


def test_no_rank_can_overflow_another() -> None:
    """More than agreed is refused here, before anybody hears of it, and not believed there, before there is room for
    it. Ranks that share a host find out, ranks that do not too."""
    for rank, (told, refusals, auto, made) in enumerate(run_gang(refused_and_apart, 2)):
        for (backend, lie, words), answer in zip(LIES, told, strict=True):
            assert rank == 1 or re.match(f"rank 0: {words}", answer), (backend, lie.__name__, answer)
        for name, (words, entered, _) in refusals.items():
            assert words.startswith(f"rank {rank} is to dispatch 41 tokens in a step; agreed are at most 40"), name
            assert entered == 0
        assert auto == ("ShmDispatcher" if platform.machine() == "x86_64" else "AllToAllDispatcher")
        no_host = "experts.backend shm: ranks [1] share no memory with rank 0; are they on its host?; use alltoall"
        assert made == ["AllToAllDispatcher", no_host]


def test_memory_is_only_opened_by_its_own_name() -> None:
    name = "phalanx-experts-0123456789abcdef"
    own = region._create(name)
    assert own is not None
    other = region._open(os.getpid(), own, name)
    assert other is not None and os.path.sameopenfile(own, other)
    assert region._open(os.getpid(), own, name.replace("0", "1")) is None
    os.close(other)
    os.close(own)
    assert region._open(os.getpid(), own, name) is None


SOLO = Placements.contiguous(1, 4, 1)
REFUSALS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: make_dispatcher("local", TWO, 0, 2, None), ValueError, "local is for dp 1, not 2"),
    (lambda: make_dispatcher("auto", TWO, 0, 2, None), ValueError, "2 ranks need a process group"),
    (
        lambda: make_dispatcher("pigeons", TWO, 0, 2, None),
        ValueError,
        "unknown experts.backend 'pigeons'; there are auto,",
    ),
    (
        lambda: make_dispatcher("deepep", SOLO, 0, 1, None),
        BackendUnavailable,
        "between NVIDIA GPUs, and this rank's are",
    ),
    (
        lambda: make_dispatcher("deepep", SOLO, 0, 1, None, torch.device("cuda")),
        BackendUnavailable,
        "needs the package deep_ep, .* install it from .*, or use auto, alltoall or allgather",
    ),
    (
        lambda: make_dispatcher("shm", SOLO, 0, 1, None, torch.device("cuda")),
        BackendUnavailable,
        "shm is for tokens on CPUs, not on cuda; use alltoall",
    ),
]


@pytest.mark.parametrize("index", range(len(REFUSALS)))
def test_backends_that_do_not_fit_are_refused(index: int) -> None:
    call, kind, words = REFUSALS[index]
    with pytest.raises(kind, match=words):
        call()


def test_a_model_without_experts_needs_no_exchange() -> None:
    dispatcher = make_dispatcher("auto", Placements(()), 1, 4, None)
    dispatcher.begin_step(7)
    assert dispatcher.num_collectives == 0


def test_experts_that_do_not_exist_are_refused_where_they_are_named() -> None:
    dispatcher = make_dispatcher("auto", SOLO, 0, 1, None)
    dispatcher.begin_step(1)
    with pytest.raises(ValueError, match="rank 0 routes to expert 4 of 4"):
        dispatcher.dispatch(0, torch.zeros(1, HIDDEN), torch.tensor([[1, 4]]), torch.ones(1, 2))


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sums_have_the_bits_of_short_ones(top_k: int, dtype: torch.dtype) -> None:
    pairs, weights = torch.randn(300, top_k, 1024).to(dtype), torch.rand(300, top_k)
    one_by_one = torch.zeros(300, 1024)
    for k in range(top_k):
        one_by_one += pairs[:, k].float() * weights[:, k : k + 1]
    assert torch.equal(weighted_sum(pairs, weights), one_by_one.to(dtype))
