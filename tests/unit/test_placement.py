"""Placement: every expert has a place, and every question has the same answer."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_engine.model_config import ModelConfigError
from dp_engine.rank import place_experts
from ep.config import ExpertConfig
from ep.placement import ExpertPlacement, Placements, Turns


@pytest.mark.parametrize(
    ("experts", "ranks", "counts"),
    [(8, 1, (8,)), (8, 2, (4, 4)), (8, 3, (3, 3, 2)), (2, 3, (1, 1, 0)), (1, 4, (1, 0, 0, 0)), (9, 4, (3, 2, 2, 2))],
)
def test_contiguous_shares(experts: int, ranks: int, counts: tuple[int, ...]) -> None:
    assert ExpertPlacement.contiguous(experts, ranks).local_counts == counts


@given(st.integers(1, 70), st.integers(1, 20))
def test_contiguous_loads_every_expert_once_and_agrees_with_itself(experts: int, ranks: int) -> None:
    placement = ExpertPlacement.contiguous(experts, ranks)
    loaded = [expert for rank in range(ranks) for expert in placement.local_experts(rank)]
    assert loaded == list(range(experts))
    assert max(placement.local_counts) - min(placement.local_counts) <= 1
    for logical, (physical,) in enumerate(placement.physical_of):
        rank, slot = placement.rank_of[physical], placement.slot_of(physical)
        assert placement.local_experts(rank)[slot] == logical


@st.composite
def with_copies(draw: st.DrawFn) -> ExpertPlacement:
    experts, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    return ExpertPlacement.contiguous(experts, ranks, draw(st.integers(0, experts * (ranks - 1))))


@given(with_copies())
def test_copies_lie_on_different_ranks(placement: ExpertPlacement) -> None:
    for copies in placement.physical_of:
        ranks = [placement.rank_of[physical] for physical in copies]
        assert len(ranks) == len(set(ranks)) >= 1
    assert max(placement.local_counts) - min(placement.local_counts) <= 1


@given(with_copies(), st.lists(st.lists(st.integers(0, 11), max_size=30), max_size=4), st.integers(0, 5))
def test_copies_of_an_expert_take_turns(placement: ExpertPlacement, steps: list[list[int]], source: int) -> None:
    turns = Turns(placement, source)
    gone_to = np.zeros(placement.num_physical, np.int64)
    for step in steps:
        logical = np.array(step, np.int64) % placement.num_logical
        physical = turns.physical(logical)
        assert [placement.logical_of[copy] for copy in physical] == logical.tolist()
        gone_to += np.bincount(physical, minlength=placement.num_physical)
    for copies in placement.physical_of:
        share = gone_to[list(copies)]
        assert share.max() - share.min() <= 1


def test_ranks_begin_with_different_copies() -> None:
    placement = ExpertPlacement(3, (2, 2, 1), (0, 1, 1, 2, 0))
    assert placement.physical_of == ((0, 4), (1, 2), (3,))
    first = [Turns(placement, source).physical(np.array([0, 1, 2])).tolist() for source in range(3)]
    assert first == [[0, 1, 3], [4, 2, 3], [0, 1, 3]]
    turns = Turns(placement, 0)
    assert [turns.physical(np.array(step)).tolist() for step in ([0], [0, 0, 1, 0])] == [[0], [4, 0, 1, 4]]


def test_copies_beyond_the_first_are_those_of_the_rank_before() -> None:
    assert ExpertPlacement.contiguous(4, 2, 2).logical_of == (0, 1, 2, 2, 3, 0)
    assert ExpertPlacement.contiguous(4, 3, 3).logical_of == (0, 1, 2, 2, 3, 3, 0)
    with pytest.raises(ValueError, match="5 redundant experts do not fit: 4 experts on 2 ranks have room for 4"):
        ExpertPlacement.contiguous(4, 2, 5)


def test_settings_that_do_not_fit_the_gang_are_named() -> None:
    model: Any = SimpleNamespace(num_moe_layers=2, num_experts=4)
    two = ExpertConfig(redundant_experts=2)
    with pytest.raises(ModelConfigError, match=r"experts\.redundant_experts is 2: .* 1 ranks have room for 0"):
        place_experts(model, 1, two)
    assert place_experts(model, 2, two).layers[1].logical_of == (0, 1, 2, 2, 3, 0)
    model.num_moe_layers = 0
    assert place_experts(model, 2, two).layers == ()


def test_digests_tell_placements_and_epochs_apart() -> None:
    first = Placements.contiguous(2, 4, 2)
    assert first.digest == Placements.contiguous(2, 4, 2).digest < 2**31
    turned = ExpertPlacement(4, (2, 2), (2, 3, 0, 1))
    others = [first.replaced(0, turned), first.replaced(1, turned), first.replaced(0, first.layers[0])]
    assert len({placements.digest for placements in (first, *others)}) == 4


@pytest.mark.parametrize(
    ("logical", "counts", "copies", "words"),
    [
        (3, (2, 2), (0, 1, 1, 0), "do not cover"),
        (2, (2, 1), (0, 0, 1), "two copies"),
        (2, (1,), (0, 1), "ranks hold 1"),
        (2, (1, 1), (0, 2), "do not cover"),
        (0, (0,), (), "no sense"),
    ],
)
def test_impossible_placements_are_refused(
    logical: int, counts: tuple[int, ...], copies: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ExpertPlacement(logical, counts, copies)
