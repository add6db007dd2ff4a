"""Recorded decisions of DeepInfer's and vLLM's schedulers, reproduced record for record; the command that does it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dp_engine.replay import first_difference, main, replay

TRACES = Path(__file__).parents[1] / "traces"
FILES = sorted(TRACES.glob("*/*.json"))


def loaded(name: str) -> dict[str, Any]:
    return json.loads((TRACES / name).read_text())


def test_all_traces_are_there() -> None:
    counts = {folder: sum(path.parent.name == folder for path in FILES) for folder in ("phased", "unified")}
    assert counts == {"phased": 65, "unified": 60}
    sizes = [loaded(f"phased/{path.name}")["ranks"] for path in FILES if path.parent.name == "phased"]
    assert all(f"-{size}r-" in path.name for size, path in zip(sizes, FILES, strict=False))
    assert set(sizes) == {1, 2, 3}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    trace = json.loads(path.read_text())
    records = replay(trace)
    assert first_difference(trace, records) is None
    assert all(len(of_rank) == len(trace["expected"]) == trace["steps"] for of_rank in records)


# ---- what is compared


@pytest.mark.parametrize("name", ["phased/plain-3r-1003", "phased/drafts-1r-5000", "unified/unified-100"])
def test_every_recorded_field_is_compared(name: str) -> None:
    trace = loaded(f"{name}.json")
    records = replay(trace)
    step = len(trace["expected"]) // 2
    expected = trace["expected"][step]
    rank = len(expected) - 1 if isinstance(expected, list) else 0
    record = expected[rank] if isinstance(expected, list) else expected
    assert len(record) >= 8
    for field, value in record.items():
        record[field] = "something else"
        assert (first_difference(trace, records) or "").startswith(f"step {step}, rank {rank}, {field}: ")
        record[field] = value
    assert first_difference(trace, records) is None


# ---- the command


def test_command_line() -> None:
    """As a user runs it; the rest calls `main`."""
    paths = [TRACES / "phased" / "plain-2r-1002.json", TRACES / "unified" / "unified-100.json"]
    command = [sys.executable, "-m", "dp_engine.replay", *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=TRACES.parents[1], timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "2 of 2 traces reproduced\n", "")


def test_a_difference_is_named_by_step_rank_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = loaded("phased/plain-2r-1002.json")
    record = trace["expected"][5][1]
    record["free_blocks"] += 1
    trace["expected"][6][0]["type"] = "neither"  # a later one
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(trace))
    assert main([str(wrong), str(TRACES / "unified" / "unified-100.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    right = record["free_blocks"] - 1
    assert lines == [
        f"{wrong}: step 5, rank 1, free_blocks: {right} instead of {right + 1}",
        "1 of 2 traces reproduced",
    ]


def test_other_settings_make_other_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = loaded("unified/unified-119.json")
    trace["config"]["max_num_seqs"] = 1
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(trace))
    assert main([str(changed)]) == 1
    assert "0 of 1 traces reproduced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "FileNotFoundError"),
        ("", "JSONDecodeError"),
        ("no trace", "JSONDecodeError"),
        ("{}", "KeyError: 'expected'"),
        ("[]", "TypeError"),
        ("17", "TypeError"),
        ('{"ranks": 1, "config": {}}', "KeyError"),
        ('{"ranks": 2, "config": {}, "events": [], "expected": []}', "KeyError"),
        ('{"config": {"policy": "random"}}', "KeyError"),
    ],
)
def test_what_is_no_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    path = tmp_path / "garbage.json"
    if text is not None:
        path.write_text(text)
    assert main([str(TRACES / "unified" / "unified-100.json"), str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{path}: cannot be replayed: {words}") and captured.err.count("\n") == 1


def test_bytes_that_are_no_text_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert main([str(path)]) == 2
    assert "cannot be replayed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"events": [[{"op": "fly", "id": 1, "rank": 0}]]},
        {"expected": [5, 6]},
        {"expected": []},
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(loaded("phased/plain-1r-1000.json") | change))
    assert main([str(path)]) == 2
    assert "cannot be replayed" in capsys.readouterr().err


def test_without_a_file_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == "usage: python -m dp_engine.replay FILE...\n"
