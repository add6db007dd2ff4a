"""Who is blamed for what is seen of the ranks, as tables."""

from collections.abc import Mapping
from typing import Any

import pytest

from vote.report import Entry, Sighting, compose, culprits, examine

NOW = 1000.0
BALLOT = {"step": 7, "decode_step": 3}


def ballot(ordinal: int = 20, entered: float = 990.0, left: float | None = None, kind: str = "first ballot") -> Entry:
    return Entry(kind, 7, ordinal, 0, entered, left)


def dispatch(ordinal: int = 400, entered: float = 990.0, left: float | None = None) -> Entry:
    return Entry("dispatch", 7, ordinal, 16, entered, left)


def seen(rank: int, *entries: Entry, **facts: Any) -> Sighting:
    kinds = ("first ballot", "second ballot", "sleep")
    known: dict[str, Any] = {"state": "running", "words": "", "ballot": BALLOT, "taken_at": NOW, **facts}
    return Sighting(
        rank=rank,
        pid=100 + rank,
        host="here",
        control=[entry for entry in entries if entry.kind in kinds],
        data=[entry for entry in entries if entry.kind not in kinds],
        **known,
    )


BEFORE = ballot(19, 980.0, 981.0)
WAITS = (BEFORE, ballot())
DONE = dispatch(400, 985.0, 986.0)

CASES: dict[str, tuple[Mapping[int, Sighting | None], bool, dict[int, str]]] = {
    "killed": ({0: seen(0, *WAITS), 1: seen(1, *WAITS, state="dead")}, False, {1: "is dead: its process (pid 101)"}),
    "stopped": ({0: seen(0, *WAITS), 1: seen(1, BEFORE, state="stopped")}, False, {1: "hangs: its process (pid 101)"}),
    "stopped in the same collective": (
        {0: seen(0, *WAITS), 1: seen(1, *WAITS, state="stopped")},
        False, {1: "in the first ballot number 20 of step 7"},
    ),
    "host lost": ({0: seen(0, *WAITS), 1: None, 2: seen(2, *WAITS)}, False, {1: "is out of reach"}),
    "failed": (
        {0: seen(0, *WAITS), 1: seen(1, BEFORE, words="ValueError: no"), 2: seen(2, *WAITS)},
        False, {1: "failed: ValueError: no"},
    ),
    "failed, and another is dead of it": (
        {0: seen(0, *WAITS, state="dead"), 1: seen(1, BEFORE, words="OSError: x")}, False, {1: "failed: OSError: x"},
    ),
    "hangs in Python": (
        {0: seen(0, *WAITS), 1: seen(1, BEFORE), 2: seen(2, *WAITS)},
        False, {1: "is in no collective, last seen after the first ballot number 19 of step 7, 19.0 s ago"},
    ),
    "hangs between two data collectives": (
        {0: seen(0, BEFORE, dispatch()), 1: seen(1, BEFORE, DONE, Entry("experts", 7, 0, 9, 987.0))},
        False, {1: "in the experts of step 7 since 00:16:27.000 UTC (13.0 s)"},
    ),
    "sleeps alone": (
        {0: seen(0, *WAITS), 1: seen(1, BEFORE, Entry("sleep", 7, 0, 0, 982.0))},
        False, {1: "sleeps since 00:16:22.000"},
    ),
    "never came": ({0: seen(0, ballot(1)), 1: seen(1)}, False, {1: "has not come to its first vote"}),
    "in another collective than most": (
        {0: seen(0, BEFORE, dispatch()), 1: seen(1, *WAITS, DONE), 2: seen(2, BEFORE, dispatch())},
        False, {1: "is elsewhere: in the first ballot number 20"},
    ),
    "one behind, no majority": (
        {0: seen(0, BEFORE, dispatch(401)), 1: seen(1, BEFORE, dispatch(400))},
        False, {1: "is elsewhere: in the dispatch number 400"},
    ),
    "late": (
        {0: seen(0, *WAITS), 1: seen(1, BEFORE, ballot(entered=998.5)), 2: seen(2, *WAITS)},
        False, {1: "came 8.5 s late to the first ballot"},
    ),
    "all in the same place": ({0: seen(0, *WAITS), 1: seen(1, *WAITS)}, False, {}),
    "votes otherwise than most": (
        {rank: seen(rank, *WAITS, ballot=BALLOT | ({"decode_step": 0} if rank == 2 else {})) for rank in range(3)},
        True, {2: "voted decode_step=0 where the others voted 3"},
    ),
    "votes differ, no majority": (
        {0: seen(0, *WAITS), 1: seen(1, *WAITS, ballot=BALLOT | {"step": 8})},
        True, {0: "voted step=7", 1: "voted step=8"},
    ),
    "votes differ, and one is stopped": (
        {0: seen(0, *WAITS), 1: seen(1, *WAITS, ballot=BALLOT | {"step": 8}), 2: seen(2, *WAITS, state="stopped")},
        True, {2: "hangs"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "mismatch", "blamed"), CASES.values(), ids=CASES)
def test_who_is_blamed(ranks: Mapping[int, Sighting | None], mismatch: bool, blamed: dict[int, str]) -> None:
    found = culprits(ranks, mismatch=mismatch)
    assert found.keys() == blamed.keys()
    for rank, words in blamed.items():
        assert words in found[rank]


def test_a_report_says_where_the_others_are_and_what_all_did_last() -> None:
    stack = 'Thread 101 (idle): "MainThread"\n    load (model.py:7)'
    before = [ballot(n, 970.0 + n, 970.5 + n) for n in range(1, 13)]
    report = compose({0: seen(0, *before, dispatch()), 1: seen(1, *before, DONE, state="stopped", stack=stack)})
    assert (list(report.culprits), report.step, report.what) == ([1], 7, "the dispatch")
    title, *lines = report.text.splitlines()
    assert title.startswith("lockstep broken at step 7 in the dispatch: rank 1 hangs")
    assert "  rank 0: pid 100 on here, running, waits in the dispatch number 400 of step 7" in report.text
    assert "> rank 1: pid 101 on here, stopped, after the dispatch number 400 of step 7, 14.0 s ago" in report.text
    assert report.text.count("first ballot#12 of step 7 (500.00 ms)") == 2
    assert "first ballot#2 " not in report.text and "first ballot#3 " in report.text  # the last ten
    assert "          load (model.py:7)" in lines
    assert max(map(len, lines)) <= 120


def test_a_report_of_ranks_that_nobody_can_tell_apart() -> None:
    report = compose({0: seen(0, *WAITS), 1: seen(1, *WAITS)})
    assert report.culprits == {}
    assert report.text.startswith("lockstep broken at step 7 in the first ballot: no rank could be singled out")


NAP = Entry("sleep", 7, 0, 0, 995.0)
ASLEEP = {rank: seen(rank, BEFORE, NAP) for rank in range(2)}
LATER = ballot(21, 999.0)
WAITING = {rank: seen(rank, *WAITS) for rank in range(2)}
ONE_OUT = {0: seen(0, *WAITS), 1: seen(1, BEFORE)}


@pytest.mark.parametrize(
    ("before", "now", "blamed", "title"),
    [
        (WAITING, {0: seen(0, LATER), 1: seen(1, LATER)}, [], "2 ranks in lockstep at step 7"),
        (ONE_OUT, {0: seen(0, LATER), 1: seen(1, BEFORE)}, [], "2 ranks in lockstep"),
        (ONE_OUT, ONE_OUT, [1], "out of lockstep: rank 1 is in no collective"),
        (ASLEEP, ASLEEP, [], "2 ranks asleep: nobody has work"),
        (ASLEEP, ASLEEP | {1: seen(1, BEFORE, NAP, state="stopped")}, [1], "out of lockstep: rank 1 hangs"),
        ({0: seen(0, *WAITS)}, {0: seen(0, *WAITS)}, [], "1 rank at step 7: all wait in the same collective"),
    ],
    ids=["moves", "one moves", "stuck", "asleep", "stopped while asleep", "cannot tell"],
)  # fmt: skip
def test_two_looks_at_a_gang(
    before: Mapping[int, Sighting | None], now: Mapping[int, Sighting | None], blamed: list[int], title: str
) -> None:
    report = examine(before, now)
    assert list(report.culprits) == blamed
    assert report.text.startswith(title)
    assert ("last control" in report.text) == (bool(blamed) or "cannot" in title or "all wait" in title)


def test_ranks_that_keep_no_step_are_not_held_against_each_other() -> None:
    """A dense model's: one computes, one sleeps, and that is all there is to it."""
    alone: dict[str, Any] = {"voters": 1}
    asleep = Entry("sleep", 7, 0, 0, 982.0)
    now = {0: seen(0, BEFORE, ballot(), **alone), 1: seen(1, BEFORE, asleep, **alone)}
    assert culprits(now) == {} == examine(now, now).culprits
    assert examine({}, now).text.startswith("2 ranks, each at steps of its own: the model has no experts")
    stopped = now | {1: seen(1, BEFORE, state="stopped", **alone)}
    assert list(culprits(stopped)) == list(examine(stopped, stopped).culprits) == [1]
