"""The step loop of a gang of one, over a scheduler world's fake model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dp_engine import engine as engine_module
from dp_engine.batch import Batch, Drawn
from dp_engine.chaos import Chaos
from dp_engine.engine import Engine, StepCounters
from dp_engine.messages import Add, Output, Pause, Ready, Report, ResetPrefixCache, Sampling, Wake
from dp_engine.worker import StepWorker, ThreadWorker
from ep.dispatch import CollectiveFailed
from tests.scheduler_world import World, expected, prompt_of
from tests.scripted_link import Script, ScriptedLink
from vote.config import VoteConfig
from vote.errors import LockstepBroken
from vote.group import SoloGroup
from vote.protocol import StepProtocol
from vote.recorder import Recorder
from vote.witness import Witness

LATER = 100  # a turn at which the rank sleeps
ENGINES = {
    f"{policy}{'-overlap' * overlap}": {"policy": policy, "overlap": overlap}
    for policy in ("phased", "unified")
    for overlap in (False, True)
}
every_engine = pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)


class NotedGroup(SoloGroup):
    """Votes of a gang of one."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def all_reduce_min(self, vector: np.ndarray) -> np.ndarray:
        self._events.append("vote")
        return super().all_reduce_min(vector)


class FakeRunner:
    """A world's fake model; `fail` is raised in the third step."""

    def __init__(self, model: Callable[[Batch], np.ndarray], fail: Exception | None) -> None:
        self.num_collectives = 0
        self._model = model
        self._fail = fail

    def run(self, batch: Batch) -> Drawn:
        self.num_collectives += 4
        if self._fail is not None and self.num_collectives == 12:
            raise self._fail
        return Drawn(self._model(batch))


class Rig:
    """An engine with a script for a router. `events`: votes, steps submitted and results asked for, in order."""

    def __init__(self, script: Script, *, fail: Exception | None = None, chaos: bool = False, **config: Any) -> None:
        self.world = World(**config)
        self.scheduler = self.world.scheduler
        self.link = ScriptedLink(script)
        self.runner = FakeRunner(self.world.model, fail)
        self.events: list[str] = []
        mixed, overlap = self.world.config.policy == "unified", self.world.config.overlap
        self.worker = ThreadWorker(self.runner, 1) if overlap else StepWorker(self.runner)  # type: ignore[arg-type]
        self._follow("submit")
        self._follow("result")
        counters = StepCounters()
        protocol = StepProtocol(
            NotedGroup(self.events), VoteConfig(), Witness(Recorder(0, 1)), mixed=mixed,
            count_collectives=lambda: self.worker.num_collectives, on_ballot=counters.count_ballot,
        )  # fmt: skip
        parts = self.link, protocol, self.scheduler, self.worker, counters
        faults = Chaos(self.link, self.scheduler) if chaos else None  # type: ignore[arg-type]
        self.engine = Engine(*parts, mixed=mixed, overlap=overlap, chaos=faults)  # type: ignore[arg-type]

    def _follow(self, name: str) -> None:
        method = getattr(self.worker, name)

        def noted(*arguments: Any) -> Any:
            self.events.append(name)
            return method(*arguments)

        setattr(self.worker, name, noted)

    def tokens(self, request_id: int = 1) -> list[int]:
        return self.link.answers()[request_id].tokens

    def naps(self) -> list[Output]:
        """What was said before each sleep."""
        return [output for output in self.link.outputs if output.report is not None and not output.request_ids]


def run(script: Script, **config: Any) -> Rig:
    rig = Rig(script, **config)
    rig.engine.run()
    return rig


def asking(*turns: int, prompt: int = 20, max_tokens: int = 6, **more: Any) -> Script:
    """Requests 1, 2, ... at these turns."""
    script = Script()
    for request_id, turn in enumerate(turns, 1):
        script.add(turn, request_id, prompt_of(request_id, prompt), Sampling(max_tokens), **more)
    return script


@every_engine
def test_requests_are_answered(settings: dict[str, Any]) -> None:
    rig = run(asking(0, 0, 3, LATER), **settings)
    for request_id in range(1, 5):
        answer = rig.link.answers()[request_id]
        assert (answer.tokens, answer.reason) == (expected(prompt_of(request_id, 20), 6), "length")
    rig.world.check_drained()


@every_engine
def test_a_step_is_settled_after_the_next_vote_only_with_overlap(settings: dict[str, Any]) -> None:
    events = run(asking(0, max_tokens=4), **settings).events
    step = ["submit", "vote", "result"] if settings["overlap"] else ["submit", "result", "vote"]
    votes = 1 + (settings["policy"] == "phased")  # the second one asks whether the prefill is empty
    assert events[: votes + 4 * 3] == ["vote"] * votes + step * 4
    assert events[votes + 4 * 3 :].count("vote") == len(events[votes + 4 * 3 :]), "nothing is computed for nobody"


@every_engine
def test_a_rank_without_work_sleeps_until_it_is_told_something(settings: dict[str, Any]) -> None:
    script = asking(0, LATER)
    script.tell(2 * LATER, Wake(9))
    rig = run(script, **settings)
    reports = [nap.report for nap in rig.naps()]
    assert [report.idle_sleeps for report in reports if report] == [1, 2, 3]
    assert [report.generated_tokens for report in reports if report] == [6, 12, 12]
    assert len(rig.events) - rig.events.count("vote") == 2 * 2 * 6  # submit, result


@every_engine
@pytest.mark.parametrize(
    "message",
    [
        Add(7, 1, [5, 6], Sampling(1)),
        Add(7, 1, [], Sampling(1)),
        Wake(7),
        Ready(7, 1),
        Pause(7, "none"),
        ResetPrefixCache(7),
    ],
    ids=["add", "refused", "wake", "ready", "pause", "reset"],
)
def test_wake_up_numbers_are_remembered(settings: dict[str, Any], message: Any) -> None:
    script = Script()
    script.tell(0, message)
    script.tell(0, Wake(3))
    assert run(script, **settings).scheduler.wake == 7


@every_engine
def test_what_can_never_run_is_rejected_and_the_rest_goes_on(settings: dict[str, Any]) -> None:
    script = asking(0, 0)
    script.add(1, 1, [5, 6], Sampling(4))
    script.add(1, 3, [5] * 600, Sampling(4))
    rig = run(script, **settings)
    assert rig.link.rejected[1] == "request id 1 is in use"
    assert "a prompt of 600 tokens leaves no room" in rig.link.rejected[3]
    assert [rig.tokens(i) for i in (1, 2)] == [expected(prompt_of(i, 20), 6) for i in (1, 2)]


@every_engine
def test_an_aborted_request_says_no_more(settings: dict[str, Any]) -> None:
    script = asking(0, 0, max_tokens=20)
    script.abort(6, [1, 77])
    rig = run(script, **settings)
    answer = rig.link.answers()[1]
    assert answer.tokens == expected(prompt_of(1, 20), 20)[: len(answer.tokens)]
    assert 0 < len(answer.tokens) <= 6 and answer.reason is None
    assert rig.tokens(2) == expected(prompt_of(2, 20), 20)
    rig.world.check_drained()


@every_engine
def test_a_request_waits_until_it_is_ready(settings: dict[str, Any]) -> None:
    script = asking(0, 0, schedulable=False)
    script.ready(LATER, 1)
    script.ready(2 * LATER, 2, "cannot read the image")
    rig = run(script, **settings)
    waiting = [nap.report.waiting for nap in rig.naps() if nap.report]
    assert waiting == [2, 1, 0]
    assert rig.tokens(1) == expected(prompt_of(1, 20), 6)
    assert (rig.tokens(2), rig.link.answers()[2].reason) == ([], "preprocess_failed")


@every_engine
def test_pause_all_stops_in_the_middle(settings: dict[str, Any]) -> None:
    script = asking(0, 2, max_tokens=20)
    script.pause(6, "all")
    script.pause(LATER, "none")
    rig = run(script, **settings)
    first = rig.link.outputs.index(rig.naps()[0])
    said = sum(len(output.tokens) for output in rig.link.outputs[:first])
    paused = rig.naps()[0].report
    assert paused is not None and paused.running == 2 and paused.generated_tokens == said
    assert 0 < said < 20
    assert [rig.tokens(i) for i in (1, 2)] == [expected(prompt_of(i, 20), 20) for i in (1, 2)]


@every_engine
def test_pause_new_lets_the_running_ones_end(settings: dict[str, Any]) -> None:
    script = asking(0, 5, max_tokens=10)
    script.pause(4, "new")
    script.pause(LATER, "none")
    rig = run(script, **settings)
    paused = rig.naps()[0].report
    assert paused is not None and (paused.running, paused.waiting, paused.generated_tokens) == (0, 1, 10)
    assert [rig.tokens(i) for i in (1, 2)] == [expected(prompt_of(i, 20), 10) for i in (1, 2)]


@every_engine
@pytest.mark.parametrize(("reset", "hits"), [(False, 32), (True, 0)])
def test_reset_prefix_cache(settings: dict[str, Any], reset: bool, hits: int) -> None:
    script = Script()
    for request_id, turn in ((1, 0), (2, 2 * LATER)):
        script.add(turn, request_id, prompt_of(1, 40), Sampling(2))
    if reset:
        script.reset_prefix_cache(LATER)
    rig = run(script, **settings)
    assert rig.link.reports[-1].prefix_hit_tokens == hits
    assert rig.tokens(2) == rig.tokens(1) == expected(prompt_of(1, 40), 2)


@every_engine
def test_a_stop_settles_the_step_in_flight(settings: dict[str, Any]) -> None:
    """What was computed is told, and nothing more is started."""
    script = asking(0, max_tokens=100)
    script.shutdown(7)
    rig = run(script, **settings)
    assert rig.link.turn == 7
    assert rig.events.count("submit") == rig.events.count("result") == len(rig.tokens()) == 7
    assert rig.worker.num_collectives == rig.runner.num_collectives == 4 * 7
    assert rig.tokens() == expected(prompt_of(1, 20), 7)
    rig.scheduler.check_integrity()


@every_engine
def test_a_failed_collective_of_a_step_breaks_the_lockstep(settings: dict[str, Any]) -> None:
    rig = Rig(asking(0), fail=CollectiveFailed("the dispatch of layer 1"), **settings)
    with pytest.raises(LockstepBroken) as caught:
        rig.engine.run()
    assert caught.value.what == "the dispatch of layer 1"
    assert len(rig.tokens()) == 2, "the steps before are told"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_collective_is_told_with_the_number_of_its_step(overlap: bool) -> None:
    rig = Rig(asking(0), fail=CollectiveFailed("the dispatch of layer 1"), overlap=overlap)
    with pytest.raises(LockstepBroken) as caught:
        rig.engine.run()
    assert caught.value.step == 2


@every_engine
def test_a_failure_of_the_ranks_own_is_not_the_gangs(settings: dict[str, Any]) -> None:
    error = ValueError("no such thing")
    with pytest.raises(ValueError) as caught:
        Rig(asking(0), fail=error, **settings).engine.run()
    assert caught.value is error


# ---- reports


def last_report(*turns: int, config: dict[str, Any], **more: Any) -> Report:
    return run(asking(*turns, **more), **config).link.reports[-1]


def test_counters_of_the_phased_policy() -> None:
    report = last_report(0, LATER, prompt=40, max_tokens=4, config={})
    assert (report.prefill_steps, report.decode_steps, report.mixed_steps) == (2, 6, 0)
    assert (report.prompt_tokens, report.generated_tokens) == (80, 8)
    assert (report.running, report.waiting, report.used_blocks, report.num_blocks) == (0, 0, 0, 256)
    assert (report.prefix_query_tokens, report.prefix_hit_tokens, report.cached_blocks) == (80, 0, 4)
    assert (report.preemptions, report.forks, report.draft_tokens, report.placeholder_steps) == (0, 0, 0, 0)
    assert report.bad_messages == 0
    assert report.ballots.count == sum(report.ballots.buckets) == 8 + 2 + 2  # steps, second ballots, sleeps
    assert report.ballots.total > 0


def test_counters_of_the_unified_policy() -> None:
    report = last_report(0, LATER, prompt=40, max_tokens=4, config={"policy": "unified"})
    assert (report.prefill_steps, report.decode_steps, report.mixed_steps) == (0, 0, 8)
    assert (report.prompt_tokens, report.generated_tokens) == (80, 8)
    assert report.ballots.count == 8 + 2


@every_engine
def test_counters_of_preemptions_forks_and_drafts(settings: dict[str, Any]) -> None:
    script = asking(0, 0, 0, prompt=30, max_tokens=40)
    for request_id in (11, 12):
        script.add(0, request_id, prompt_of(1, 30), Sampling(40), parent=1)
    rig = Rig(script, **settings, num_blocks=13, preemption="recompute", num_draft_tokens=2)
    rig.link.bad_messages = 3
    rig.engine.run()
    report, counters = rig.link.reports[-1], rig.scheduler.counters
    assert report.bad_messages == 3
    for name in ("preemptions", "forks", "draft_tokens", "accepted_draft_tokens", "prompt_tokens", "generated_tokens"):
        assert getattr(report, name) == getattr(counters, name) > 0, name
    assert report.prefix_query_tokens == rig.scheduler.resources.queried_tokens >= 90
    assert report.generated_tokens == sum(len(answer.tokens) for answer in rig.link.answers().values()) == 200


@every_engine
@pytest.mark.parametrize(("interval_s", "each"), [(0.0, True), (3600.0, False)])
def test_reports_travel_with_outputs_now_and_then(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], interval_s: float, each: bool
) -> None:
    monkeypatch.setattr(engine_module, "REPORT_INTERVAL_S", interval_s)
    rig = Rig(asking(0, max_tokens=8), **settings)
    rig.engine._reported_at = engine_module.time.monotonic()
    rig.engine.run()
    *steps, nap = rig.link.outputs
    assert [output.report is not None for output in steps] == [each] * 8
    assert nap.report is not None, "nothing is left untold while the rank sleeps"
    if each:
        assert [output.report.generated_tokens for output in steps if output.report] == list(range(1, 9))
        assert steps[0].report is not None and steps[0].report.running == 1


@every_engine
def test_a_step_that_gave_nothing_is_not_told(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    monkeypatch.setattr(engine_module, "REPORT_INTERVAL_S", 3600.0)
    rig = Rig(asking(0, prompt=100, max_tokens=2), max_num_batched_tokens=30, **settings)
    rig.engine._reported_at = engine_module.time.monotonic()
    rig.engine.run()
    assert rig.events.count("submit") == 5
    assert [len(output.tokens) for output in rig.link.outputs] == [1, 1, 0]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_bear_the_number_of_their_own_step(overlap: bool) -> None:
    outputs = run(asking(0), overlap=overlap).link.outputs
    assert [output.step for output in outputs if output.tokens] == list(range(6))
