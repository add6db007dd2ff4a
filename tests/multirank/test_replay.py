"""Recorded decisions of two and three ranks, reproduced by real processes that vote over gloo."""

import json
from pathlib import Path
from typing import Any

import pytest

from dp_engine.replay import Record, first_difference, replay_phased
from tests.multirank.gang import run_gang
from vote.group import TorchControlGroup

TRACES = Path(__file__).parents[1] / "traces" / "phased"


def paths(world_size: int) -> list[Path]:
    return sorted(TRACES.glob(f"*-{world_size}r-*.json"))


def replay_all(rank: int, group: Any) -> list[list[Record]]:
    """This rank's records of every trace, one after the other, each with a protocol of its own."""
    control = TorchControlGroup(group)
    return [replay_phased(json.loads(path.read_text()), rank, control) for path in paths(control.size)]


@pytest.mark.parametrize(("world_size", "count"), [(2, 16), (3, 17)])
def test_traces_over_real_processes(world_size: int, count: int) -> None:
    assert len(paths(world_size)) == count
    by_rank = run_gang(replay_all, world_size)
    for path, *records in zip(paths(world_size), *by_rank, strict=True):
        assert first_difference(json.loads(path.read_text()), records) is None, path.name
