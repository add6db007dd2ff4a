"""Thousands of random steps of real engines over real gloo processes: every rank sees the same ones."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from tests.multirank.gang import run_gang
from tests.multirank.random_script import RandomScript
from tests.multirank.world_rank import Story, Told, tell_all
from tests.scheduler_world import expected

STEPS = 10_000
SIZES = (2, 3, 4)
FLOODS = {2: 30, 3: 24, 4: 20}  # enough for so many steps
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
def script(size: int, name: str) -> RandomScript:
    return RandomScript(size, seed=100 * size + list(ENGINES).index(name), floods=FLOODS[size], longest=LONGEST)


@cache
def told(size: int) -> dict[str, list[Told]]:
    """Every story by rank; all in one gang."""
    stories = {name: Story(script(size, name), ENGINE | engine, vote) for name, (engine, vote) in ENGINES.items()}
    ranks = run_gang(tell_all, size, stories, timeout_s=240.0)
    return {name: [rank[name] for rank in ranks] for name in ENGINES}


# one gang of each size answers all tests
every_size = pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.xdist_group(f"{n} ranks")) for n in SIZES]
)
every_engine = pytest.mark.parametrize("name", ENGINES)


@every_size
@every_engine
def test_all_ranks_take_the_same_steps(size: int, name: str) -> None:
    """And enter the same collectives: each rank's numbers are compared in every ballot and in every collective."""
    first, *others = told(size)[name]
    for other in others:
        for mine, theirs in zip(first.turns, other.turns, strict=True):
            assert mine == theirs
        assert other.num_collectives == first.num_collectives
    assert first.num_collectives == len(first.issued)
    assert len({tuple(step.step_type for step in rank.issued) for rank in told(size)[name]}) == 1


@every_size
@every_engine
def test_every_request_ends_with_its_tokens(size: int, name: str) -> None:
    sent = script(size, name)
    for rank, result in enumerate(told(size)[name]):
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
def test_these_are_many_steps_of_every_kind(size: int) -> None:
    """Without which the tests above would show little."""
    results = told(size)
    assert sum(len(ranks[0].issued) for ranks in results.values()) >= STEPS
    for name, ranks in results.items():
        turns = ranks[0].turns
        assert sum(turn.sleep for turn in turns) >= FLOODS[size]
        assert all(rank.report.placeholder_steps > 100 for rank in ranks), name
        assert sum(rank.report.preemptions for rank in ranks) > 10, name
        if name.startswith("unified"):
            assert {turn.step_type for turn in turns} == {"mixed", "idle"}
            continue
        kinds = [sum(turn.step_type == kind for turn in turns) for kind in ("prefill", "decode", "idle")]
        assert min(kinds) >= FLOODS[size], name
        if ENGINES[name][0].get("want") == "head":
            assert sum(turn.tried and turn.step_type == "decode" for turn in turns) > 10, name
