"""What two looks at a gang, a control time-out apart, say of it."""

from typing import Any

import pytest

from launcher.watch import TELL_S, Look, alarm, patience
from tests.unit.test_report import BEFORE, WAITS, Entry, seen

SLEEP = Entry("sleep", 7, 0, 0, 982.0)
WORKS = Entry("DECODE", 7, 0, 4, 990.0)
LATER = Entry("first ballot", 8, 21, 0, 996.0)


def look(at: float, *ranks: Any, owed: int = 0) -> Look:
    return Look(at, dict(enumerate(ranks)), owed)


@pytest.mark.parametrize(
    ("before", "now", "culprits", "innocent", "words"),
    [
        ((seen(0, SLEEP), None), (seen(0, SLEEP), None), {1}, True, "rank 1 is out of reach"),
        ((seen(0, SLEEP), seen(1, SLEEP, state="stopped")),) * 2 + ({1}, True, "rank 1 hangs: its process"),
        ((seen(0, SLEEP), seen(1, SLEEP, state="dead")),) * 2 + ({1}, False, "rank 1 is dead"),
        ((seen(0, *WAITS), seen(1, BEFORE)),) * 2 + ({1}, False, "rank 1 is in no collective"),
        ((seen(0, BEFORE, WORKS),),) * 2 + ({0}, False, "rank 0 hangs: it has done nothing for 30 s"),
    ],
    ids=["unreachable", "stopped in its sleep", "dead", "hangs in Python", "a gang of one hangs"],
)
def test_alarm(before: Any, now: Any, culprits: set[int], innocent: bool, words: str) -> None:
    death = alarm(look(0, *before), look(30, *now))
    assert death is not None
    assert (death.culprits, death.innocent) == (culprits, innocent)
    assert death.reason.startswith(words)


@pytest.mark.parametrize(
    ("before", "now", "owed"),
    [
        ((seen(0, *WAITS),), (seen(0, *WAITS, LATER),), 3),
        ((seen(0, SLEEP), seen(1, SLEEP)), (seen(0, SLEEP), seen(1, SLEEP)), 0),
        ((seen(0, SLEEP), seen(1, SLEEP)), (seen(0, SLEEP), None), 0),
        ((None, seen(1, SLEEP)), (seen(0, SLEEP), None), 0),
        ((seen(0, SLEEP),), (seen(0, LATER, Entry("sleep", 8, 0, 0, 997.0)),), 1),
    ],
    ids=["votes", "a long sleep is no death", "not for long enough", "another one each time", "slept again"],
)
def test_no_alarm(before: Any, now: Any, owed: int) -> None:
    assert alarm(look(0, *before, owed=owed), look(30, *now, owed=owed)) is None


def test_all_sleep_although_there_is_work() -> None:
    ranks = seen(0, SLEEP), seen(1, SLEEP)
    death = alarm(look(0, *ranks, owed=2), look(30, *ranks, owed=3))
    assert death is not None and death.innocent
    assert death.reason == "all ranks sleep although they have 3 requests to compute: messages were lost"
    assert alarm(look(0, *ranks, owed=0), look(30, *ranks, owed=3)) is None


def test_ranks_that_are_awake_may_tell_it_themselves() -> None:
    stopped = seen(1, SLEEP, state="stopped")
    assert patience(4, {0: seen(0, SLEEP), 1: stopped, 2: None}) == 4
    assert patience(4, {0: seen(0, *WAITS), 1: stopped}) == 4 + TELL_S
