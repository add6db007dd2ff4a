"""The explorer: its standard worlds, what it finds where something is wrong, and what it takes for the same."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from dp_engine import explore as command
from dp_engine.config import EngineConfig
from dp_engine.explore import explore_world
from dp_engine.messages import Add, Sampling
from dp_engine.policies import make_scheduler
from dp_engine.proof.portraits import PORTRAITS
from dp_engine.proof.standard_worlds import (
    ADAPTIVE,
    CADENCE,
    PUBLISHED,
    RECOMPUTE,
    standard_worlds,
    two_halves,
    world,
)
from dp_engine.proof.worlds import Router, World
from dp_engine.scheduler import Scheduler
from vote.ballot import BALLOT_SIZE, Facts, Lockstep, Tally, write_ballot
from vote.config import VoteConfig
from vote.decision import Clock, StepType, decide, price
from vote.explorer import Proof
from vote.fingerprint import fingerprint
from vote.foresight import earliest_like, longest_wait

WORLDS = standard_worlds()


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_wrong_can_happen(name: str) -> None:
    found = explore_world(WORLDS[name])
    assert found.counterexample is None, str(found.counterexample)
    assert found.transitions >= found.states > 100


def test_every_interleaving_is_explored() -> None:
    """One message for each of two ranks that have nothing to do: neither has heard of it, one or the other has (they
    vote again until both have), or both have. A rank is awake or asleep, before it and after it."""
    quiet = world("quiet", "a wake-up that is none", lambda router: router.pause("none"), vote=PUBLISHED)
    found = explore_world(quiet)
    assert (found.states, found.transitions, found.rank_states) == (4, 1 + 2 + 2, 2 * 4)


def test_the_published_watermark_traps_two_half_computed_prompts() -> None:
    """Why `watermark_escape` is there."""
    trap = world(
        "trap", "", two_halves, num_blocks=8, kv_watermark=0.5, vote=CADENCE, watermark_escape=False, **RECOMPUTE
    )
    found = explore_world(trap).counterexample
    assert found is not None and found.proof is Proof.PROGRESS
    assert "somebody has work, but the last 6 steps repeat for ever" in found.words


def test_a_lost_request_is_found_at_the_end() -> None:
    def never_ready(router: Router) -> None:
        router.add(0, 3, 2, schedulable=False)

    found = explore_world(world("lost", "", never_ready)).counterexample
    assert found is not None and found.proof is Proof.SLEEP
    assert "rank 0 has left over: 1 requests, request 1 without an end" in found.words


def test_a_counterexample_is_a_table_of_steps() -> None:
    def never_ready(router: Router) -> None:
        router.add(0, 3, 2)
        router.add(1, 3, 2, schedulable=False)

    found = explore_world(world("lost", "", never_ready)).counterexample
    assert found is not None
    head, *steps = found.table.splitlines()
    assert head.split("  ")[0] == "step" and "rank 0 hears, votes" in head and "rank 1 hears, votes" in head
    assert [step.split()[0] for step in steps] == [str(number) for number in range(len(steps))]
    assert "add 1 (3+2)" in found.table and "prefill compute" in found.table
    assert steps[-1].rstrip().endswith("idle sleep")


# ---- the command


def test_the_command_prints_states_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--world", "pauses-unified", "--world", "not-ready"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("2 worlds, ") and last.endswith(" states, no counterexample")


def test_the_command_lists_worlds_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(WORLDS)
    assert command.main(["--world", "best"]) == 2
    assert "no world named best" in capsys.readouterr().err


def test_the_command_fails_with_the_counterexample(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never_ready(router: Router) -> None:
        router.add(0, 3, 2, schedulable=False)

    worlds: dict[str, World] = {"lost": world("lost", "", never_ready)}
    monkeypatch.setattr(command, "standard_worlds", lambda: worlds)
    assert command.main([]) == 1
    out = capsys.readouterr().out
    assert "1 requests" in out and out.splitlines()[-1].endswith("1 with a counterexample")


# ---- what counts as the same


def scheduler(*requests: int, **config: Any) -> Scheduler:
    made = make_scheduler(EngineConfig(**{"block_size": 4, "prefix_cache": False} | config), 9, 32, [2])
    for request in requests:
        made.add(Add(1, request, [request] * 5, Sampling(3)))
    return made


def prefilled(*requests: int, **config: Any) -> Scheduler:
    made = scheduler(*requests, **config)
    made.facts()
    assert made.try_prefill()
    made.plan(StepType.PREFILL)
    made.batch()
    made.settle(np.full(len(requests), 50))
    return made


def print_of(thing: Any) -> bytes:
    return fingerprint(thing, PORTRAITS)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_order_of_free_blocks_counts_only_for_a_cache(prefix_cache: bool) -> None:
    """Blocks are only names, but a cache forgets what was longest unused."""
    one, other = prefilled(1, 2, prefix_cache=prefix_cache), prefilled(1, 2, prefix_cache=prefix_cache)
    assert print_of(one) == print_of(other), "whenever they arrived"
    for made, order in ((one, (1, 2)), (other, (2, 1))):
        for request in order:
            made.abort(request)
    assert (print_of(one) == print_of(other)) is not prefix_cache


@pytest.mark.parametrize(
    "change",
    [
        lambda scheduler: scheduler.abort(1),
        lambda scheduler: scheduler.pause("new"),
        lambda scheduler: setattr(scheduler, "wake", 7),
        lambda scheduler: setattr(scheduler, "wants_stop", True),
        lambda scheduler: scheduler.add(Add(1, 3, [1, 2], Sampling(3))),
        lambda scheduler: scheduler.ledgers.length.__setitem__(scheduler.running[0], 7),
        lambda scheduler: scheduler.resources.append(int(scheduler.running[0]), 1),
        lambda scheduler: scheduler._by_id[2].__setattr__("preemptions", 1),
        lambda scheduler: scheduler.plan(StepType.DECODE),
    ],
    ids=["abort", "pause", "wake", "stop", "add", "length", "block", "preemptions", "plan"],
)
def test_what_decides_something_counts(change: Any) -> None:
    changed = prefilled(1, 2)
    change(changed)
    assert print_of(changed) != print_of(prefilled(1, 2))


def test_which_things_are_the_same_one_counts() -> None:
    class Box:
        def __init__(self, *things: object) -> None:
            self.things = things

    shared = Box()
    assert fingerprint(Box(shared, shared), {}) != fingerprint(Box(Box(), Box()), {})
    assert fingerprint({1: 2, 3: 4}, {}) != fingerprint({3: 4, 1: 2}, {})
    assert fingerprint(np.zeros(2, np.int32), {}) != fingerprint(np.zeros(2, np.int64), {})
    with pytest.raises(TypeError, match="needs a portrait"):
        fingerprint(object(), {})


# ---- foresight

VOTES = [
    *[VoteConfig(**ADAPTIVE | {"saved_prefills": saved}) for saved in (1, 3)],
    *[
        VoteConfig(decision="cadence", all_interval=every, any_interval=any_, fast_path=fast)
        for every, any_, fast in product((1, 2, 3), (1, 3, 4), (False, True))
    ],
]
FACTS = [
    Facts(wants_prefill=wants, has_decode=decodes, unfinished=True, backlog=wants and backlog, running=running)
    for wants, decodes, backlog, running in product((False, True), (False, True), (False, True), (0, 99))
]


def tally(*ranks: Facts) -> Tally:
    ballots = np.zeros((len(ranks), BALLOT_SIZE), np.int32)
    for row, facts in zip(ballots, ranks, strict=True):
        write_ballot(row, Lockstep(*[0] * 9), facts)
    return Tally(ballots.min(axis=0))


TALLIES = [tally(*pair) for pair in product(FACTS, repeat=2)]


def reachable(config: VoteConfig, decode_steps: int) -> list[Clock]:
    """All clocks of the first steps, `step` aside."""
    seen, todo = set(), [Clock()]
    for clock in todo:
        if clock in seen or clock.decode_step > decode_steps:
            continue
        seen.add(clock)
        for some in TALLIES:
            after = clock.after(decide(some, clock, config), price(some, clock, config))
            todo.append(Clock(0, after.decode_step, after.owed))
    return sorted(seen, key=str)


@pytest.mark.parametrize("config", VOTES, ids=range(len(VOTES)))
def test_like_clocks_decide_alike_and_stay_alike(config: VoteConfig) -> None:
    for clock in reachable(config, 14):
        like = earliest_like(clock, config)
        for some in TALLIES:
            step_type = decide(some, clock, config)
            assert decide(some, like, config) is step_type
            after, after_like = (each.after(step_type, price(some, each, config)) for each in (clock, like))
            assert earliest_like(after, config) == earliest_like(after_like, config)


@pytest.mark.parametrize("config", VOTES, ids=range(len(VOTES)))
def test_the_longest_wait_is_what_it_says_and_no_more(config: VoteConfig) -> None:
    """The worst tallies that leave a wish without a prefill, for as long as there are any."""
    wishes = [some for some in TALLIES if some.any("wants_prefill")]

    def wait(clock: Clock) -> int:
        if all(decide(some, clock, config) is StepType.PREFILL for some in wishes):
            return 0
        return 1 + wait(clock.after(StepType.DECODE))

    assert max(wait(clock) for clock in reachable(config, 14)) == longest_wait(config)
