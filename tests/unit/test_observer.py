"""The observer beside a rank, over real processes: it tells of ranks that are stopped, dead, or only look hung."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq

from vote.observers import Look, ObserverKeys, Observers, encode

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import json, sys, time
from vote.observers import ObserverKeys, ObserverProcess
from vote.recorder import Recorder

rank, size, public, secret, waits = json.loads(sys.argv[1])
recorder = Recorder(rank, size, shared=True)
observer = ObserverProcess(recorder, "127.0.0.1", ObserverKeys(public, secret))
print(observer.address, observer._process.pid, flush=True)
observer.introduce(json.loads(sys.stdin.readline()))
recorder.control.step = 5

def stuck_in_here():
    if waits:
        recorder.control.enter(b"first ballot", ordinal=6)
    print("there", flush=True)
    sys.stdin.readline()

stuck_in_here()
observer.close()
"""


class Gang:
    """Processes that are where ranks of a gang would be; rank 1 is in no collective."""

    def __init__(self, processes: list[subprocess.Popen[str]], observers: Observers, pids: list[int]) -> None:
        self.processes = processes
        self.observers = observers
        self.observer_pids = pids

    def tell(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)


@contextmanager
def gang(size: int) -> Iterator[Gang]:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    command = [sys.executable, "-c", RANK]
    processes = [
        subprocess.Popen(
            [*command, json.dumps([rank, size, public, secret, rank != 1])],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [_line(process).split() for process in processes]
        addresses = {rank: address for rank, (address, _) in enumerate(said)}
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(addresses) + "\n")
            process.stdin.flush()
            assert _line(process) == "there"
        yield Gang(processes, Observers(addresses, ObserverKeys(public, secret)), [int(pid) for _, pid in said])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(scope="module")
def three() -> Iterator[Gang]:
    with gang(3) as ranks:
        yield ranks


def test_where_the_ranks_are(three: Gang) -> None:
    seen = three.observers.look()
    assert list(seen) == [0, 1, 2]
    for rank, sighting in seen.items():
        assert sighting is not None and (sighting.rank, sighting.state) == (rank, "running")
        assert (sighting.inside is None) == (rank == 1)
        assert sighting.pid == three.processes[rank].pid


def test_the_stack_of_a_rank_that_does_not_co_operate(three: Gang) -> None:
    three.tell(1, signal.SIGSTOP)
    try:
        end = time.monotonic() + 20  # a busy machine stops it late
        while (sighting := three.observers.look_at(1, stack=True)) is None or sighting.state != "stopped":
            assert time.monotonic() < end, sighting
    finally:
        three.tell(1, signal.SIGCONT)
    assert "stuck_in_here (<string>" in sighting.stack, sighting.stack


def test_who_does_not_hold_the_secret_gets_no_answer(three: Gang) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    stranger = Observers({0: three.observers.addresses[0]}, ObserverKeys(public, secret))
    own_key = zmq.Context()
    socket = own_key.socket(zmq.DEALER)
    socket.curve_serverkey = three.observers._keys.public.encode()  # knows whom to ask, but is nobody
    socket.curve_publickey, socket.curve_secretkey = public.encode(), secret.encode()
    socket.connect(three.observers.addresses[0])
    socket.send(encode(Look(1, False)))
    try:
        assert stranger.look() == {0: None}
        assert not socket.poll(500)
    finally:
        socket.close(linger=0)
        own_key.term()
    assert three.observers.look()[0] is not None


def test_what_is_no_request_is_ignored(three: Gang) -> None:
    context = zmq.Context()
    socket = three.observers._connect(context, three.observers.addresses[0])
    for frame in (b"", b"\x93abc", b"x" * 5000):
        socket.send(frame)
    try:
        assert not socket.poll(300)
    finally:
        socket.close(linger=0)
        context.term()
    assert three.observers.look()[0] is not None


def stop(ranks: Gang) -> None:
    ranks.tell(1, signal.SIGSTOP)


def kill(ranks: Gang) -> None:
    ranks.tell(1, signal.SIGKILL)


def nothing(ranks: Gang) -> None:
    del ranks


def lose_its_host(ranks: Gang) -> None:
    os.kill(ranks.observer_pids[1], signal.SIGKILL)
    ranks.tell(1, signal.SIGKILL)


@pytest.mark.parametrize(
    ("harm", "words", "stack"),
    [
        (stop, "hangs: its process", True),
        (kill, "is dead: its process", False),
        (nothing, "has not come to its first vote", True),
        (lose_its_host, "is out of reach", False),
    ],
)
def test_one_report_for_all(harm: Callable[[Gang], None], words: str, stack: bool) -> None:
    with gang(3) as ranks:
        harm(ranks)
        first, second = (ranks.observers.report(mismatch=False) for _ in range(2))
        assert first is not None and first == second
        assert list(first.culprits) == [1] and words in first.culprits[1]
        assert (first.step, first.what) == (5, "the first ballot")
        assert ("stuck_in_here (<string>" in first.text) == stack, first.text
        ranks.tell(1, signal.SIGCONT)
        assert ranks.observers.report(mismatch=False) == first, "composed once"


def test_without_the_first_observer_the_next_one_reports() -> None:
    with gang(3) as ranks:
        os.kill(ranks.observer_pids[0], signal.SIGKILL)
        report = ranks.observers.report(mismatch=False)
        assert report is not None and list(report.culprits) == [0]


def test_an_observer_outlives_its_rank_for_some_seconds_only() -> None:
    with gang(2) as ranks:
        observers = [psutil.Process(pid) for pid in ranks.observer_pids]
        ranks.tell(0, signal.SIGKILL)
        assert ranks.processes[1].stdin is not None
        ranks.processes[1].stdin.write("\n")  # rank 1 ends in order
        ranks.processes[1].stdin.flush()
        ranks.processes[1].wait(10)
        assert ranks.observers.look()[1] is None
        sighting = ranks.observers.look()[0]
        assert sighting is not None and sighting.state == "dead"
        _, left = psutil.wait_procs(observers, timeout=30)
        assert not left
