"""Packing: what always holds, how near to the best it is, and what travels."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.eplb import cases, failures, measure
from ep.balance import Gang, busiest, pack, rank_loads
from ep.placement import ExpertPlacement
from ep.transfers import in_goes, transfers
from ep.window import PARTS, Window

TRIED = ((2, 0), (4, 4))


@st.composite
def loads(draw: st.DrawFn) -> tuple[np.ndarray, ExpertPlacement]:
    """Counts of a few steps, and a placement without a plan."""
    experts, ranks, steps = draw(st.integers(1, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    placement = ExpertPlacement.contiguous(experts, ranks, draw(st.integers(0, experts * (ranks - 1))))
    values = st.lists(st.integers(0, 1000) | st.just(0), min_size=experts, max_size=experts)
    return np.array([draw(values) for _ in range(steps)], np.int64), placement


@given(loads(), st.integers(0, 3), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_there_is_a_packing_by_nodes_for_all_loads(
    case: tuple[np.ndarray, ExpertPlacement], ranks_per_node: int, num_groups: int
) -> None:
    counts, unplanned = case
    gang = Gang(unplanned.local_counts, ranks_per_node, num_groups)
    assert pack(counts, gang, unplanned).local_counts == unplanned.local_counts


@given(loads())
@settings(max_examples=60, deadline=None)
def test_a_packing_keeps_slots_and_is_never_worse(case: tuple[np.ndarray, ExpertPlacement]) -> None:
    counts, unplanned = case
    gang = Gang(unplanned.local_counts)
    packed = pack(counts, gang, unplanned)
    assert packed.local_counts == unplanned.local_counts  # the rest is checked by ExpertPlacement itself
    assert busiest(counts, packed) <= busiest(counts, unplanned) * (1 + 1e-9) + len(counts)
    assert pack(counts.copy(), gang, unplanned) == packed
    assert rank_loads(counts, packed).sum() == pytest.approx(counts.sum())


@given(loads())
@settings(max_examples=30, deadline=None)
def test_the_order_of_the_steps_says_nothing(case: tuple[np.ndarray, ExpertPlacement]) -> None:
    counts, unplanned = case
    gang = Gang(unplanned.local_counts)
    assert busiest(counts, pack(counts[::-1], gang)) == pytest.approx(busiest(counts, pack(counts, gang)))


def splits(slots: tuple[int, ...], experts: frozenset[int]) -> list[list[list[int]]]:
    """All packings without copies."""
    if len(slots) == 1:
        return [[sorted(experts)]]
    return [
        [list(some), *rest]
        for some in combinations(sorted(experts), slots[0])
        for rest in splits(slots[1:], experts - set(some))
    ]


@pytest.mark.parametrize("slots", [(4, 4), (3, 3, 2), (2, 2, 2, 2)])
def test_few_experts_are_packed_as_well_as_can_be(slots: tuple[int, ...]) -> None:
    every, rng = splits(slots, frozenset(range(8))), np.random.default_rng(sum(slots) + len(slots))
    for _ in range(8):
        counts = (rng.pareto(1.5, (6, 8)) * 20 + rng.pareto(1.5, 8) * 50).astype(np.int64)
        best = min(np.max([counts[:, part].sum(1) for part in parts], 0).sum() for parts in every)
        assert busiest(counts, pack(counts, Gang(slots))) <= 1.02 * best


def test_recorded_loads_are_packed_no_worse_than_by_deepseek() -> None:
    """The demo's, copies and all; bench.eplb has more of it."""
    two, four = (case for case in cases(quick=False) if case.name == "demo" and (case.ranks, case.redundant) in TRIED)
    for case in (two, four):
        few = replace(case, layers=case.layers[::3])
        rows = measure(few)
        assert not failures(rows)
        assert {"DeepSeek global", "ours"} <= {row.packer for row in rows}


def test_a_hot_expert_gets_the_copies() -> None:
    counts = np.array([[80, 10, 10, 10, 10, 10, 10, 10]])
    packed = pack(counts, Gang((3, 3, 3, 3)))
    assert len(packed.physical_of[0]) == 4
    assert busiest(counts, packed) <= 20 + 20
    assert busiest(counts, pack(counts, Gang((2, 2, 2, 2)))) == 90


def test_what_is_good_stays_where_it_is() -> None:
    gang, current = Gang((2, 2, 2)), ExpertPlacement(6, (2, 2, 2), (5, 0, 1, 4, 3, 2))
    assert pack(np.array([[30, 20, 20, 20, 20, 10]]), gang, current) == current
    one_swap = pack(np.array([[30, 10, 10, 30, 20, 20]]), gang, current)  # 5 and 1
    assert one_swap.logical_of == (1, 0, 5, 4, 3, 2)


def test_no_load_moves_nothing() -> None:
    current = ExpertPlacement(4, (2, 2), (3, 1, 0, 2))
    assert pack(np.zeros((3, 4), np.int64), Gang((2, 2)), current) == current


def test_experts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="4 experts do not fill 3 slots of 2 ranks"):
        pack(np.ones((1, 4), np.int64), Gang((2, 1)))


@pytest.mark.parametrize("current", [None, ExpertPlacement.contiguous(16, 4, 8)])
def test_groups_and_copies_stay_on_a_node(current: ExpertPlacement | None) -> None:
    rng = np.random.default_rng(4)
    gang = Gang((6,) * 4, ranks_per_node=2, num_groups=4)
    for _ in range(5):
        counts = (rng.pareto(1.2, (4, 16)) * 30).astype(np.int64)
        current = pack(counts, gang, current)
        nodes = [{current.rank_of[copy] // 2 for copy in copies} for copies in current.physical_of]
        of_groups = [set().union(*nodes[first : first + 4]) for first in range(0, 16, 4)]
        assert sorted(node for group in of_groups for node in group) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("gang", "nodes"),
    [
        (Gang((2, 2, 2, 2)), 1),
        (Gang((2, 2, 2, 2), 2, 8), 2),
        (Gang((4, 4, 4, 4), 2, 8), 2),
        (Gang((5, 5, 5, 5), 2, 8), 1),  # more slots than a node has experts
        (Gang((2, 2, 2, 2), 2, 1), 1),  # one group cannot be on two nodes
        (Gang((2, 2, 2, 2), 2, 6), 1),  # 8 experts are not 6 groups
        (Gang((3, 3, 2), 2, 2), 1),
        (Gang((3, 3, 2, 2), 2, 2), 1),  # uneven shares
    ],
)
def test_nodes_matter_where_everything_can_be_dealt_out(gang: Gang, nodes: int) -> None:
    assert gang.num_nodes(8) == nodes


# ---- what travels


@given(loads(), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_everything_arrives_in_bounded_goes(case: tuple[np.ndarray, ExpertPlacement], most: int) -> None:
    counts, old = case
    new = pack(counts, Gang(old.local_counts), old)
    held = [set(old.local_experts(rank)) for rank in range(old.world_size)]
    arrived: list[set[int]] = [set() for _ in held]
    for go in in_goes(transfers(old, new), most):
        assert go
        for end in ("source", "target"):
            assert max(np.bincount([getattr(move, end) for move in go])) <= most
        for move in go:
            assert move.expert in held[move.source]
            arrived[move.target].add(move.expert)
    for rank, before in enumerate(held):
        assert set(new.local_experts(rank)) <= before | arrived[rank]
        assert not arrived[rank] & before


def test_holders_share_the_sending() -> None:
    old = ExpertPlacement(3, (2, 2, 1, 1), (0, 1, 0, 1, 2, 2))
    new = ExpertPlacement(3, (2, 2, 1, 1), (0, 2, 2, 1, 0, 1))
    assert {move.target: move.source for move in transfers(old, new)} == {0: 2, 1: 3, 2: 0, 3: 1}


# ---- the window


def test_a_window_forgets_what_is_old() -> None:
    counters = np.zeros((2, 3), np.int64)
    counters += 7  # before the window
    window = Window(lambda: counters, 2 * PARTS)
    for step in range(50):
        counters[1] += [1, 0, step]
        window.step_done()
    parts = window.parts(1)
    assert parts[:, 0].tolist() == [2] * PARTS + [0]  # the latest has just begun
    assert parts[:, 2].sum() == sum(range(50 - 2 * PARTS, 50)) == window.gain()[1, 2]
    assert not window.parts(0).any()
    counters[0] += 5
    window.step_done()
    assert window.parts(0)[-1].tolist() == [5, 5, 5]
