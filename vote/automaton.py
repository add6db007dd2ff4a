"""One rank as the explorer sees it: real code that is only run where it has not been before.

What a rank does in a step follows from its state and from what it is told where it meets the others. So one run is
enough for each state and each sequence of answers, however many states of the whole gang they occur in.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from greenlet import getcurrent, greenlet

from vote.ballot import Facts
from vote.protocol import Agreement
from vote.simulated import Meetings


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank before or after its look into the inbox. Equal keys: the same future. Its subject can bring it back."""

    key: bytes
    asleep: bool = False
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rank did in a step.

    facts: its first ballot; served: it got what it wanted a prefill for (or told that this
    has ended); could_work: it has something it could do now, whatever
    it votes; counts: of everything that has to be the same on all ranks after each step.
    """

    facts: Facts
    agreement: Agreement
    served: bool
    could_work: bool
    counts: Hashable


class Subject(Protocol):
    """A rank's real code, thawed for every piece of its way. It has to be deterministic."""

    rank: int

    def begin(self) -> Snapshot:
        """Before anything has happened."""
        ...

    def receive(self, snapshot: Snapshot, messages: Sequence[Any]) -> Snapshot:
        """After one look into an inbox that holds these messages."""
        ...

    def step(self, snapshot: Snapshot, meetings: Meetings) -> tuple[Snapshot, Turn]:
        """One vote and all that follows from it."""
        ...

    def left_over(self, snapshot: Snapshot) -> str:
        """What is not as it should be after the last message has been dealt with; empty if all is well."""
        ...


@dataclass(slots=True)
class Place:
    """A rank in the middle of a step waits for the others. `then`: what follows, by the mark of the answer."""

    name: Hashable
    value: Any
    then: dict[Hashable, "Place | Done"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a step: the rank's state, and what it did; or its error."""

    state: int = -1
    turn: Turn | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class State:
    """A rank that has taken in the first `position` messages of its inbox."""

    snapshot: Snapshot
    position: int


class Automaton:
    """Owns all that is known of one rank: its states by number, and what messages and steps make of them."""

    def __init__(self, subject: Subject, size: int, inbox: Sequence[Any]) -> None:
        self.subject = subject
        self.inbox = inbox
        self.states: list[State] = []
        self.size = size
        self._numbers: dict[Hashable, int] = {}
        self._received: dict[int, list[int]] = {}
        self._steps: dict[int, Place | Done] = {}
        self.start = self.number(subject.begin(), 0)

    def number(self, snapshot: Snapshot, position: int) -> int:
        state = State(snapshot, position)
        number = self._numbers.setdefault((snapshot.key, position, snapshot.asleep), len(self.states))
        if number == len(self.states):
            self.states.append(state)
        return number

    def after_look(self, number: int) -> list[int]:
        """The states that looking into the inbox may lead to: any number of messages may have arrived, but none, or one
        more, if the rank is asleep."""
        if (known := self._received.get(number)) is not None:
            return known
        state = self.states[number]
        reached = []
        for end in range(state.position + state.snapshot.asleep, len(self.inbox) + 1):
            snapshot = self.subject.receive(state.snapshot, self.inbox[state.position : end])
            reached.append(self.number(snapshot, end))
        self._received[number] = reached
        return reached

    def walk(self, number: int) -> "Walk":
        """The way of a rank in this state through a step."""
        walk = Walk(self, number)
        walk.at = self._steps.get(number) or self._steps.setdefault(number, walk.run(None))
        return walk


class Walk:
    """One rank on its way through a step: on known ways without its code, beyond them with it."""

    at: Place | Done

    def __init__(self, automaton: Automaton, number: int) -> None:
        self.size = automaton.size
        self._automaton = automaton
        self._number = number
        self._answers: list[list[Any]] = []
        self._code: greenlet | None = None
        self._hub = getcurrent()

    def go_on(self, answer: list[Any], mark: Hashable) -> None:
        """Everybody has come to the place: what follows from `answer_at` it."""
        assert isinstance(self.at, Place)
        following = self.at.then.get(mark)
        if following is None:
            following = self.at.then[mark] = self.run(answer)
        self._answers.append(answer)
        self.at = following

    def run(self, answer: list[Any] | None) -> Place | Done:
        """Let the code run, up to here and on to the next place."""
        if self._code is None:
            self._code = greenlet(self._main)
            for earlier in [None, *self._answers] if answer is not None else []:
                self._code.switch(earlier)
        return self._code.switch(answer)

    def meet(self, rank: int, place: Hashable, value: Any) -> list[Any]:
        del rank
        return self._hub.switch(Place(place, value))

    def _main(self, answer: None) -> Done:
        del answer  # nothing was asked yet
        automaton = self._automaton
        before = automaton.states[self._number]
        try:
            snapshot, turn = automaton.subject.step(before.snapshot, self)
        except Exception as error:
            return Done(error=error)
        return Done(automaton.number(snapshot, before.position), turn)


def answer_at(places: Sequence[Place]) -> tuple[list[Any], Hashable]:
    """What a meeting gives to each rank, and a mark that tells it from other answers.

    Vectors are there to be reduced by MIN (or, if a rank has gone wrong, by MAX), so their least and greatest elements
    stand for all of them: whoever reduces these two gets what the whole list would have given.
    """
    values = [place.value for place in places]
    if not isinstance(values[0], np.ndarray):
        return values, tuple(values)
    answer = [np.minimum.reduce(values), np.maximum.reduce(values)]
    return answer, (answer[0].tobytes(), answer[1].tobytes())
