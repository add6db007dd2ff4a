"""A Chrome trace of what the ranks recorded."""

from typing import Any

from vote.recorder import Recorder
from vote.report import Sighting, sight
from vote.trace import chrome_trace


def rank(number: int, steps: int) -> Sighting:
    recorder = Recorder(number, 2)
    for step in range(steps):
        recorder.control.step = recorder.data.step = step
        recorder.control.leave(recorder.control.enter(b"first ballot", ordinal=step + 1))
        whole = recorder.data.enter(b"DECODE", 4)
        recorder.data.leave(recorder.data.enter(b"dispatch", 4, 2 * step + 1))
        recorder.data.leave(recorder.data.enter(b"experts", 9))
        recorder.data.leave(recorder.data.enter(b"combine", 4, 2 * step + 2))
        if step < steps - 1:
            recorder.data.leave(whole)
    return sight(recorder.read(), state="running", host="here", now=2e9, last=1000)


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_every_rank_has_its_tracks_and_slices() -> None:
    trace = chrome_trace({0: rank(0, 3), 1: rank(1, 3), 2: None})
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"].endswith("_name")]
    assert [name.split(" (")[0] for name in names] == ["rank 0", "votes", "compute", "rank 1", "votes", "compute"]
    assert len(slices(trace)) == 2 * 3 * 5
    assert min(event["ts"] for event in slices(trace)) == 0
    one = [event for event in slices(trace) if event["pid"] == 1 and event["name"] == "combine"]
    assert [event["args"] for event in one] == [{"step": step, "size": 4, "ordinal": 2 * step + 2} for step in range(3)]
    assert {event["cat"] for event in slices(trace) if event["name"] == "experts"} == {"local"}


def test_collectives_lie_inside_their_step() -> None:
    events = [event for event in slices(chrome_trace({0: rank(0, 2)})) if event["args"]["step"] == 0]
    [step] = [event for event in events if event["name"] == "DECODE"]
    inside = [event for event in events if event["name"] in ("dispatch", "experts", "combine")]
    assert len(inside) == 3
    for event in inside:
        assert step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 0.01


def test_only_the_last_steps() -> None:
    trace = chrome_trace({0: rank(0, 9), 1: rank(1, 8)}, steps=2)
    assert {event["args"]["step"] for event in slices(trace)} == {7, 8}


def test_what_goes_on_lasts_until_now() -> None:
    [last] = [e for e in slices(chrome_trace({0: rank(0, 1)})) if e["args"].get("unfinished")]
    assert last["name"] == "DECODE" and last["dur"] > 1e9


def test_ranks_that_have_done_nothing() -> None:
    trace = chrome_trace({0: rank(0, 0), 1: None})
    assert slices(trace) == [] and len(trace["traceEvents"]) == 4
