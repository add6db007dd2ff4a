"""`generate` below the command line: JSONL in, JSONL out."""

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dp_engine.messages import Add, Grammar
from launcher.config import ConfigError
from launcher.offline import DEFAULT_MAX_TOKENS, BadInput, generate_file, read_requests
from launcher.router import GangDown
from tests.front_server import FrontServer, small_text


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def echo(add: Add) -> Iterator[int] | str:
    """Answers with the prompt, long prompts later than short ones; rejects a prompt of three tokens."""
    if len(add.prompt) == 3:
        return "three is too many"
    return iter([*add.prompt, 1])


def generate(server: FrontServer, source: Path) -> tuple[list[dict[str, Any]], int]:
    output = io.StringIO()
    job = generate_file(server.service, read_requests(source), output)
    failed = asyncio.run_coroutine_threadsafe(job, server.loop).result(30)
    return [json.loads(line) for line in output.getvalue().splitlines()], failed


def test_answers_come_in_order(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"prompt": "a long first prompt that takes its time to be answered", "max_tokens": 100},
        {"prompt_token_ids": [5, 6], "id": "second"},
        "",
        {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "seed": 3},
        {"prompt_token_ids": [5, 6, 7]},
        {"prompt": "stop here and no further", "stop": " and", "priority": 4, "cache_salt": "me"},
    ]
    with FrontServer(reply=echo) as server:
        answers, failed = generate(server, write(tmp_path / "in.jsonl", *lines))
        assert [answer.get("text") for answer in answers] == [
            lines[0]["prompt"],
            small_text().decode([5, 6]),
            "user\nhi\nassistant\n",
            None,
            "stop here",
        ]
        assert answers[1]["id"] == "second"
        assert answers[1]["finish_reason"] == "stop"
        assert (answers[1]["prompt_tokens"], answers[1]["completion_tokens"]) == (2, 3)
        assert answers[3] == {"error": "three is too many"}
        assert failed == 1
        sampling = {len(add.prompt): add.sampling for rank in server.ranks for add in rank.adds}
        assert sampling[2].max_tokens == DEFAULT_MAX_TOKENS
        extras = [(add.priority, add.cache_salt) for rank in server.ranks for add in rank.adds]
        assert sorted(extras) == [*[(0, "")] * 4, (4, "me")]
        assert server.router.inflight == 0


def test_concurrency_is_bounded(tmp_path: Path) -> None:
    """More lines than the router takes at once are no error."""
    with FrontServer(max_inflight=5) as server:
        path = write(tmp_path / "in.jsonl", *[{"prompt": f"number {i}", "max_tokens": 3} for i in range(40)])
        answers, failed = generate(server, path)
        assert len(answers) == 40
        assert failed == 0
        assert sum(server.router.replicas[0].started) == 40


def test_empty_file_is_no_error(tmp_path: Path) -> None:
    with FrontServer(1) as server:
        assert generate(server, write(tmp_path / "in.jsonl", "")) == ([], 0)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ({"max_tokens": 5}, "exactly one of"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "exactly one of"),
        ({"prompt": "a", "temprature": 1}, "unknown parameter `temprature`"),
        ({"prompt": "a", "max_tokens": 0}, "`max_tokens`"),
        ({"prompt": "a", "cache_salt": ""}, "`cache_salt`"),
        ({"prompt": "a", "priority": "high"}, "`priority`"),
        ({"prompt": 5}, "`prompt`"),
        ('{"prompt": "\xff"', "not JSON"),
    ],
)
def test_bad_line_is_named_with_its_number(tmp_path: Path, line: Any, problem: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_requests(write(tmp_path / "in.jsonl", {"prompt": "fine"}, "", line))
    assert "in.jsonl, line 3: " in str(caught.value)
    assert problem in str(caught.value)


def test_many_bad_lines_are_shortened(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        read_requests(write(tmp_path / "in.jsonl", *["{"] * 25))
    assert len(str(caught.value).splitlines()) == 11
    assert str(caught.value).endswith("... and 15 more lines")


def test_prompt_that_does_not_fit_is_found_before_anything_runs(tmp_path: Path) -> None:
    wrong = [{"prompt_token_ids": [5] * 512}, {"prompt": ""}, {"prompt": "x", "stop_token_ids": [999]}]
    with FrontServer(1) as server:
        with pytest.raises(BadInput) as caught:
            generate(server, write(tmp_path / "in.jsonl", {"prompt": "fine"}, *wrong))
        assert [line.split(":")[0][-6:] for line in str(caught.value).splitlines()] == ["line 2", "line 3", "line 4"]
        assert server.ranks[0].adds == []


def test_gang_failure_ends_the_run(tmp_path: Path) -> None:
    with FrontServer(tick_s=0.01) as server:
        path = write(tmp_path / "in.jsonl", *[{"prompt": f"{i}", "max_tokens": 400} for i in range(9)])
        server.loop.call_soon_threadsafe(lambda: server.loop.call_later(0.2, server.router.fail, "rank 0 died"))
        with pytest.raises(GangDown, match="rank 0 died"):
            generate(server, path)


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.jsonl: No such file"):
        read_requests(tmp_path / "missing.jsonl")


def test_log_probabilities_and_forms(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"prompt": "abcab", "logprobs": 1, "structured_outputs": {"regex": "[a-c]+"}},
        {"prompt": "abcab"},
    ]
    with FrontServer(reply=echo) as server:
        answers, failed = generate(server, write(tmp_path / "in.jsonl", *lines))
        grammars = {add.sampling.grammar for rank in server.ranks for add in rank.adds}
    assert failed == 0 and grammars == {Grammar("regex", "[a-c]+"), None}
    assert "".join(entry["token"] for entry in answers[0]["logprobs"]) == answers[0]["text"] == "abcab"
    assert all(len(entry["top_logprobs"]) == 1 for entry in answers[0]["logprobs"])
    assert "logprobs" not in answers[1]


def test_forms_are_checked_before_anything_runs(tmp_path: Path) -> None:
    lines: list[Any] = [{"prompt": "a"}, {"prompt": "a", "structured_outputs": {"regex": "[a"}}]
    with FrontServer(reply=echo) as server:
        with pytest.raises(BadInput, match=r"line 2: this form cannot be used.*unclosed"):
            generate(server, write(tmp_path / "in.jsonl", *lines))
        assert not any(rank.adds for rank in server.ranks)
