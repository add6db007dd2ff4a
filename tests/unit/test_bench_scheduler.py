"""The scheduler benchmark: its load keeps N requests running, its figures are the schedulers' own, errors are told."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import scheduler as bench
from bench import schedulers
from bench.scheduler import Cost, Driven, Population
from bench.schedulers import OurScheduler, Request, Round, RunFailed

POPULATION = Population(running=6, per_round=4, turnover=True, tokens_on_arrival=1)


def report(waiting: dict[str, Any]) -> dict[str, Any]:
    costs = {"phased": Cost(50.0, 25.0), "unified": Cost(200.0, 30.0), "vllm": Cost(400.0, 0.0)}
    return {
        "steps": bench.step_rows("decode", 64, costs),
        "few_waiting": 20,
        "many_waiting": 20000,
        "waiting": waiting,
    }


def printed(figures: dict[str, Any]) -> list[list[str]]:
    """Rows of the tables as lists of cells."""
    output = io.StringIO()
    bench.print_tables(figures, Console(width=100, file=output))
    lines = [line for line in output.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


# ---- load


def test_requests_arrive_in_groups_then_one_for_each_that_ended() -> None:
    sizes = [len(POPULATION.arrivals(number)) for number in range(6)]
    assert sizes == [4, 2, 0, 1, 1, 1]
    assert [request.request_id for n in range(6) for request in POPULATION.arrivals(n)] == list(range(1, 10))


@pytest.mark.parametrize("tokens_on_arrival", [1, 2])
def test_one_request_ends_in_each_round_after_growth(tokens_on_arrival: int) -> None:
    population = Population(6, 4, True, tokens_on_arrival)
    ends = [
        number + request.max_tokens - tokens_on_arrival
        for number in range(12)
        for request in population.arrivals(number)
    ]
    assert ends == list(range(2, 2 + len(ends)))


def test_without_turnover_nobody_ends_or_follows() -> None:
    population = Population(6, 4, False, 1)
    arrivals = [request for number in range(50) for request in population.arrivals(number)]
    assert len(arrivals) == 6 and all(request.max_tokens == bench.FOR_EVER for request in arrivals)


@pytest.mark.parametrize("running", [1, 8, 64, 1024, 4096, 20000])
def test_a_group_fits_the_budget_beside_all_who_run(running: int) -> None:
    population = bench.population_for(running, True, False)
    budget = bench.shape_for(running, 100).budget
    assert population.per_round * bench.PROMPT_TOKENS + running <= budget
    assert population.growth >= min(running, bench.BLOCK_SIZE), "sequences are at all places of a block"


@pytest.mark.parametrize("policy", bench.POLICIES)
@pytest.mark.parametrize("turnover", [False, True])
def test_all_requests_run_in_every_round(policy: str, turnover: bool) -> None:
    with bench.grown({policy: lambda shape: OurScheduler(policy, shape)}, 8, 40, turnover) as [driven]:
        rounds = driven.run(40)
        assert [row.sequences for row in rounds] == [8] * 40
        prefills = [row.steps - 1 for row in rounds[1:]]  # nobody has ended before the first
        assert prefills == [int(turnover and policy == "phased")] * 39
        assert driven.scheduler.num_unfinished() == 8 - turnover


class Losing:
    """A scheduler that leaves one request out."""

    def run(self, rounds: list[list[Request]]) -> list[Round]:
        return [Round(1, 5, 1.0, 1.0, 1.0) for _ in rounds]


def test_a_round_without_all_requests_is_no_figure() -> None:
    with pytest.raises(RunFailed, match="vllm: 5 of 6 requests"):
        Driven("vllm", Losing(), POPULATION).cost(3)  # type: ignore[arg-type]


# ---- figures


def test_a_cost_is_the_median_per_step() -> None:
    class Two(Losing):
        def run(self, rounds: list[list[Request]]) -> list[Round]:
            return [Round(2, 6, 10.0 * number, 4.0, 2.0) for number in range(1, len(rounds) + 1)]

    assert Driven("phased", Two(), POPULATION).cost(3) == Cost(11.0, 2.0)  # type: ignore[arg-type]


def test_ratios_are_fractions_of_vllms_schedule_and_settle() -> None:
    rows = report({})["steps"]
    assert [row["ratio"] for row in rows] == [0.125, 0.5, None]
    assert [row["ratio_with_batch"] for row in rows] == [0.1875, 0.575, None]


def test_without_vllm_there_is_no_ratio() -> None:
    (row,) = bench.step_rows("decode", 64, {"phased": Cost(50.0, 25.0)})
    assert row["ratio"] is None and row["ratio_with_batch"] is None and row["batch_us"] == 25.0


def test_tables() -> None:
    keys = ("few_us", "many_us", "add_us", "abort_us", "bytes_each", "bytes_without_prompt")
    waiting = {"phased": dict(zip(keys, (51.4, 50.6, 9.87, 1.25, 2947.2, 899.0), strict=True))}
    assert printed(report(waiting)) == [
        ["decode", "64", "phased", "50", "25", "0.125x", "0.188x"],
        ["decode", "64", "unified", "200", "30", "0.500x", "0.575x"],
        ["decode", "64", "vllm", "400", "", "", ""],
        ["phased", "51", "51", "9.9", "1.2", "2947", "899"],
    ]


def test_without_a_queue_there_is_one_table() -> None:
    assert len(printed(report({}))) == 3


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "figures.json"
    arguments = ["--running", "8", "--steps", "3", "--repeat", "1", "--waiting", "30", "--json", str(path)]
    assert bench.main(arguments) == 0
    figures = json.loads(path.read_text())
    assert [(row["workload"], row["running"], row["engine"]) for row in figures["steps"]] == [
        (workload, 8, policy) for workload in ("decode", "+ prefill") for policy in bench.POLICIES
    ]
    assert all(row["schedule_settle_us"] > 0 and row["batch_us"] > 0 for row in figures["steps"])
    assert figures["vllm"] is None and list(figures["waiting"]) == list(bench.POLICIES)
    for row in figures["waiting"].values():
        assert min(row.values()) > 0 and row["bytes_each"] > row["bytes_without_prompt"] + bench.PROMPT_TOKENS
    assert "µs per step" in capsys.readouterr().out


# ---- the peer, played by a script

ANSWERS = """
import json, sys
print(json.dumps({"result": "0.0"}), flush=True)
for line in sys.stdin:
    handle, method, arguments = json.loads(line)
    if method == "open":
        running, result = arguments[0]["running"], None
    elif method == "run":
        result = [[1, running, 1e9, 0, 1e9]] * len(arguments[0])
    else:
        result = None
    FAULT
    print(json.dumps({"result": result}), flush=True)
"""


def run_with_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, *more: str) -> int:
    path = tmp_path / "peer.py"
    path.write_text(script)
    monkeypatch.setattr(schedulers, "PEER_SCRIPT", path)
    arguments = ["--running", "4", "--steps", "2", "--repeat", "1", "--waiting", "0", "--vllm-python", sys.executable]
    return bench.main([*arguments, *more])


def test_a_peer_is_measured_in_the_same_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert run_with_peer(monkeypatch, tmp_path, ANSWERS.replace("FAULT", ""), "--json", str(path)) == 0
    figures = json.loads(path.read_text())
    assert figures["vllm"] == "0.0"
    assert [row["schedule_settle_us"] for row in figures["steps"] if row["engine"] == "vllm"] == [2e9, 2e9]
    assert all(0 < row["ratio"] < row["ratio_with_batch"] < 1e-3 for row in figures["steps"] if row["engine"] != "vllm")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "print(json.dumps({'error': 'KeyError: 7'}), flush=True); continue",
            "vLLM's scheduler failed in open: KeyError: 7",
        ),
        ("sys.exit('out of memory')", "vLLM's process ended with status 1: \nout of memory"),
    ],
)
def test_a_peer_that_fails_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, said: str
) -> None:
    assert run_with_peer(monkeypatch, tmp_path, ANSWERS.replace("FAULT", fault)) == 1
    assert f"bench: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import no_such_vllm", "No module named 'no_such_vllm'"),
        ("print('hello', flush=True)", "it does not say why"),
    ],
)
def test_a_python_without_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, said: str
) -> None:
    assert run_with_peer(monkeypatch, tmp_path, script) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


# ---- wrong input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--running", "64", "0"], "argument --running: '0' is not a number above zero"),
        (["--steps", "many"], "argument --steps: 'many' is not a number above zero"),
        (["--waiting", "-1"], "argument --waiting: '-1' is not a number of requests"),
        (["--policy", "phased"], "unrecognized arguments: --policy phased"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"bench: {said}\n"


def test_a_python_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "python")
    assert bench.main(["--vllm-python", path]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"bench: cannot run {path}: No such file or directory"


def test_figures_that_cannot_be_written_are_found_out_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--json", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"bench: cannot write {tmp_path}: Is a directory\n"
