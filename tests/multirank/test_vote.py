"""The vote over real gloo processes: identical decisions, and errors that name the rank that left."""

import os
import random
import signal
import time
from typing import Any

import pytest

from tests.multirank.gang import run_gang
from vote.ballot import Facts
from vote.config import VoteConfig
from vote.decision import StepType
from vote.errors import LockstepBroken, RanksMissing, SettingsMismatch
from vote.group import TorchControlGroup
from vote.protocol import StepProtocol
from vote.settings import compare_settings
from vote.witness import Witness


def protocol(rank: int, group: Any, **options: Any) -> StepProtocol:
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    config = VoteConfig(decision=options.pop("decision", "adaptive"))
    return StepProtocol(TorchControlGroup(group), config, Witness(store, rank, group.size(), grace_s=2.0), **options)


def random_walk(rank: int, group: Any, steps: int) -> list[tuple[str, bool, bool]]:
    """Random local facts under one decision and then the other; every rank must see the same agreements."""
    rng = random.Random(rank)
    seen = []
    for number in range(2 * steps):
        if number % steps == 0:
            voter = protocol(rank, group, decision=("cadence", "adaptive")[number // steps])
        busy = rng.random() < 0.7
        facts = Facts(busy and rng.random() < 0.4, busy and rng.random() < 0.6, busy, wake=rng.randrange(2))
        agreement = voter.agree(facts, lambda: rng.random() < 0.5)
        seen.append((agreement.step_type.value, agreement.compute, agreement.sleep))
    return seen


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_see_the_same_steps(world_size: int) -> None:
    results = run_gang(random_walk, world_size, 1500)
    assert all(result == results[0] for result in results)
    kinds = {step[0] for step in results[0]}
    assert {StepType.PREFILL.value, StepType.DECODE.value} <= kinds


def leaves_at_step_five(rank: int, group: Any, how: str) -> Any:
    """Rank 1 leaves; the others return what they were told, and after how long."""
    voter = protocol(rank, group)
    started = time.monotonic()
    try:
        for step in range(100):
            if rank == 1 and step == 5:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if how == "failed":
                    voter._witness.last_words("ValueError: no such thing")
                    return None
            voter.agree(Facts(has_decode=True, unfinished=True), lambda: False)
            started = time.monotonic()
    except LockstepBroken as error:
        return {"culprits": error.culprits, "step": error.step, "after": time.monotonic() - started, "text": str(error)}
    raise AssertionError("nothing was noticed")


def survivors(how: str, control_timeout_s: float) -> list[dict[str, Any]]:
    """Reports of ranks 0 and 2; rank 1 never answers."""
    return run_gang(leaves_at_step_five, 3, how, group_timeout_s=control_timeout_s, answers=(0, 2))


@pytest.mark.parametrize(("how", "words"), [("killed", "is dead or hangs"), ("stopped", "is dead or hangs")])
def test_a_rank_that_leaves_is_named_by_all_others(how: str, words: str) -> None:
    for report in survivors(how, control_timeout_s=4.0):
        assert list(report["culprits"]) == [1], report
        assert words in report["culprits"][1]
        assert report["step"] == 5
        assert report["after"] < 4.0 + 5.0


def test_last_words_of_a_failed_rank_reach_the_others() -> None:
    for report in survivors("failed", control_timeout_s=4.0):
        assert list(report["culprits"]) == [1], report
        assert "ValueError: no such thing" in report["culprits"][1]


def out_of_step(rank: int, group: Any) -> dict[int, str]:
    voter = protocol(rank, group, settings=1 if rank != 2 else 99)
    with pytest.raises(LockstepBroken) as caught:
        voter.agree(Facts(), lambda: False)
    return caught.value.culprits


def test_a_rank_with_other_settings_is_named() -> None:
    for culprits in run_gang(out_of_step, 3):
        assert culprits == {2: "voted: settings=99"}


def check_settings(rank: int, group: Any) -> str:
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(SettingsMismatch) as caught:
        compare_settings(store, rank, group.size(), {"block_size": "32" if rank == 1 else "16", "policy": "phased"}, 20)
    return str(caught.value)


def test_settings_are_compared_before_the_first_step() -> None:
    for text in run_gang(check_settings, 3):
        assert "block_size: rank 0 has 16, rank 1 has 32, rank 2 has 16" in text
        assert "policy" not in text


def arrive_late(rank: int, group: Any) -> str:
    import torch.distributed as dist

    if rank == 1:
        return ""
    with pytest.raises(RanksMissing) as caught:
        compare_settings(dist.distributed_c10d._get_default_store(), rank, group.size(), {}, 1.0)
    return str(caught.value)


def test_a_rank_that_never_arrives_is_named() -> None:
    assert "rank(s) 1 did not arrive at the start-up check" in run_gang(arrive_late, 2)[0]
