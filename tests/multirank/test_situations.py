"""Ranks of one gang in very unlike situations, over real gloo processes: they take the same steps all the same."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import pytest

from dp_engine.messages import Pause, Sampling, Wake
from tests.multirank.gang import run_gang
from tests.multirank.world_rank import Story, Told, tell_all
from tests.scheduler_world import expected, prompt_of
from tests.scripted_link import Script

pytestmark = pytest.mark.xdist_group("situations")  # one gang answers all tests

SIZE = 3
LATER = 1000  # a turn at which the gang sleeps
ENGINES = {
    f"{policy}{'-overlap' * overlap}": {"policy": policy, "overlap": overlap}
    for policy in ("phased", "unified")
    for overlap in (False, True)
}
ANY_INTERVAL, PER_PREFILL = 5, 2
DECISIONS: Mapping[str, tuple[dict[str, Any], int]] = {  # with the most decode steps before a lonely wish is granted
    "cadence": ({"decision": "cadence", "all_interval": 3, "any_interval": ANY_INTERVAL}, ANY_INTERVAL),
    "adaptive": ({"decision": "adaptive", "decode_steps_per_prefill": PER_PREFILL}, PER_PREFILL),
}


class Requests(Script):
    """A script that knows the right answers."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.texts: dict[int, list[int]] = {}

    def ask(self, turn: int, prompt: list[int], max_tokens: int, *, rank: int, parent: int = 0) -> int:
        number = len(self.texts) + 1
        self.texts[number] = expected(prompt, max_tokens)
        self.add(turn, number, prompt, Sampling(max_tokens), rank=rank, parent=parent)
        return number

    def pause_one(self, turn: int, mode: Any, *, rank: int) -> None:
        self._wake += 1
        for other in range(self.size):
            self.tell(turn, Pause(self._wake, mode) if other == rank else Wake(self._wake), rank=other)


def full_pool() -> Requests:
    """Rank 1: one request has reserved the whole pool, another waits for it, and for a while it is paused too. Rank 0
    goes on, rank 2 has nothing to do."""
    script = Requests()
    script.ask(0, prompt_of(1, 8), 32, rank=1)
    script.ask(0, prompt_of(2, 20), 8, rank=1)
    for number in range(15):
        script.ask(2 + 4 * number, prompt_of(10 + number, 5), 6, rank=0)
    script.pause_one(10, "all", rank=1)
    script.pause_one(60, "none", rank=1)
    return script


FULL_POOL = {"block_size": 4, "num_blocks": 11, "admission": "full", "kv_watermark": 1.0}


def unlike() -> Requests:
    """Rank 0 guesses, rank 1 finds prefixes, rank 2 is paused with a request that runs."""
    script = Requests()
    script.ask(0, prompt_of(1, 9), 30, rank=2)
    script.pause_one(3, "all", rank=2)
    for number in range(8):
        script.ask(5 + 5 * number, [7, 9, 11] * 4, 16, rank=0)
        script.ask(6 + 5 * number, prompt_of(2, 40), 1, rank=1)
    script.pause_one(70, "none", rank=2)
    return script


UNLIKE = {"num_draft_tokens": 2, "draft_ngram_min": 1, "block_size": 8}


def half_prefilled() -> Requests:
    """A prompt that takes more than the watermark allows, and more than one step: on a rank alone, while the others
    decode, on all ranks; and two such ones on a rank, one of them a fork of a request that ends meanwhile."""
    script = Requests()
    script.ask(0, prompt_of(1, 310), 4, rank=1)
    for rank in range(SIZE):
        script.ask(LATER, prompt_of(2, 310) if rank == 1 else prompt_of(3, 9), 4 if rank == 1 else 60, rank=rank)
        script.ask(2 * LATER, prompt_of(4, 310), 4, rank=rank)
    for number, (max_tokens, forked_after) in enumerate(((10, 5), (14, 8), (16, 8), (18, 10), (18, 11), (18, 12))):
        start, prompt = (3 + number) * LATER, prompt_of(5, 60)
        parent = script.ask(start, prompt, max_tokens, rank=2)
        script.ask(start + 1, prompt_of(6, 225), 4, rank=2)
        script.ask(start + forked_after, prompt + prompt_of(7, 200), 4, rank=2, parent=parent)
        script.ask(start, prompt_of(8, 9), 40, rank=0)
    return script


HALF_PREFILLED = {"num_blocks": 21, "max_num_batched_tokens": 120, "preemption": "recompute", "prefix_cache": False}


class Situations:
    """All stories, told to one gang."""

    def __init__(self) -> None:
        self.scripts = {"full pool": full_pool(), "unlike": unlike(), "half-prefilled": half_prefilled()}
        stories = {}
        for name, engine in ENGINES.items():
            stories["full pool", name] = Story(self.scripts["full pool"], FULL_POOL | engine)
            stories["unlike", name] = Story(self.scripts["unlike"], UNLIKE | engine)
        for name, (vote, _) in DECISIONS.items():
            for overlap in (False, True):
                engine = HALF_PREFILLED | {"overlap": overlap}
                stories["half-prefilled", name, overlap] = Story(self.scripts["half-prefilled"], engine, vote)
        self._ranks = run_gang(tell_all, SIZE, stories)

    def __call__(self, *story: Any) -> list[Told]:
        """By rank, after what has to hold for any of them."""
        ranks = [told[story] for told in self._ranks]
        answers = {request_id: answer for rank in ranks for request_id, answer in rank.answers.items()}
        assert {number: answer.tokens for number, answer in answers.items()} == self.scripts[story[0]].texts
        assert all(rank.turns == ranks[0].turns and rank.num_collectives == ranks[0].num_collectives for rank in ranks)
        assert all(rank.num_collectives == len(rank.issued) for rank in ranks)
        return ranks


@pytest.fixture(scope="module")
def situations() -> Iterator[Situations]:
    yield Situations()


every_engine = pytest.mark.parametrize("engine", ENGINES)


@every_engine
def test_nothing_scheduled_is_not_nothing_to_do(situations: Situations, engine: str) -> None:
    """A rank with requests of which it can schedule none enters every step."""
    stuck = situations("full pool", engine)[1]
    kinds = {"prefill", "decode"} if engine.startswith("phased") else {"mixed"}
    empty = [step for step in stuck.issued if step.size == 0 and step.standing.unfinished == 2]
    assert {step.step_type for step in empty} == kinds
    assert len(empty) >= 40


@every_engine
def test_a_placeholder_step_needs_no_block(situations: Situations, engine: str) -> None:
    stuck = situations("full pool", engine)[1]
    empty = [step.standing.free for step in stuck.issued if step.size == 0 and step.standing.unfinished == 2]
    assert empty and set(empty) == {0}


@every_engine
def test_a_placeholder_step_needs_no_request(situations: Situations, engine: str) -> None:
    idle = situations("full pool", engine)[2]
    assert idle.issued and all(step.size == 0 and step.standing.unfinished == 0 for step in idle.issued)
    assert idle.report.placeholder_steps == len(idle.issued)


@every_engine
def test_only_the_tally_decides_what_is_entered(situations: Situations, engine: str) -> None:
    """Guesses, cached prefixes and a pause of some ranks change no step of the gang."""
    guessing, finding, paused = (rank.report for rank in situations("unlike", engine))
    assert guessing.accepted_draft_tokens > 20 and finding.draft_tokens == 0
    assert finding.prefix_hit_tokens > 100
    assert paused.placeholder_steps > 40 > paused.generated_tokens == 30


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("decision", DECISIONS)
def test_half_prefilled_above_the_watermark_goes_on(situations: Situations, decision: str, overlap: bool) -> None:
    """Every request has ended with its tokens, although this was so; and no wish waited longer than is promised."""
    ranks = situations("half-prefilled", decision, overlap)
    full = [standing for rank in ranks for standing in rank.standings if standing.free <= 2 and not standing.running]
    assert {standing.half_prefilled for standing in full} >= {1, 2}
    waits = [len(list(run)) for rank in ranks for waiting, run in groupby(rank.put_off) if waiting]
    assert max(waits) <= DECISIONS[decision][1]
