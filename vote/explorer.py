"""The explorer: every way a small gang can go, looked at for what must never happen.

Ranks are real code (`vote.automaton`). All that chance can do to a gang in lockstep is when messages arrive: before
each vote every rank has taken in some part, any part, of what was sent to it. The explorer tries all combinations,
breadth first, so that a counterexample is as short as any. A node is what lies between the ranks' look into their
inboxes and their vote; its step is run once, whichever way led there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any

from vote.automaton import Automaton, Done, Place, State, Subject, Turn, answer_at
from vote.errors import LockstepBroken

Node = tuple[int, ...]  # a state number per rank
Queues = Sequence[Sequence[Any]]
Describe = Callable[[Any], str]


class Proof(Enum):
    """What is shown, or, in a counterexample, what showed the fault."""

    LOCKSTEP = "all ranks enter the same collectives and come to equal agreements"
    PROGRESS = "whoever has work gets on: nobody waits for a rank that nothing will wake, no circle leads nowhere"
    WAIT = "a rank that wants a prefill takes part in one within the stated number of steps"
    SLEEP = "the gang sleeps when, and only when, nobody can do anything; in the end everything is done"
    TALLY = "a tally proves that all its ballots belong together"
    CODE = "no rank fails by itself"


@dataclass(frozen=True, slots=True)
class Event:
    """Something the router does: the messages that each rank gets of it, in order."""

    words: str
    messages: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Counterexample:
    """`table`: the steps that led there, for people."""

    proof: Proof
    words: str
    table: str

    def __str__(self) -> str:
        return f"not true that {self.proof.value}:\n{self.words}\n{self.table}"


@dataclass(frozen=True, slots=True)
class Exploration:
    """states: of the whole gang before a vote; transitions: ways between them; rank_states: of single ranks; waited:
    most steps that a rank waited for a prefill."""

    states: int
    transitions: int
    rank_states: int
    waited: int
    counterexample: Counterexample | None = None


class _Found(Exception):
    def __init__(self, proof: Proof, words: str, path: list[Node]) -> None:
        super().__init__(words)
        self.proof, self.words, self.path = proof, words, path


def explore(
    subjects: Sequence[Subject], events: Sequence[Event], longest_wait: int | None, describe: Describe = str
) -> Exploration:
    """Explore a gang to which a router sends these events. `longest_wait`: for a prefill, in steps (None: no limit);
    `describe`: a message in a word or two."""
    return _Search(subjects, events, longest_wait, describe).run()


class _Search:
    def __init__(
        self, subjects: Sequence[Subject], events: Sequence[Event], longest_wait: int | None, describe: Describe
    ) -> None:
        size = len(subjects)
        inboxes = [[message for event in events for message in event.messages[rank]] for rank in range(size)]
        self.automata = [Automaton(*pair) for pair in zip(subjects, [size] * size, inboxes, strict=True)]
        self.heard = [_events_by_position(events, rank) for rank in range(size)]
        self.longest_wait = longest_wait
        self.describe = describe
        self.transitions = 0
        self.waited = 0
        self.came_from: dict[Node, Node | None] = {}
        self.after: dict[Node, Node] = {}
        self.unfinished: set[Node] = set()  # somebody voted so
        self.waiting: list[set[Node]] = [set() for _ in subjects]  # by rank: it wanted a prefill and had none

    def run(self) -> Exploration:
        found = None
        try:
            self._search()
            self._no_circles()
            for rank in range(len(self.automata)):
                self._no_long_waits(rank)
        except _Found as error:
            found = Counterexample(error.proof, error.words, self._table(error.path))
        rank_states = sum(len(automaton.states) for automaton in self.automata)
        return Exploration(len(self.came_from), self.transitions, rank_states, self.waited, found)

    # ---- all nodes

    def _search(self) -> None:
        todo: list[Node] = []
        for node in self._looks(tuple(automaton.start for automaton in self.automata)):
            self.came_from[node] = None
            todo.append(node)
        for node in todo:
            for following in self._step(node):
                self.transitions += 1
                if following not in self.came_from:
                    self.came_from[following] = node
                    todo.append(following)

    def _step(self, node: Node) -> Iterator[Node]:
        turns, after = self._turns(node)
        self._note(node, turns)
        self.after[node] = after
        states = self._states(after)
        self._same_for_all(node, turns, states)
        if states[0].snapshot.stopped:
            return iter(())
        if states[0].snapshot.asleep:
            self._may_sleep(node, turns, states)
        return self._looks(after)

    def _looks(self, node: Node) -> Iterator[Node]:
        """All that may be after the ranks have looked into their inboxes; nothing if one cannot wake up any more."""
        return product(*[automaton.after_look(state) for automaton, state in zip(self.automata, node, strict=True)])

    def _turns(self, node: Node) -> tuple[list[Turn], Node]:
        done = self._meet_to_the_end(node)
        errors = {rank: end.error for rank, end in enumerate(done) if end.error is not None}
        if errors:
            proof = Proof.TALLY if all(isinstance(error, LockstepBroken) for error in errors.values()) else Proof.CODE
            words = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items())
            raise self._found(proof, words, node)
        return [end.turn for end in done if end.turn is not None], tuple(end.state for end in done)

    def _meet_to_the_end(self, node: Node) -> list[Done]:
        walks = [automaton.walk(state) for automaton, state in zip(self.automata, node, strict=True)]
        while True:
            places = [walk.at for walk in walks if isinstance(walk.at, Place)]
            ends = [walk.at for walk in walks if isinstance(walk.at, Done)]
            if not places or any(end.error is not None and not isinstance(end.error, LockstepBroken) for end in ends):
                return ends
            if ends or len({place.name for place in places}) > 1:
                where = [walk.at.name if isinstance(walk.at, Place) else "the end of its step" for walk in walks]
                raise self._found(Proof.LOCKSTEP, _by_rank("is at {}", where), node)
            answer, mark = answer_at(places)
            for walk in walks:
                walk.go_on(answer, mark)

    def _note(self, node: Node, turns: list[Turn]) -> None:
        if any(turn.facts.unfinished for turn in turns):
            self.unfinished.add(node)
        for turn, waiting in zip(turns, self.waiting, strict=True):
            if turn.facts.wants_prefill and not turn.served and not turn.agreement.stop:
                waiting.add(node)

    # ---- what has to hold after each step

    def _same_for_all(self, node: Node, turns: list[Turn], states: list[State]) -> None:
        for what, values in (
            ("agreed on {}", [turn.agreement for turn in turns]),
            ("counts {}", [turn.counts for turn in turns]),
            ("has stopped: {}", [state.snapshot.stopped for state in states]),
        ):
            if any(value != values[0] for value in values):
                raise self._found(Proof.LOCKSTEP, _by_rank(what, values), node)
        asleep = [state.snapshot.asleep for state in states]
        if any(asleep) and not all(asleep):
            raise self._found(Proof.SLEEP, _by_rank("sleeps: {}", asleep), node)

    def _may_sleep(self, node: Node, turns: list[Turn], states: list[State]) -> None:
        able = [turn.could_work for turn in turns]
        if any(able):
            raise self._found(Proof.SLEEP, "the gang sleeps; " + _by_rank("could work: {}", able), node)
        left = [len(automaton.inbox) - state.position for automaton, state in zip(self.automata, states, strict=True)]
        if any(left) and not all(left):
            words = _by_rank("sleeps, {} messages on their way to it", left)
            raise self._found(Proof.PROGRESS, f"whoever wakes up waits for ever: {words}", node)
        if not any(left):
            faults = [a.subject.left_over(state.snapshot) for a, state in zip(self.automata, states, strict=True)]
            if any(faults):
                raise self._found(Proof.SLEEP, "at the end " + _by_rank("has left over: {}", faults), node)

    # ---- what has to hold on all ways

    def _no_circles(self) -> None:
        """A gang to which nothing is delivered takes one way only; it must not lead back. Only a gang without work may
        turn in circles, to wait for a message that not all have got yet."""
        safe: set[Node] = set()
        for start in self.after:
            way: dict[Node, int] = {}
            node: Node | None = start
            while node is not None and node not in safe and node not in way:
                way[node] = len(way)
                node = self._undisturbed(node)
            if node is not None and node in way:
                self._judge_circle(list(way)[way[node] :])
            safe.update(way)

    def _undisturbed(self, node: Node) -> Node | None:
        states = self._states(after := self.after[node])
        if any(state.snapshot.asleep or state.snapshot.stopped for state in states):
            return None
        return tuple(a.after_look(state)[0] for a, state in zip(self.automata, after, strict=True))

    def _judge_circle(self, circle: list[Node]) -> None:
        first = min(circle, key=lambda node: len(self._path(node)))
        start = circle.index(first)
        rest = [*circle[start + 1 :], *circle[: start + 1]]
        heard = {heard[state.position] for heard, state in zip(self.heard, self._states(first), strict=True)}
        if not self.unfinished.isdisjoint(circle):
            words = f"somebody has work, but the last {len(circle)} steps repeat for ever"
            raise _Found(Proof.PROGRESS, words, [*self._path(first), *rest])
        if len(heard) == 1 and None not in heard:
            words = f"nobody has work and all messages have come, but the last {len(circle)} steps repeat for ever"
            raise _Found(Proof.SLEEP, words, [*self._path(first), *rest])

    def _no_long_waits(self, rank: int) -> None:
        """The longest run of nodes in which the rank wants a prefill and has none. There are no circles."""
        waiting = self.waiting[rank]
        longest: dict[Node, tuple[int, Node | None]] = {}
        for start in waiting:
            todo = [start]
            while todo:
                node = todo[-1]
                following = [other for other in self._looks(self.after[node]) if other in waiting]
                if missing := [other for other in following if other not in longest]:
                    todo += missing
                    continue
                steps, best = max(((longest[other][0], other) for other in following), default=(0, None))
                longest[todo.pop()] = steps + 1, best
        steps, first = max(((steps, node) for node, (steps, _) in longest.items()), default=(0, None))
        self.waited = max(self.waited, steps)
        if self.longest_wait is not None and steps > self.longest_wait and first is not None:
            path = self._path(first)
            while (after := longest[path[-1]][1]) is not None:
                path.append(after)
            words = f"rank {rank} wanted a prefill in {steps} steps on end, {self.longest_wait} are allowed"
            raise _Found(Proof.WAIT, words, path)

    # ---- counterexamples

    def _states(self, node: Node) -> list[State]:
        return [automaton.states[number] for automaton, number in zip(self.automata, node, strict=True)]

    def _found(self, proof: Proof, words: str, node: Node) -> _Found:
        return _Found(proof, words, self._path(node))

    def _path(self, node: Node) -> list[Node]:
        path = [node]
        while (before := self.came_from[path[0]]) is not None:
            path.insert(0, before)
        return path

    def _table(self, path: list[Node]) -> str:
        rows = [["step", *[f"rank {rank} hears, votes" for rank in range(len(self.automata))], "then"]]
        positions = [0] * len(self.automata)
        for number, node in enumerate(path):
            states = self._states(node)
            try:
                turns, end = self._turns(node)[0], ""
            except _Found as error:
                turns, end = [], error.words if len(error.words) < 60 else "broken"
            cells = []
            for rank, (automaton, state) in enumerate(zip(self.automata, states, strict=True)):
                heard = automaton.inbox[positions[rank] : state.position]
                said = " ".join(name for name in _said(turns[rank])) if turns else ""
                cells.append(f"{', '.join(map(self.describe, heard)) or '-'} | {said or '-'}")
            positions = [state.position for state in states]
            rows.append([str(number), *cells, _agreed(turns[0]) if turns else end])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _events_by_position(events: Sequence[Event], rank: int) -> list[int | None]:
    """How many events a rank has heard of in full after so many messages; None in the middle of one."""
    heard: list[int | None] = [0]
    for number, event in enumerate(events, 1):
        heard += [*[None] * (len(event.messages[rank]) - 1), number]
    return heard


def _said(turn: Turn) -> list[str]:
    names = ("wants_prefill", "has_decode", "unfinished", "wants_stop", "scheduled")
    return [name for name in names if getattr(turn.facts, name)]


def _agreed(turn: Turn) -> str:
    agreement = turn.agreement
    marks = [name for name in ("compute", "sleep", "stop") if getattr(agreement, name)]
    return " ".join([agreement.step_type.value, *marks])


def _by_rank(words: str, values: Sequence[Any]) -> str:
    return "; ".join(f"rank {rank} {words.format(value)}" for rank, value in enumerate(values))
