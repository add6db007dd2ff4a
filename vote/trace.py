"""Recent steps of a gang as a Chrome trace, which ui.perfetto.dev and chrome://tracing show.

A rank is a process there, with two tracks: its votes (and sleep), and what it computes.
"""

from collections.abc import Mapping
from typing import Any

from vote.report import Entry, Sighting

TRACKS = ("votes", "compute")


def chrome_trace(seen: Mapping[int, Sighting | None], steps: int | None = None) -> dict[str, Any]:
    """A trace of the last `steps` steps (None: all that the recorders hold). Times are microseconds since its start;
    clocks of different hosts are as far apart as the hosts keep them."""
    there = {rank: sighting for rank, sighting in sorted(seen.items()) if sighting is not None}
    tracks = {
        (rank, track): entries
        for rank, sighting in there.items()
        for track, entries in enumerate((sighting.control, sighting.data))
    }
    last = max((entry.step for entries in tracks.values() for entry in entries), default=0)
    first = 0 if steps is None else last - steps + 1
    shown = {key: [entry for entry in entries if entry.step >= first] for key, entries in tracks.items()}
    start = min((entry.entered for entries in shown.values() for entry in entries), default=0.0)
    events = [event for rank, sighting in there.items() for event in _names(rank, sighting)]
    for (rank, track), entries in shown.items():
        events += [_slice(rank, track, entry, start, there[rank].taken_at) for entry in entries]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_unix_s": start}}


def _names(rank: int, sighting: Sighting) -> list[dict[str, Any]]:
    words = f"rank {rank} ({sighting.host}, pid {sighting.pid})"
    process = {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": words}}
    order = {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    threads = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
        for track, name in enumerate(TRACKS)
    ]
    return [process, order, *threads]


def _slice(rank: int, track: int, entry: Entry, start: float, now: float) -> dict[str, Any]:
    """What is still going on lasts until now."""
    end = now if entry.left is None else entry.left
    args: dict[str, Any] = {"step": entry.step, "size": entry.size}
    if entry.ordinal:
        args["ordinal"] = entry.ordinal
    if entry.left is None:
        args["unfinished"] = True
    return {
        "ph": "X",
        "name": entry.kind,
        "cat": "collective" if entry.ordinal else "local",
        "pid": rank,
        "tid": track,
        "ts": round((entry.entered - start) * 1e6, 3),
        "dur": round(max(end - entry.entered, 0) * 1e6, 3),
        "args": args,
    }
