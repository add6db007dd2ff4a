"""The flight recorder: what a reader in another process finds in a rank's memory."""

import mmap
import os
import threading

import numpy as np
import pytest

from vote.ballot import AGREED, BALLOT_SIZE, Facts, Lockstep, write_ballot
from vote.recorder import CONTROL_ENTRIES, DATA_ENTRIES, ENTRY, MEMORY_BYTES, Recorder, Recording
from vote.report import sight


def test_entries_come_back_in_order_with_what_was_said() -> None:
    recorder = Recorder(3, 8)
    recorder.control.step = 41
    recorder.control.leave(recorder.control.enter(b"first ballot", ordinal=90))
    recorder.control.step = 42
    recorder.control.enter(b"first ballot", ordinal=91)
    recorder.data.leave(recorder.data.enter(b"dispatch", 17, 500))
    recording = recorder.read()
    assert (recording.rank, recording.voters, recording.pid) == (3, 8, os.getpid())
    done, open_ = recording.control
    assert (done["kind"], done["step"], done["ordinal"]) == (b"first ballot", 41, 90)
    assert done["left_ns"] >= done["entered_ns"] > 0
    assert (open_["step"], open_["ordinal"], open_["left_ns"]) == (42, 91, 0)
    assert recording.data[["kind", "size", "ordinal"]].tolist() == [(b"dispatch", 17, 500)]


@pytest.mark.parametrize(("ring", "capacity"), [("control", CONTROL_ENTRIES), ("data", DATA_ENTRIES)])
def test_a_full_ring_keeps_the_last_entries(ring: str, capacity: int) -> None:
    recorder = Recorder(0, 1)
    writer = getattr(recorder, ring)
    for number in range(capacity + 100):
        writer.leave(writer.enter(b"x", number))
    entries = getattr(recorder.read(), ring)
    assert entries["size"].tolist() == list(range(100, capacity + 100))
    assert len(recorder.read().data if ring == "control" else recorder.read().control) == 0


def test_an_entry_that_ends_late_is_ended_in_its_own_place() -> None:
    """Steps contain the collectives of their layers."""
    ring = (recorder := Recorder(0, 1)).data
    step = ring.enter(b"DECODE")
    for ordinal in (1, 2):
        ring.leave(ring.enter(b"dispatch", ordinal=ordinal))
    assert recorder.read().data["left_ns"].astype(bool).tolist() == [False, True, True]
    ring.leave(step)
    assert recorder.read().data["left_ns"].all()


def test_an_entry_caught_half_written_is_left_out() -> None:
    recorder = Recorder(0, 1, shared=True)
    for number in range(5):
        recorder.control.leave(recorder.control.enter(b"x", number))
    assert recorder.fd is not None
    with mmap.mmap(recorder.fd, MEMORY_BYTES) as memory:
        whole = np.frombuffer(memory, np.uint8)
        [at] = [i for i in range(0, MEMORY_BYTES - 64, 8) if _entry(whole, i) == (3, 2)]
        np.frombuffer(memory, "<i8", 1, at)[0] = 4000  # a number that belongs to another place
        del whole
        assert recorder.read().control["size"].tolist() == [0, 1, 3, 4]


def _entry(memory: np.ndarray, at: int) -> tuple[int, int]:
    entry = memory[at : at + ENTRY.itemsize].view(ENTRY)[0]
    return int(entry["number"]), int(entry["size"])


def test_another_map_of_the_memory_sees_what_a_thread_writes_meanwhile() -> None:
    recorder = Recorder(1, 2, shared=True)
    assert recorder.fd is not None
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            recorder.control.leave(recorder.control.enter(b"x", number, number))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with mmap.mmap(recorder.fd, MEMORY_BYTES, access=mmap.ACCESS_READ) as memory:
            for _ in range(200):
                entries = Recording.read(memory).control
                assert (np.diff(entries["number"]) > 0).all()
                assert (entries["size"] == entries["number"]).all()
    finally:
        stop.set()
        writer.join()


def test_first_last_words_stay() -> None:
    recorder = Recorder(0, 1)
    recorder.last_words("ValueError: größer")
    recorder.last_words("and something else")
    assert recorder.read().words == "ValueError: größer"
    long = Recorder(0, 1)
    long.last_words("x" * 10_000)
    assert long.read().words == "x" * 2048


def test_the_last_ballot_is_kept() -> None:
    recorder = Recorder(0, 1)
    ballot = np.zeros(BALLOT_SIZE, np.int32)
    write_ballot(ballot, Lockstep(*range(1, len(AGREED) + 1)), Facts(unfinished=True))
    recorder.ballot(ballot)
    sighting = sight(recorder.read(), state="running", host="here", now=0.0)
    assert sighting.ballot == dict(zip(AGREED, range(1, len(AGREED) + 1), strict=True))
