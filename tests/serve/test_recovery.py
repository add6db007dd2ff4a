"""Ranks that die, are stopped or raise under a real server: who is named and how soon, and that no client notices."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server import Server, alive, ask_phalanx, port_is_free, shared_memory, wait_until

TIMEOUT_S = 4
RECOVERY_S = 90  # whatever the machine is doing
STREAMS = 6


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    """Three ranks, two cores; the last test drains it."""
    settings = "ranks.cpus=0.5", f"vote.control_timeout_s={TIMEOUT_S}", "chaos.enabled=true"
    options = [word for setting in settings for word in ("--set", setting)]
    with Server("--model", str(checkpoint), "--dp", "3", *options) as server:
        yield server


def body(server: Server, number: int) -> dict[str, Any]:
    """Every second one is sampled."""
    sampled = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
    prompt = [5 + number, 9, 40, 200]
    return {"model": server.model, "prompt": prompt, "max_tokens": 300, "ignore_eos": True, **sampled}


def read_stream(server: Server, number: int) -> str:
    events = server.stream("/v1/completions", body(server, number))
    return "".join(event["choices"][0]["text"] for event in events)


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[str]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda number: read_stream(server, number), range(STREAMS)))


@contextmanager
def streams(server: Server, expected: list[str]) -> Iterator[None]:
    """Streams that have begun when the body starts; all have to end as they would have, undisturbed."""
    found: dict[int, str] = {}
    begun = threading.Barrier(STREAMS + 1)

    def follow(number: int) -> None:
        events = server.stream("/v1/completions", body(server, number))
        found[number] = next(events)["choices"][0]["text"]
        begun.wait(60)
        for event in events:
            found[number] += event["choices"][0]["text"]

    threads = [threading.Thread(target=follow, args=(number,), daemon=True) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    yield
    for thread in threads:
        thread.join(RECOVERY_S)
    assert found == dict(enumerate(expected))


def status(server: Server) -> dict[str, Any]:
    return httpx.get(f"{server.url}/status", timeout=30).json()


def gangs(server: Server) -> list[dict[str, Any]]:
    return status(server)["replicas"]


def restarts(server: Server) -> int:
    return gangs(server)[0]["restarts"]


def last_report(server: Server) -> list[str]:
    """The lines from the last report on."""
    starts = [i for i, line in enumerate(server.lines) if line.startswith("lockstep broken at step")]
    return server.lines[starts[-1] :] if starts else []


def wait_recovered(server: Server, before: int, times: int = 1) -> None:
    wait_until(lambda: restarts(server) == before + times, RECOVERY_S, f"a restart\n{server.output}")
    assert httpx.get(f"{server.url}/ready").status_code == 200


def errors(server: Server) -> list[str]:
    return [line for line in server.lines if line.startswith("phalanx: error:")]


def marked(lines: list[str]) -> list[str]:
    """The ranks that a report blames, as it marks them."""
    return [match[1] for line in lines if (match := re.match(r"> rank (\d+): ", line))]


def crash_folder(server: Server) -> Path:
    wait_until(lambda: list(server.crash_dir.glob("*/report.json")), 30, "a crash report")
    return max(server.crash_dir.glob("gang-*"))


def test_a_killed_rank_is_named_and_no_stream_notices(server: Server, undisturbed: list[str]) -> None:
    victim = 0  # which keeps the gang's store, and hears the ballots
    before, pid = restarts(server), server.pid_of(victim)
    with streams(server, undisturbed):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, 5, "not ready")
        wait_until(lambda: last_report(server) != [], 15, "a report")
        title = last_report(server)[0]
        assert f"rank {victim} is dead" in title and title.count("rank ") == 1, "nobody else is named"
        wait_recovered(server, before)
    assert marked(last_report(server)) == [str(victim)]
    report = json.loads((crash_folder(server) / "report.json").read_text())
    assert report["culprits"] == [victim] and report["requests_suspected"]
    wait_until(lambda: status(server)["suspects"] == 0, 30, "nobody is suspected any more")


def test_a_rank_that_raises_is_named_and_no_stream_notices(server: Server, undisturbed: list[str]) -> None:
    before = restarts(server)
    with streams(server, undisturbed):
        asked = ask_phalanx("chaos", "raise", "--rank", "1", "--url", server.url)
        assert (asked.returncode, asked.stdout) == (0, "raise at rank 1\n"), asked.stderr
        wait_recovered(server, before)
    assert any("rank 1 failed: ChaosError: chaos: raise on demand" in line for line in errors(server)), server.output


def test_a_request_that_ends_its_rank_each_time_is_failed_and_all_others_finish(
    server: Server, undisturbed: list[str]
) -> None:
    before = restarts(server)
    reply = server.post("/debug/chaos", {"kind": "poison", "tokens": [17, 4, 17], "rank": "all"})
    assert reply.status_code == 200, reply.text
    with streams(server, undisturbed):
        refused = server.post("/v1/completions", {**body(server, 0), "prompt": [9, 17, 4, 17, 9]}, RECOVERY_S)
        assert refused.status_code == 500, refused.text
        error = refused.json()["error"]
        assert error["code"] == "request_poisoned" and "2 times" in error["message"], error
        wait_recovered(server, before, times=2)
    finished = [value for name, value in server.metrics().items() if 'reason="poisoned"' in name]
    assert sum(finished) == 1


def test_a_stopped_rank_is_named_and_no_stream_notices(server: Server, undisturbed: list[str]) -> None:
    family, before, pid = server.family(), restarts(server), server.pid_of(1)
    with streams(server, undisturbed):
        started = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        words = f"rank 1 hangs: its process (pid {pid}) is stopped"
        wait_until(lambda: any(words in line for line in server.lines), TIMEOUT_S + 10, "a report")
        assert time.monotonic() - started > TIMEOUT_S - 1
        wait_recovered(server, before)
    assert any("Engine.run (dp_engine/engine.py" in line for line in last_report(server)), server.output
    assert status(server)["suspects"] == 0, "no request stops a process"
    ranks = [process for process in family if process.pid == pid]
    wait_until(lambda: not alive(ranks), 15, "the stopped process is gone")


def test_a_rank_that_is_stopped_in_its_sleep_is_noticed(server: Server, undisturbed: list[str]) -> None:
    before, pid = restarts(server), server.pid_of(0)
    wait_until(lambda: status(server)["inflight"] == 0, 10, "no work")
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: any(f"(pid {pid}) is stopped" in line for line in server.lines), 6 * TIMEOUT_S, server.output)
    wait_recovered(server, before)
    assert read_stream(server, 0) == undisturbed[0]


def test_what_people_see_of_it(server: Server) -> None:
    assert len(errors(server)) == restarts(server), server.output
    assert all("has ended" in line for line in errors(server)), server.output
    assert sum("serves again" in line for line in server.lines) == restarts(server)
    ours = [line for line in server.lines if not line.startswith("rank ")]  # a rank that raises says where
    assert not any("Traceback" in line or "never retrieved" in line for line in ours), server.output
    folder = crash_folder(server)
    assert {path.name for path in folder.iterdir()} >= {"report.json", "trace.json", "ranks.log"}
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    metrics = server.metrics()
    assert metrics['phalanx_gang_restarts_total{gang="0"}'] == restarts(server)
    assert metrics["phalanx_requests_queued"] == metrics["phalanx_requests_suspect"] == 0
    assert all(metrics[f'phalanx_requests_inflight{{gang="0",rank="{rank}"}}'] == 0 for rank in range(3))


def test_work_of_a_gang_moves_to_the_other_at_once(checkpoint: Path, undisturbed: list[str]) -> None:
    """Two gangs of one rank each: the texts are those of the gang of three."""
    settings = "replicas=2", "ranks.cpus=0.5", "engine.max_num_batched_tokens=32", "chaos.enabled=true"
    options = [word for setting in settings for word in ("--set", setting)]
    with Server("--model", str(checkpoint), "--dp", "1", *options) as pair:
        for gang in (0, 1):  # so that all are still at work when one ends
            slow = {"kind": "slow", "seconds": 0.02, "steps": 100, "replica": gang}
            assert pair.post("/debug/chaos", slow).status_code == 200
        with streams(pair, undisturbed):
            os.kill(pair.rank_pids()[0], signal.SIGKILL)
            wait_until(lambda: any(each["state"] != "serving" for each in gangs(pair)), 10, "a gang has ended")
            assert httpx.get(f"{pair.url}/ready").status_code == 200
        wait_until(lambda: sum(each["restarts"] for each in gangs(pair)) == 1, RECOVERY_S, pair.output)
        assert [each["state"] for each in gangs(pair)] == ["serving"] * 2
        carried = [value for name, value in pair.metrics().items() if 'reason="carried_over"' in name]
        assert sum(carried) == STREAMS / 2, "each gang had half of the work"


def test_drain_ends_the_server_when_the_last_request_has_ended(server: Server, undisturbed: list[str]) -> None:
    shm, family = shared_memory(), server.family()
    with streams(server, undisturbed):
        reply = httpx.post(f"{server.url}/drain", timeout=30)
        assert reply.status_code == 202 and reply.json()["draining"]
        refused = server.post("/v1/completions", body(server, 0))
        assert refused.status_code == 503 and "draining" in refused.json()["error"]["message"]
    assert server.wait(30) == 0, server.output
    wait_until(lambda: not alive(family), 10, f"processes left: {alive(family)}")
    assert port_is_free(server.port)
    assert shared_memory() <= shm
    assert ask_phalanx("doctor", "--url", server.url).returncode == 2
