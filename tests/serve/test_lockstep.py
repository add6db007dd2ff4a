"""A real server whose ranks leave the lockstep: who is named, how soon, and what an operator can see."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.serve.server import Server, alive, ask_phalanx, keep_busy, port_is_free, shared_memory, wait_until

TIMEOUT_S = 4
THREE = ("--dp", "3", "--set", "ranks.cpus=0.5", "--set", f"vote.control_timeout_s={TIMEOUT_S}")


def start(checkpoint: Path, *args: str) -> Server:
    return Server("--model", str(checkpoint), *args)


def report_after(server: Server, number: signal.Signals, pid: int, timeout_s: float) -> list[str]:
    """Send a rank a signal under load; the lines of the report, which has to come within `timeout_s`."""
    keep_busy(server, streams=6)
    os.kill(pid, number)
    wait_until(lambda: find_report(server) != [], timeout_s, f"a report\n{server.output}")
    return find_report(server)


def find_report(server: Server) -> list[str]:
    starts = [i for i, line in enumerate(server.lines) if line.startswith("lockstep broken at step")]
    return server.lines[starts[0] :] if starts else []


def marked(lines: list[str]) -> list[str]:
    """The ranks that a report blames, as it marks them."""
    return [match[1] for line in lines if (match := re.match(r"> rank (\d+): ", line))]


def test_a_stopped_rank_is_named_alone_in_mid_load(checkpoint: Path) -> None:
    index = 0  # which keeps the gang's store, and hears the ballots
    with start(checkpoint, *THREE) as server:
        family, pid = server.family(), server.pid_of(index)
        report = report_after(server, signal.SIGSTOP, pid, TIMEOUT_S + 5)
        title = report[0]
        assert f"rank {index} hangs: its process (pid {pid}) is stopped" in title
        assert title.count("rank ") == 1, "nobody else is named"
        assert server.wait(25) == 1
        report = find_report(server)
        assert marked(report) == [str(index)]
        assert sum(line.startswith("    last control:") for line in report) == 3
        assert any("Engine.run (dp_engine/engine.py" in line for line in report), server.output
        errors = [line for line in server.lines if line.startswith("phalanx: error:")]
        assert errors == [f"phalanx: error: {title}"]
        wait_until(lambda: not alive(family), 15, "the stopped rank and all observers are gone")


def test_a_killed_rank_is_named_alone_in_mid_load(checkpoint: Path) -> None:
    shm = shared_memory()
    with start(checkpoint, *THREE, "--set", "vote.control_timeout_s=60") as server:
        family, pid = server.family(), server.pid_of(2)
        report = report_after(server, signal.SIGKILL, pid, 5)
        assert f"rank 2 is dead: its process (pid {pid}) was killed or crashed" in report[0]
        assert report[0].count("rank ") == 1
        assert server.wait(25) == 1
        assert marked(find_report(server)) == ["2"]
        error = [line for line in server.lines if "error" in line][-1]
        assert f"(pid {pid}) was killed" in error and error.count("rank") == 1, server.output
        wait_until(lambda: not alive(family), 10, f"processes left: {alive(family)}")
        assert port_is_free(server.port)
        assert shared_memory() <= shm


def test_doctor_before_the_time_is_out(server: Server) -> None:
    wait_until(lambda: "asleep" in ask_phalanx("doctor", "--url", server.url).stdout, 30, "a gang without work")
    asleep = ask_phalanx("doctor", "--url", server.url)
    assert asleep.returncode == 0 and asleep.stdout.startswith("2 ranks asleep: nobody has work"), asleep.stdout
    assert doctor_of_a_busy_gang(server).startswith("2 ranks in lockstep at step")
    victim = server.pid_of(1)
    os.kill(victim, signal.SIGSTOP)
    try:
        hung = ask_phalanx("doctor", "--url", server.url)
    finally:
        os.kill(victim, signal.SIGCONT)
    assert hung.returncode == 1
    assert hung.stdout.startswith(f"out of lockstep: rank 1 hangs: its process (pid {victim}) is stopped")
    assert "Engine.step (dp_engine/engine.py" in hung.stdout, hung.stdout
    assert server.complete([7], 3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def doctor_of_a_busy_gang(server: Server) -> str:
    """What the doctor says while there is work; the tiny model may be done before the doctor has looked twice."""
    for _ in range(20):
        keep_busy(server)
        answer = httpx.get(f"{server.url}/debug/doctor", timeout=30).json()
        assert answer["lockstep"], answer["text"]
        if "asleep: nobody has work" not in answer["text"]:
            break
    return answer["text"]


def test_trace_of_a_running_gang(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    server.complete([7] * 20, 30, ignore_eos=True)
    traced = ask_phalanx("trace", "-o", str(target), "--url", server.url)
    assert traced.returncode == 0, traced.stderr
    check_trace(json.loads(target.read_text()))
    last = httpx.get(f"{server.url}/debug/trace?steps=1").json()
    assert len({event["args"]["step"] for event in last["traceEvents"] if event["ph"] == "X"}) == 1


def check_trace(trace: dict[str, Any]) -> None:
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    kinds = {"first ballot", "second ballot", "PREFILL", "DECODE", "token counts", "dispatch", "experts", "combine"}
    combined = []
    for rank in (0, 1):
        mine = [event for event in slices if event["pid"] == rank]
        assert kinds <= {event["name"] for event in mine}
        combined.append({event["args"]["ordinal"] for event in mine if event["name"] == "combine"})
    assert len(combined[0] & combined[1]) > 50, "both ranks went through the same collectives"
