"""Failures in mid-load over real gloo processes: every rank that is left names the one that has gone, and tells the
same of it."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import zmq

from tests.multirank.failing_rank import SIZE, Case, Finding, run
from tests.multirank.gang import Gang
from vote.observers import ObserverKeys

pytestmark = pytest.mark.xdist_group("failures")  # its gangs wait most of the time: some at once

AT_ONCE = 4
PATIENCE_S = 3.0
LONG_S = 60.0  # where nobody's patience is needed
MARGIN_S = 5.0


@dataclass(frozen=True)
class Failure:
    """A case, and what is to be said of the rank. `patient`: it is found out by a time-out. `stack`: a line of it."""

    case: Case
    words: str
    patient: bool = False
    stack: str = ""


def failure(
    how: str, rank: int, words: str, stack: str = "", *,
    patient: bool = False, overlap: bool = False, control: str = "star",
) -> Failure:  # fmt: skip
    return Failure(Case(how, rank, PATIENCE_S if patient else LONG_S, overlap, control), words, patient, stack)


FAILURES = [
    failure("killed", 0, "is dead"),
    failure("killed", 1, "is dead", control="gloo"),
    failure("killed", 2, "is dead", overlap=True),
    failure("stopped", 0, "is stopped", "engine.py", patient=True),
    failure("stopped", 1, "is stopped", "engine.py", patient=True, overlap=True),
    failure("stopped", 2, "is stopped", "engine.py", patient=True, control="gloo"),
    failure("hangs", 0, "is in no collective", "oversleep (", patient=True),
    failure("hangs", 2, "is in no collective", "oversleep (", patient=True, control="gloo"),
    failure("hangs", 1, "is in no collective", "oversleep (", patient=True, overlap=True),
    failure("hangs in a step", 1, "is in no collective", "oversleep (", patient=True),
    failure("hangs in a step", 2, "is in no collective", "oversleep (", patient=True, overlap=True),
    failure("sleeps", 2, "sleeps since", "oversleep (", patient=True),
    failure("late", 1, "late to the first ballot", patient=True),
    failure("raises", 0, "failed: ValueError: no such thing"),
    failure("raises in a step", 1, "failed: ValueError: no such thing"),
    failure("raises in a step", 2, "failed: ValueError: no such thing", overlap=True),
    failure("raises", 2, "failed: ValueError: no such thing", control="gloo"),
    failure("settings", 1, "voted settings=99 where the others voted 0"),
    failure("decode_step", 2, "voted decode_step="),
    failure("collectives", 0, "voted collectives="),
]  # fmt: skip


def name_of(failure: Failure) -> str:
    case = failure.case
    return f"{case.how}-{case.rank}{'-overlap' * case.overlap}-{case.control}".replace(" ", "_")


def play(case: Case) -> list[Finding]:
    """What the ranks that are left have found."""
    public, secret = zmq.curve_keypair()
    with Gang() as gang:
        gang.start_all(run, SIZE, case, ObserverKeys(public.decode(), secret.decode()))
        return list(gang.results([rank for rank in range(SIZE) if rank != case.rank]).values())


@pytest.fixture(scope="module")
def played() -> Iterator[dict[Case, Future[list[Finding]]]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {failure.case: pool.submit(play, failure.case) for failure in FAILURES}


@pytest.mark.parametrize("failure", FAILURES, ids=name_of)
def test_the_rank_that_left_is_named_by_all_others(failure: Failure, played: dict[Case, Future[list[Finding]]]) -> None:
    findings = played[failure.case].result()
    for finding in findings:
        assert list(finding.culprits) == [failure.case.rank], finding
        assert failure.words in finding.culprits[failure.case.rank]
        assert finding.text.startswith(f"lockstep broken at step {finding.step} in the ")
        assert failure.words in finding.text
        assert finding.after_s < MARGIN_S + PATIENCE_S * failure.patient
    assert len({finding.report for finding in findings}) == 1


@pytest.mark.parametrize("failure", FAILURES, ids=name_of)
def test_the_report_tells_what_every_rank_did_last(failure: Failure, played: dict[Case, Future[list[Finding]]]) -> None:
    report = played[failure.case].result()[0].report
    for rank in range(SIZE):
        mark = ">" if rank == failure.case.rank else " "
        assert f"\n{mark} rank {rank}: pid " in report
    assert report.count("last control: ") == report.count("last data: ") == SIZE
    assert min(report.count(kind) for kind in ("first ballot", "dispatch", "combine")) >= SIZE
    assert failure.stack in report
