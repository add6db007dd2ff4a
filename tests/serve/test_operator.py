"""What an operator can see of a running server's ranks."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.serve.server import Server, ask_phalanx, keep_busy, wait_until


def test_doctor_before_the_time_is_out(server: Server) -> None:
    wait_until(lambda: "asleep" in ask_phalanx("doctor", "--url", server.url).stdout, 30, "a gang without work")
    asleep = ask_phalanx("doctor", "--url", server.url)
    assert asleep.returncode == 0 and asleep.stdout.startswith("2 ranks asleep: nobody has work"), asleep.stdout
    with keep_busy(server):
        busy = httpx.get(f"{server.url}/debug/doctor", timeout=30).json()
    assert busy["lockstep"] and busy["text"].startswith("2 ranks in lockstep at step"), busy
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
    kinds = {"first ballot", "second ballot", "PREFILL", "DECODE", "dispatch", "experts", "combine"}
    combined = []
    for rank in (0, 1):
        mine = [event for event in slices if event["pid"] == rank]
        assert kinds <= {event["name"] for event in mine}
        combined.append({event["args"]["ordinal"] for event in mine if event["name"] == "combine"})
    assert len(combined[0] & combined[1]) > 50, "both ranks went through the same collectives"
