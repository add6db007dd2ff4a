"""End to end: real engines, model runners and gloo ranks under both policies, with overlap and without, give every
request the text that `transformers` gives it alone, whatever the scheduler did on the way.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import write_mixtral
from tests.multirank.engine_rank import RankResult, Run, run_all, run_alone, start
from tests.multirank.gang import run_gang
from tests.multirank.scenarios import PREFIX_HITS, SCENARIOS, STORMS, Reference, Scenario, sampled
from tests.scripted_link import Answer

pytestmark = pytest.mark.xdist_group("scheduling")  # one gang answers all tests

ENGINES = [(policy, overlap) for policy in ("phased", "unified") for overlap in (False, True)]


class Results:
    """Runs every scenario under every engine once: alone when it is asked for, on two ranks all in one gang."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.reference = Reference(directory)
        self.scenarios = {name: build(self.reference) for name, build in SCENARIOS.items()}
        self._alone: dict[Any, RankResult] = {}
        self._together: list[dict[Any, RankResult]] = []

    def __call__(self, name: str, policy: str, overlap: bool, dp: int) -> list[RankResult]:
        """By rank."""
        key = name, policy, overlap
        if dp == 1:
            if key not in self._alone:
                self._alone[key] = run_alone(self._directory, self._run(*key, dp))
            return [self._alone[key]]
        if not self._together:
            runs = {(name, *engine): self._run(name, *engine, dp) for name in self.scenarios for engine in ENGINES}
            self._together = run_gang(run_all, dp, self._directory, runs, timeout_s=240.0, group_timeout_s=60.0)
        return [results[key] for results in self._together]

    def _run(self, name: str, policy: str, overlap: bool, dp: int) -> Run:
        scenario = self.scenarios[name]
        return Run(scenario.script(dp), {"policy": policy, "overlap": overlap, **scenario.engine}, scenario.vote)

    def expected(self, scenario: Scenario) -> dict[int, list[int]]:
        """Whole texts by request; sampled ones are those of an engine that does nothing but prefill and decode."""
        if any(ask.temperature for ask in scenario.asks):
            plain = self("sampled", "phased", False, 1)
            return {request_id: answer.tokens for request_id, answer in plain[0].answers.items()}
        return {ask.request_id: ask.expected(self.reference) for ask in scenario.asks}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small only lose by more
    yield Results(write_mixtral(tmp_path_factory.mktemp("model") / "tiny", seed=1))
    torch.set_num_threads(threads)


def answers_of(ranks: list[RankResult]) -> dict[int, Answer]:
    """Of all ranks; nobody is answered by two."""
    assert sum(len(rank.answers) for rank in ranks) == len({key for rank in ranks for key in rank.answers})
    return {request_id: answer for rank in ranks for request_id, answer in rank.answers.items()}


def total(ranks: list[RankResult], counter: str) -> int:
    return sum(getattr(rank.report, counter) for rank in ranks)


every_engine = pytest.mark.parametrize(
    ("policy", "overlap"), ENGINES, ids=[policy + "-overlap" * overlap for policy, overlap in ENGINES]
)
one_and_two = pytest.mark.parametrize("dp", [1, 2], ids=["dp1", "dp2"])


@one_and_two
@every_engine
@pytest.mark.parametrize("name", SCENARIOS)
def test_texts_are_those_of_transformers(results: Results, name: str, policy: str, overlap: bool, dp: int) -> None:
    scenario, ranks = results.scenarios[name], results(name, policy, overlap, dp)
    answers = answers_of(ranks)
    for request_id, text in results.expected(scenario).items():
        answer = answers.get(request_id, Answer())
        if request_id in scenario.cut:
            assert answer.tokens == text[: len(answer.tokens)], request_id
        else:
            assert answer.tokens == text, request_id
            assert answer.reason in ("stop", "length"), request_id
    for counter, least in scenario.least.items():
        assert total(ranks, counter) >= least, counter


@one_and_two
@every_engine
@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_stay_together(results: Results, name: str, policy: str, overlap: bool, dp: int) -> None:
    """Same steps, same collectives, and everybody asked to stop at the same vote."""
    ranks = results(name, policy, overlap, dp)
    steps = {(rank.report.prefill_steps, rank.report.decode_steps, rank.report.mixed_steps) for rank in ranks}
    assert len(steps) == 1
    assert len({(rank.num_collectives, rank.turns) for rank in ranks}) == 1
    assert all(not rank.rejected and rank.report.used_blocks == 0 for rank in ranks)


@every_engine
def test_a_rank_without_work_enters_every_step(results: Results, policy: str, overlap: bool) -> None:
    busy, idle = (rank.report for rank in results("lonely", policy, overlap, 2))
    assert idle.placeholder_steps == idle.prefill_steps + idle.decode_steps + idle.mixed_steps
    assert idle.placeholder_steps > 0 == idle.generated_tokens
    assert busy.placeholder_steps < idle.placeholder_steps // 2


@one_and_two
@every_engine
def test_ends(results: Results, policy: str, overlap: bool, dp: int) -> None:
    """Stop tokens, aborts and terminated sequences end a request as they should."""
    arrivals = results.scenarios["arrivals"]
    stopped = {ask.request_id for ask in arrivals.asks if ask.stop}
    answers = answers_of(results("arrivals", policy, overlap, dp))
    assert {request_id for request_id, answer in answers.items() if answer.reason == "stop"} == stopped
    aborted = answers_of(results("aborts", policy, overlap, dp))
    for request_id in results.scenarios["aborts"].cut:
        assert aborted.get(request_id, Answer()).reason is None
    terminated = [answer.reason for answer in answers_of(results("terminated", policy, overlap, dp)).values()]
    assert set(terminated) == {"length", "insufficient_system_resource"}


@one_and_two
@every_engine
def test_a_reserved_request_is_never_preempted(results: Results, policy: str, overlap: bool, dp: int) -> None:
    assert total(results("reserved", policy, overlap, dp), "preemptions") == 0


@one_and_two
@every_engine
def test_prefixes_of_the_same_salt_are_found(results: Results, policy: str, overlap: bool, dp: int) -> None:
    assert total(results("prefixes", policy, overlap, dp), "prefix_hit_tokens") == PREFIX_HITS


@one_and_two
@every_engine
def test_guesses_come_from_committed_tokens(results: Results, policy: str, overlap: bool, dp: int) -> None:
    """So their number and worth do not depend on overlap, nor on who runs beside."""
    counters = ("draft_tokens", "accepted_draft_tokens", "generated_tokens")
    ranks, plain = results("drafts", policy, overlap, dp), results("drafts", "phased", False, 1)
    assert [total(ranks, counter) for counter in counters] == [total(plain, counter) for counter in counters]


@one_and_two
@every_engine
def test_storms_leave_nothing_out(results: Results, policy: str, overlap: bool, dp: int) -> None:
    for counter in ("preemptions", "forks", "prefix_hit_tokens", "accepted_draft_tokens", "idle_sleeps"):
        assert sum(total(results(f"storm_{seed}", policy, overlap, dp), counter) for seed in STORMS) > 0, counter


def test_seeds_make_samples_differ(results: Results) -> None:
    """What the sampled scenarios compare is not greedy text by another name."""
    asks = sampled(results.reference).asks
    drawn = results.expected(results.scenarios["sampled"])
    assert sum(drawn[ask.request_id] != ask.expected(results.reference) for ask in asks) >= len(asks) - 1


def test_overlap_has_to_be_the_same_on_all_ranks(tmp_path: Path) -> None:
    directory = write_mixtral(tmp_path / "tiny")
    for text in run_gang(start, 2, directory, [{}, {"overlap": True}]):
        assert text == "ranks were started with different settings: engine.overlap: rank 0 has False, rank 1 has True"
