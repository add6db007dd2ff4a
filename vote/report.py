"""What a gang's flight recorders say when they are laid side by side: who left, where, since when. Pure functions."""

from collections import Counter
from collections.abc import Mapping
from textwrap import wrap

import msgspec
import numpy as np

from vote.ballot import AGREED
from vote.recorder import Recording

SHOWN_ENTRIES = 10  # collectives of each ring
LOOKED_AT = 32  # entries of each ring: collectives and what lies between
LINE_WIDTH = 116
GLUE = "\u00a0"
LATE_S = 1.0  # a rank that came this much later than the first one, to a collective that failed, held it up


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a ring. `entered`, `left`: Unix time; `left` None: still inside. `ordinal` 0: no collective."""

    kind: str
    step: int
    ordinal: int
    size: int
    entered: float
    left: float | None = None


class Sighting(msgspec.Struct, frozen=True):
    """One rank as seen from outside.

    state: of its process, "running", "stopped" or "dead"; words: why it ended, in its own words; ballot: the AGREED
    values of its last ballot; control, data: its last entries, oldest first; stack: of its threads, where that was
    asked for and could be had; stderr: the end of what it wrote there, where that was asked for; taken_at: Unix time;
    voters: ranks that vote together, this one included.
    """

    rank: int
    pid: int
    host: str
    state: str
    words: str
    ballot: dict[str, int]
    control: list[Entry]
    data: list[Entry]
    stack: str = ""
    stderr: str = ""
    taken_at: float = 0.0
    voters: int = 0

    @property
    def inside(self) -> Entry | None:
        """The collective it is in, of which group ever."""
        waiting = [entry for entry in (*self.control[-1:], *self.data) if entry.left is None and entry.ordinal]
        return max(waiting, key=lambda entry: entry.entered, default=None)

    @property
    def asleep(self) -> Entry | None:
        """Its sleep, if it sleeps: the gang had agreed that nobody has work."""
        last = self.control[-1] if self.control else None
        return last if last is not None and last.kind == "sleep" and last.left is None else None

    @property
    def place(self) -> tuple[int, int]:
        """Ballots and data collectives entered so far: equal on ranks that are at the same place."""
        return _last_ordinal(self.control), _last_ordinal(self.data)

    @property
    def last(self) -> Entry | None:
        """What it began last."""
        return max((*self.control[-1:], *self.data[-1:]), key=lambda entry: entry.entered, default=None)


Sightings = Mapping[int, Sighting | None]  # by rank; None: neither the rank nor its observer can be reached


class Report(msgspec.Struct, frozen=True):
    """The one report of a gang's end. culprits: the ranks that left, with what is known of each; step, what: where the
    others were; text: all of it, for people; innocent: the culprits are stopped or out of reach, which is nothing that
    a step can cause."""

    culprits: dict[int, str]
    step: int
    what: str
    text: str
    innocent: bool = False


def sight(
    recording: Recording, *, state: str, host: str, now: float, last: int = LOOKED_AT, stack: str = "", stderr: str = ""
) -> Sighting:
    """A sighting from a copy of a rank's recorder, with the `last` entries of each ring."""
    voted = recording.ballot[0 : 2 * len(AGREED) : 2].tolist()
    return Sighting(
        rank=recording.rank,
        pid=recording.pid,
        host=host,
        state=state,
        words=recording.words,
        ballot=dict(zip(AGREED, voted, strict=True)),
        control=_entries(recording.control[-last:], recording.wall_offset_ns),
        data=_entries(recording.data[-last:], recording.wall_offset_ns),
        stack=stack,
        stderr=stderr,
        taken_at=now,
        voters=recording.voters,
    )


def _entries(entries: np.ndarray, offset_ns: int) -> list[Entry]:
    return [
        Entry(
            kind.decode(),
            step,
            ordinal,
            size,
            (entered + offset_ns) / 1e9,
            (left + offset_ns) / 1e9 if left else None,
        )
        for _, entered, left, step, ordinal, size, kind in entries.tolist()
    ]


def _last_ordinal(entries: list[Entry]) -> int:
    return max((entry.ordinal for entry in entries), default=0)


def culprits(seen: Sightings, *, mismatch: bool = False) -> dict[int, str]:
    """The ranks to blame, with what is known of each; empty if nobody can be told from the others.

    In this order, the first that names anybody: ranks that failed by themselves; that are dead, stopped or out of
    reach; with `mismatch`, that voted otherwise than most; that are in no collective while others wait; that are in
    another one than most; that came to it late. Of ranks that keep no step with each other only the first two.
    """
    if ended := culprits_by_state(seen):
        return ended
    there = {rank: sighting for rank, sighting in seen.items() if sighting is not None}
    if _each_alone(there):
        return {}
    if mismatch:
        return _odd_votes(there)
    waiting = {rank: entry for rank, sighting in there.items() if (entry := sighting.inside) is not None}
    if not waiting:
        return {}
    if outside := {rank: _outside(sighting) for rank, sighting in there.items() if rank not in waiting}:
        return outside
    return _elsewhere(there) or _late(waiting)


def culprits_by_state(seen: Sightings) -> dict[int, str]:
    """The ranks that failed by themselves, else those that are dead, stopped or out of reach."""
    failed = {rank: f"failed: {sighting.words}" for rank, sighting in seen.items() if sighting and sighting.words}
    return failed or {rank: words for rank, sighting in seen.items() if (words := _gone(sighting))}


def compose(seen: Sightings, *, mismatch: bool = False) -> Report:
    """The report of a gang that is no longer in lockstep."""
    blamed = culprits(seen, mismatch=mismatch)
    others = [sighting for rank, sighting in seen.items() if sighting is not None and rank not in blamed]
    places = [entry for sighting in others or seen.values() if sighting and (entry := sighting.inside or sighting.last)]
    step = max((entry.step for entry in places), default=0)
    kinds = Counter(entry.kind for entry in places if entry.step == step)
    what = f"the {kinds.most_common(1)[0][0]}" if kinds else "its start"
    head = "; ".join(f"rank {rank} {words}" for rank, words in sorted(blamed.items()))
    lines = [
        f"lockstep broken at step {step} in {what}: {head or 'no rank could be singled out'}",
        *_table(seen, blamed),
    ]
    return Report(blamed, step, what, "\n".join(lines), bool(blamed) and all(_outward(seen[rank]) for rank in blamed))


def examine(before: Sightings, now: Sightings) -> Report:
    """What two looks at a gang, a moment apart, say of it. Without culprits all is well, or nobody can be told from the
    others: a rank is stuck if it is where it was."""
    stuck = [rank for rank, sighting in now.items() if _same(before.get(rank), sighting)]
    blamed = culprits(now) if stuck else culprits_by_state(now)
    there = {rank: sighting for rank, sighting in now.items() if sighting is not None}
    step = max((sighting.last.step for sighting in there.values() if sighting.last), default=0)
    count = f"{len(now)} rank{'s' if len(now) > 1 else ''}"
    if blamed:
        title = "out of lockstep: " + "; ".join(f"rank {rank} {words}" for rank, words in sorted(blamed.items()))
    elif stuck:
        title = f"{count} at step {step}: all wait in the same collective, no rank can be singled out"
    elif all(sighting.asleep for sighting in there.values()):
        title = f"{count} asleep: nobody has work"
    elif _each_alone(there):
        title = f"{count}, each at steps of its own: the model has no experts"
    else:
        title = f"{count} in lockstep at step {step}"
    return Report(blamed, step, "", "\n".join([title, *_table(now, blamed, brief=not blamed and not stuck)]))


def _each_alone(there: Mapping[int, Sighting]) -> bool:
    """Do several ranks not keep step with each other?"""
    return len(there) > 1 and all(sighting.voters == 1 for sighting in there.values())


def _same(before: Sighting | None, now: Sighting | None) -> bool:
    """Was the rank in a collective, and is it still in the same one?"""
    was, still = (sighting.inside if sighting is not None else None for sighting in (before, now))
    return was is not None and still is not None and (was.kind, was.ordinal) == (still.kind, still.ordinal)


# ---- who


def _gone(sighting: Sighting | None) -> str:
    if sighting is None:
        return "is out of reach: its host does not answer"
    if sighting.state == "dead":
        return f"is dead: its process (pid {sighting.pid}) was killed or crashed{_in_the_middle(sighting)}"
    if sighting.state == "stopped":
        return f"hangs: its process (pid {sighting.pid}) is stopped, as by kill -STOP{_in_the_middle(sighting)}"
    return ""


def _outward(sighting: Sighting | None) -> bool:
    """Was the rank lost by something outside of it?"""
    return sighting is None or (sighting.state == "stopped" and not sighting.words)


def _in_the_middle(sighting: Sighting) -> str:
    last = sighting.last
    if last is None:
        return ", before its first vote"
    return f", last seen {_where(last, sighting.taken_at)}"


def _outside(sighting: Sighting) -> str:
    """Of a rank that is in no collective."""
    if (nap := sighting.asleep) is not None:
        return f"sleeps since {_clock(nap.entered)} while others vote"
    if sighting.last is None:
        return "has not come to its first vote"
    return f"is in no collective, last seen {_where(sighting.last, sighting.taken_at)}"


def _odd_votes(there: Mapping[int, Sighting]) -> dict[int, str]:
    """Ranks whose ballot is not the most frequent one; all of them when there is no majority."""
    ballots = {rank: tuple(sighting.ballot.items()) for rank, sighting in there.items()}
    usual, count = Counter(ballots.values()).most_common(1)[0]
    if count == len(ballots):
        return {}
    names = [name for name, _ in usual if len({sighting.ballot[name] for sighting in there.values()}) > 1]
    expected = dict(usual) if count * 2 > len(ballots) else {}
    return {
        rank: "voted " + ", ".join(_vote(name, sighting.ballot[name], expected) for name in names)
        for rank, sighting in there.items()
        if sighting.ballot != expected
    }


def _vote(name: str, value: int, expected: Mapping[str, int]) -> str:
    others = f" where the others voted {expected[name]}" if expected and expected[name] != value else ""
    return f"{name}={value}{others}"


def _elsewhere(there: Mapping[int, Sighting]) -> dict[int, str]:
    """All are in some collective; those that are not where most are, or, without a majority, are behind."""
    places = {rank: sighting.place for rank, sighting in there.items()}
    usual, count = Counter(places.values()).most_common(1)[0]
    if count == len(places):
        return {}
    if count * 2 <= len(places):
        usual = max(places.values())
    return {
        rank: f"is elsewhere: {_where(entry, there[rank].taken_at)}"
        for rank, place in places.items()
        if place != usual and (entry := there[rank].inside) is not None
    }


def _late(waiting: Mapping[int, Entry]) -> dict[int, str]:
    """All are in the same collective: those that came so late that others had given up."""
    first = min(entry.entered for entry in waiting.values())
    late = {rank: entry.entered - first for rank, entry in waiting.items() if entry.entered - first > LATE_S}
    return {rank: f"came {lag:.1f} s late to the {waiting[rank].kind}" for rank, lag in late.items()}


# ---- in words


def _where(entry: Entry, now: float) -> str:
    since = f"since {_clock(entry.entered)} ({max(now - entry.entered, 0):.1f} s)"
    number = f" number {entry.ordinal}" if entry.ordinal else ""
    if entry.left is None:
        return f"in the {entry.kind}{number} of step {entry.step} {since}"
    return f"after the {entry.kind}{number} of step {entry.step}, {max(now - entry.left, 0):.1f} s ago"


def _clock(at: float) -> str:
    moment = np.datetime64(round(at * 1e3), "ms")
    return f"{str(moment)[11:]} UTC"


def _table(seen: Sightings, blamed: Mapping[int, str], *, brief: bool = False) -> list[str]:
    """A paragraph a rank; those to blame are marked and come with their stack."""
    lines: list[str] = []
    for rank, sighting in sorted(seen.items()):
        lines.append(f"{'>' if rank in blamed else ' '} rank {rank}: {_describe(sighting)}")
        if sighting is None or brief:
            continue
        lines += [*_last_entries("control", sighting.control), *_last_entries("data", sighting.data)]
        if sighting.stack and (rank in blamed or not blamed):
            lines += ["    stack:", *(f"      {line}" for line in sighting.stack.splitlines())]
    return lines


def _describe(sighting: Sighting | None) -> str:
    """One line on where a rank is."""
    if sighting is None:
        return "out of reach"
    who = f"pid {sighting.pid} on {sighting.host}, {sighting.state}"
    waits = "was" if sighting.state == "dead" else "waits"
    if sighting.words:
        return f"{who}, failed: {sighting.words}"
    if (inside := sighting.inside) is not None:
        return f"{who}, {waits} {_where(inside, sighting.taken_at)}"
    if (nap := sighting.asleep) is not None:
        return f"{who}, asleep since {_clock(nap.entered)}"
    if sighting.last is None:
        return f"{who}, before its first vote"
    return f"{who}, {_where(sighting.last, sighting.taken_at)}"


def _last_entries(name: str, entries: list[Entry]) -> list[str]:
    """The last collectives, and whatever else is still going on, newest first."""
    collectives = [entry for entry in entries if entry.ordinal or entry.left is None]
    shown = ", ".join(_brief(entry) for entry in reversed(collectives[-SHOWN_ENTRIES:])) or "nothing"
    lines = wrap(f"last {name}: {shown}", LINE_WIDTH, initial_indent="    ", subsequent_indent="      ")
    return [line.replace(GLUE, " ") for line in lines]


def _brief(entry: Entry) -> str:
    """In one piece for the line-breaker."""
    number = f"#{entry.ordinal}" if entry.ordinal else ""
    took = "still inside" if entry.left is None else f"{(entry.left - entry.entered) * 1e3:.2f} ms"
    return f"{entry.kind}{number} of step {entry.step} ({took})".replace(" ", GLUE)
