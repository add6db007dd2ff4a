"""Placement: every expert has a place, and every question has the same answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep.placement import ExpertPlacement


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
    for source in range(ranks):
        for logical, physical in enumerate(placement.preferred(source)):
            rank, slot = placement.rank_of[physical], placement.slot_of(physical)
            assert placement.local_experts(rank)[slot] == logical
            assert placement.physical_of[logical] == (physical,)


def test_replicas_are_chosen_near_first_then_spread() -> None:
    placement = ExpertPlacement(3, (2, 2, 1), (0, 1, 1, 2, 0))
    assert placement.physical_of == ((0, 4), (1, 2), (3,))
    assert placement.preferred(0) == (0, 1, 3)
    assert placement.preferred(1) == (4, 2, 3)
    assert placement.preferred(2) == (4, 1, 3)


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
