"""Who left the lockstep: turns a collective that failed into an error that names the ranks to blame."""

import re
from typing import Protocol

from vote.errors import LockstepBroken
from vote.recorder import Recorder
from vote.report import Report


class Reporter(Protocol):
    """Whoever can look at all ranks from outside."""

    def report(self, *, mismatch: bool) -> Report | None:
        """The one report of the gang's end, the same whoever asks. None: nobody can tell. `mismatch`: ballots differ,
        everybody has come."""
        ...


class Witness:
    """One rank's side: its own recorder, and the reporter it asks when something has failed. None: a gang of one, or a
    simulated one, whose errors then name nobody."""

    def __init__(self, recorder: Recorder, reporter: Reporter | None = None) -> None:
        self.recorder = recorder
        self._reporter = reporter

    def broken(self, step: int, what: str, error: Exception) -> LockstepBroken:
        """The error for a collective that failed or timed out here."""
        return self._error(step, what, _short(error), mismatch=False)

    def disagreement(self, step: int, fields: dict[str, tuple[int, int]]) -> LockstepBroken:
        """The error for a tally that does not prove lockstep. `fields`: field -> least and greatest value."""
        table = ", ".join(f"{name} from {low} to {high}" for name, (low, high) in fields.items())
        return self._error(step, "the ballot", f"ballots differ in {table}", mismatch=True)

    def _error(self, step: int, what: str, detail: str, *, mismatch: bool) -> LockstepBroken:
        report = self._reporter.report(mismatch=mismatch) if self._reporter is not None else None
        if report is None:
            return LockstepBroken(self.recorder.rank, step, what, {}, detail)
        detail = "" if report.culprits else detail
        found = report.step, report.what, report.culprits
        return LockstepBroken(self.recorder.rank, *found, detail, report.text, report.innocent)


def _short(error: Exception) -> str:
    """The library's message without its source locations and line breaks."""
    text = re.sub(r"\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", str(error))
    return " ".join(text.split())[:300]
