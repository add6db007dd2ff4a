"""Who left the lockstep: each rank leaves a mark in the gang's store before every vote, and last words when it fails.

A mark is one small asynchronous write (2 µs) to a server thread of rank 0, so it needs no collective and can be read
while ranks hang. Nothing is read before something has failed.
"""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from vote.ballot import BallotKind
from vote.errors import LockstepBroken

STORE_TIMEOUT_S = 2.0  # beyond the grace


@dataclass(frozen=True, order=True, slots=True)
class Mark:
    """A rank's last known place: `running` after the first ballot's result is in."""

    step: int
    kind: int
    running: bool = False

    def encode(self) -> str:
        return f"{self.step},{self.kind},{int(self.running)}"

    @staticmethod
    def decode(text: str) -> "Mark":
        step, kind, running = text.split(",")
        return Mark(int(step), int(kind), running == "1")

    def __str__(self) -> str:
        where = "after" if self.running else "in"
        return f"{where} the {BallotKind(self.kind).name.lower()} ballot of step {self.step}"


class Witness:
    """One rank's pen and its reading glasses. `grace_s`: how long the others get to leave their last words."""

    def __init__(self, store: dist.Store | None, rank: int, size: int, grace_s: float = 2.0) -> None:
        self._store = store if size > 1 else None
        self.rank = rank
        self.size = size
        self._grace_s = grace_s

    def at(self, mark: Mark) -> None:
        """Leave a mark. Raises RuntimeError when rank 0 is gone."""
        if self._store is not None:
            self._store.set(f"mark/{self.rank}", mark.encode())

    def last_words(self, text: str) -> None:
        """Tell the others why this rank ends, as well as that still works."""
        if self._store is not None:
            try:
                self._store.set(f"last_words/{self.rank}", text[:2000])
            except RuntimeError:
                return  # rank 0 is gone; so is the reader

    def broken(self, mark: Mark, what: str, error: Exception) -> LockstepBroken:
        """The error for a collective that failed or timed out here, naming the ranks that left."""
        detail = _short(error)
        if self._store is None:
            return LockstepBroken(self.rank, mark.step, what, {}, detail)
        self.last_words(f"waits: {mark} in {what}")
        try:
            culprits = self._ask(self._culprits)
        except RuntimeError:
            culprits = {0: "does not answer (it keeps the gang's store)"}
        return LockstepBroken(self.rank, mark.step, what, culprits, detail)

    def disagreement(self, mark: Mark, fields: dict[str, tuple[int, int]], own: dict[str, int]) -> LockstepBroken:
        """The error for a tally that does not prove lockstep. `fields`: field -> least and greatest value."""
        table = ", ".join(f"{name} from {low} to {high}" for name, (low, high) in fields.items())
        error = f"ballots differ in {table}"
        if self._store is None:
            return LockstepBroken(self.rank, mark.step, "the ballot", {}, error)
        words = ", ".join(f"{name}={own[name]}" for name in fields)
        self.last_words(f"voted: {words}")
        try:
            words_by_rank = self._ask(self._wait_for_words)
            votes = {rank: text for rank, text in words_by_rank.items() if text.startswith("voted: ")}
        except RuntimeError:
            votes = {}
        return LockstepBroken(self.rank, mark.step, "the ballot", _minority(votes), error)

    def _ask(self, question: Callable[[], dict[int, str]]) -> dict[int, str]:
        """Answer a question from the store. Raises RuntimeError when the store is gone or does not answer in time.

        Asked from a thread that is left behind if need be: rank 0, which keeps the store, may be what hangs, and then
        the store's client blocks for ever, whatever time-out it is given.
        """
        answers: list[dict[int, str] | RuntimeError] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                answers.append(error)

        thread = threading.Thread(target=ask, name="witness", daemon=True)
        thread.start()
        thread.join(self._grace_s + STORE_TIMEOUT_S)
        if not answers:
            raise RuntimeError("the gang's store does not answer")
        if isinstance(answers[0], RuntimeError):
            raise answers[0]
        return answers[0]

    def _culprits(self) -> dict[int, str]:
        """Ranks with a failure of their own first; else those that say nothing; else those furthest behind."""
        words = self._wait_for_words()
        failed = {rank: f"failed: {text}" for rank, text in words.items() if not text.startswith("waits: ")}
        if failed:
            return failed
        silent = [rank for rank in range(self.size) if rank not in words]
        marks = {rank: self._mark(rank) for rank in range(self.size)}
        if silent:
            return {rank: f"is dead or hangs; last seen {marks[rank] or 'before its first vote'}" for rank in silent}
        known = {rank: mark for rank, mark in marks.items() if mark is not None}
        if len(set(known.values())) < 2:
            return {}
        furthest = max(known.values())
        return {rank: f"is behind, {mark}" for rank, mark in known.items() if mark != furthest}

    def _wait_for_words(self) -> dict[int, str]:
        assert self._store is not None
        deadline = time.monotonic() + self._grace_s
        while True:
            there = [rank for rank in range(self.size) if self._store.check([f"last_words/{rank}"])]
            if len(there) == self.size or time.monotonic() > deadline:
                return {rank: self._store.get(f"last_words/{rank}").decode() for rank in there}
            time.sleep(0.02)

    def _mark(self, rank: int) -> Mark | None:
        assert self._store is not None
        key = f"mark/{rank}"
        return Mark.decode(self._store.get(key).decode()) if self._store.check([key]) else None


def _minority(votes: dict[int, str]) -> dict[int, str]:
    """The ranks whose vote is not the most frequent one; all of them when there is no majority."""
    if not votes:
        return {}
    texts = list(votes.values())
    usual = max(set(texts), key=texts.count)
    if texts.count(usual) * 2 <= len(texts):
        return votes
    return {rank: text for rank, text in votes.items() if text != usual}


def _short(error: Exception) -> str:
    """The library's message without its source locations and line breaks."""
    text = re.sub(r"\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", str(error))
    return " ".join(text.split())[:300]
