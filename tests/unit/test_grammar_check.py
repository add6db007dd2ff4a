"""Grammars are tried in a process that can be ended."""

import asyncio
import json

import pytest

from dp_engine.grammar import GrammarError
from dp_engine.messages import Grammar
from launcher import grammar_check
from launcher.grammar_check import GrammarChecker
from launcher.ticket import QueueFull
from tests.front_server import small_text

ENDLESS = Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 99999991}))  # minutes, and gigabytes
FINE = Grammar("json_object")


@pytest.fixture
def checker() -> GrammarChecker:
    return GrammarChecker(small_text().tokenizer_json, small_text().vocab_size)


def check(checker: GrammarChecker, grammar: Grammar) -> None:
    asyncio.run(checker.check(grammar))


def test_what_takes_too_long_is_stopped_and_the_next_one_goes_on(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(checker, FINE)
    first = checker._child
    assert first is not None
    monkeypatch.setattr(grammar_check, "COMPILE_S", 0.2)
    with pytest.raises(GrammarError, match=r"more than 0\.2 s"):
        check(checker, ENDLESS)
    assert first.poll() is not None
    monkeypatch.setattr(grammar_check, "COMPILE_S", 60.0)
    check(checker, Grammar("regex", "abc"))
    assert checker._child is not None and checker._child is not first


def test_the_child_ends_with_its_parent_even_while_it_compiles(checker: GrammarChecker) -> None:
    check(checker, FINE)
    child = checker._child
    assert child is not None and child.stdin is not None
    child.stdin.write(grammar_check._encode(ENDLESS) + b"\n")
    child.stdin.close()  # as the parent's end does
    assert child.wait(60) == 0


def test_an_answer_is_remembered(checker: GrammarChecker) -> None:
    wrong = Grammar("regex", "[a")
    check(checker, FINE)
    with pytest.raises(GrammarError, match="unclosed"):
        check(checker, wrong)
    assert checker._child is not None
    checker._end(checker._child)
    check(checker, FINE)
    with pytest.raises(GrammarError, match="unclosed"):
        check(checker, wrong)
    assert checker._child is None, "nobody had to ask again"


def test_a_child_that_was_killed_is_replaced(checker: GrammarChecker) -> None:
    check(checker, FINE)
    assert checker._child is not None
    checker._child.kill()
    checker._child.wait()
    with pytest.raises(GrammarError, match="has ended"):
        check(checker, Grammar("regex", "a"))
    check(checker, Grammar("regex", "a"))


def test_only_so_many_wait(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 3)

    async def many() -> list[BaseException | None]:
        grammars = [Grammar("regex", f"a{{{number}}}") for number in range(1, 6)]
        return await asyncio.gather(*map(checker.check, grammars), return_exceptions=True)

    outcomes = asyncio.run(many())
    assert [type(outcome) for outcome in outcomes] == [type(None)] * 3 + [QueueFull] * 2
