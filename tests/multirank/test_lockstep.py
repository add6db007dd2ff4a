"""Thousands of random steps of real engines over real gloo processes: every rank sees the same ones."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from tests.multirank.gang import run_gang
from tests.multirank.random_script import RandomScript
from tests.multirank.world_rank import Story, Told, tell_all
from tests.scheduler_world import expected

# Ranks, floods, and the steps that these make at least; the long runs are for `-m slow`.
RUNS = ((2, 6, 1_000), (3, 3, 1_000), (4, 3, 1_000))
LONG_RUNS = ((2, 30, 10_000), (3, 24, 10_000), (4, 20, 10_000))
LONGEST = 60  # tokens of a request, in a pool of 80: there is always somebody who has to wait
ENGINE = {
    "num_blocks": 21, "block_size": 4, "max_num_batched_tokens": 32, "preemption": "recompute", "max_preemptions": None,
}  # fmt: skip
CADENCE = {"decision": "cadence", "all_interval": 3, "any_interval": 5}
ENGINES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cadence": ({"want": "head"}, {**CADENCE, "fast_path": False}),
    "cadence-overlap": ({"want": "head", "overlap": True}, CADENCE),
    "adaptive": ({"want": "head", "num_draft_tokens": 2, "draft_ngram_min": 1}, {}),
    "adaptive-overlap": ({"overlap": True, "num_draft_tokens": 3, "draft_ngram_min": 1}, {}),
    "unified": ({"policy": "unified", "num_draft_tokens": 2, "draft_ngram_min": 1}, {}),
    "unified-overlap": ({"policy": "unified", "overlap": True, "long_prefill_token_threshold": 8}, {}),
}


@cache
def script(size: int, floods: int, name: str) -> RandomScript:
    return RandomScript(size, seed=100 * size + list(ENGINES).index(name), floods=floods, longest=LONGEST)


@cache
def told(size: int, floods: int) -> dict[str, list[Told]]:
    """Every story by rank; all in one gang."""
    scripts = {name: script(size, floods, name) for name in ENGINES}
    stories = {name: Story(scripts[name], ENGINE | engine, vote) for name, (engine, vote) in ENGINES.items()}
    ranks = run_gang(tell_all, size, stories, timeout_s=240.0)
    return {name: [rank[name] for rank in ranks] for name in ENGINES}


# one gang of each size answers all tests
every_size = pytest.mark.parametrize(
    ("size", "floods", "steps"),
    [pytest.param(*run, marks=pytest.mark.xdist_group(f"{run[0]} ranks")) for run in RUNS]
    + [pytest.param(*run, marks=[pytest.mark.slow, pytest.mark.xdist_group(f"{run[0]} ranks")]) for run in LONG_RUNS],
)
every_engine = pytest.mark.parametrize("name", ENGINES)


@every_size
@every_engine
def test_all_ranks_take_the_same_steps(size: int, floods: int, steps: int, name: str) -> None:
    """And enter the same collectives: each rank's numbers are compared in every ballot and in every collective."""
    del steps
    first, *others = told(size, floods)[name]
    for other in others:
        for mine, theirs in zip(first.turns, other.turns, strict=True):
            assert mine == theirs
        assert other.num_collectives == first.num_collectives
    assert first.num_collectives == len(first.issued)
    assert len({tuple(step.step_type for step in rank.issued) for rank in told(size, floods)[name]}) == 1


@every_size
@every_engine
def test_every_request_ends_with_its_tokens(size: int, floods: int, steps: int, name: str) -> None:
    del steps
    sent = script(size, floods, name)
    for rank, result in enumerate(told(size, floods)[name]):
        for request_id, ask in sent.asks.items():
            if ask.rank != rank:
                assert request_id not in result.answers
                continue
            text = expected(ask.prompt, ask.max_tokens)
            if request_id in sent.aborted:
                tokens = result.answers[request_id].tokens if request_id in result.answers else []
                assert tokens == text[: len(tokens)], request_id
            else:
                answer = result.answers[request_id]
                assert (answer.tokens, answer.reason) == (text, "length"), request_id


@every_size
def test_these_are_many_steps_of_every_kind(size: int, floods: int, steps: int) -> None:
    """Without which the tests above would show little."""
    results = told(size, floods)
    assert sum(len(ranks[0].issued) for ranks in results.values()) >= steps
    for name, ranks in results.items():
        turns = ranks[0].turns
        assert sum(turn.sleep for turn in turns) >= floods
        assert all(rank.report.placeholder_steps > steps // 100 for rank in ranks), name
        assert sum(rank.report.preemptions for rank in ranks) > floods // 3, name
        if name.startswith("unified"):
            assert {turn.step_type for turn in turns} == {"mixed", "idle"}
            continue
        kinds = [sum(turn.step_type == kind for turn in turns) for kind in ("prefill", "decode", "idle")]
        assert min(kinds) >= floods, name
        if ENGINES[name][0].get("want") == "head":
            assert sum(turn.tried and turn.step_type == "decode" for turn in turns) > floods // 3, name
