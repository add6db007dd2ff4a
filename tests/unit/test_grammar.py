"""Grammars over a small real tokenizer: what is allowed when, replays, drafts, and what is refused."""

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dp_engine.grammar import MAX_CACHED, MAX_TEXT, GrammarError, Matcher, Vocabulary
from dp_engine.messages import Grammar
from tests.tokenizers import write_tokenizer

EOS = 1
SIZE = 330  # the model's vocabulary is larger than the tokenizer's
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON = Grammar("json_schema", json.dumps(SCHEMA))


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        return Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer().to_str(), SIZE, [EOS])


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def allowed(matcher: Matcher) -> set[int]:
    masks = np.zeros((1, matcher.width), np.int32)
    matcher.fill(masks, 0, [])
    return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist())


def write(matcher: Matcher, seed: int, limit: int = 200) -> list[int]:
    """Tokens of a model that says anything that is allowed."""
    rng, tokens = np.random.default_rng(seed), []
    while EOS not in tokens and len(tokens) < limit:
        tokens.append(int(rng.choice(sorted(allowed(matcher)))))
        assert matcher.take(tokens[-1:]) == 1 and not matcher.failed
    return tokens


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_said_fits_the_schema(seed: int) -> None:
    tokens = write(vocabulary().matcher(PERSON), seed)
    assert tokens[-1] == EOS
    person = json.loads(tokenizer().decode(tokens[:-1]))
    assert list(person) == ["name", "age"]
    assert isinstance(person["name"], str) and len(person["name"]) <= 5
    assert type(person["age"]) is int


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        (Grammar("json_object"), lambda text: isinstance(json.loads(text), dict)),
        (Grammar("regex", r"[a-c]{2,4}-\d+"), lambda text: re.fullmatch(r"[a-c]{2,4}-[0-9]+", text)),
        (Grammar("choice", '["yes", "no \\"x\\"", "🙂"]'), lambda text: text in ("yes", 'no "x"', "🙂")),
        (Grammar("ebnf", 'root ::= "a" root "b" | "x"'), lambda text: re.fullmatch(r"(a*)x(b*)", text)),
        (Grammar("ebnf", 'start: "a" start "b" | "x"'), lambda text: text.count("a") == text.count("b")),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_kinds(grammar: Grammar, fits: object) -> None:
    assert callable(fits)
    for seed in range(5):
        tokens = write(vocabulary().matcher(grammar), seed, limit=3000)
        if tokens[-1] == EOS:
            assert fits(tokenizer().decode(tokens[:-1])), tokens
        else:
            assert grammar.kind in ("json_object", "regex", "ebnf")  # these have no longest output


def test_the_end_is_allowed_where_the_grammar_ends_and_only_there() -> None:
    matcher = vocabulary().matcher(Grammar("regex", "ab(cd)?"))
    ends = []
    for character in "abcd":
        ends.append(EOS in allowed(matcher))
        assert matcher.take(ids(character)) == 1
    assert ends == [False, False, True, False]
    assert allowed(matcher) == {EOS}
    assert matcher.take([EOS]) == 1 and not matcher.failed


def test_white_space_ends() -> None:
    """A model with nothing to say goes on with it otherwise until its tokens are spent."""
    matcher = vocabulary().matcher(Grammar("json_object"))
    assert matcher.take(ids("{") + [token for _ in range(16) for token in ids(" ")]) == 17
    assert not allowed(matcher) & {*ids(" "), *ids("\n")}


def test_only_tokens_of_the_tokenizer_are_allowed() -> None:
    """Not the rows that a model has beyond them, and no special ones."""
    seen = allowed(vocabulary().matcher(Grammar("regex", "(?s:.)*")))
    assert max(seen) < tokenizer().get_vocab_size() and seen & {0, 1, 2} == {EOS}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 50), st.data())
def test_behind_what_was_emitted_it_goes_on_as_if_nothing_had_been(seed: int, data: st.DataObject) -> None:
    tokens = write(vocabulary().matcher(PERSON), seed)[:-1]
    cut = data.draw(st.integers(0, len(tokens)))
    undisturbed = vocabulary().matcher(PERSON)
    undisturbed.take(tokens[:cut])
    resumed = vocabulary().matcher(PERSON, tokens[:cut])
    assert not resumed.failed and allowed(resumed) == allowed(undisturbed)
    assert write(resumed, seed) == write(undisturbed, seed)


def test_what_does_not_fit_fails() -> None:
    matcher = vocabulary().matcher(PERSON, ids('{"nome'))
    assert matcher.failed
    matcher = vocabulary().matcher(PERSON)
    right = ids('{"name')
    assert matcher.take([*right, EOS, *right]) == len(right) and matcher.failed


def test_masks_behind_drafts_are_those_behind_the_same_tokens() -> None:
    text = ids('{"name": "ab", "age": 7}')
    for cut in range(len(text)):
        matcher = vocabulary().matcher(PERSON, text[:cut])
        drafts = text[cut : cut + 4]
        assert matcher.fitting([*drafts, EOS] if cut + 4 < len(text) else drafts) == len(drafts)
        masks = np.zeros((1 + len(drafts), matcher.width), np.int32)
        matcher.fill(masks, 0, drafts)
        for number in range(len(drafts) + 1):
            again = np.zeros((1, matcher.width), np.int32)
            vocabulary().matcher(PERSON, text[: cut + number]).fill(again, 0, [])
            assert (masks[number] == again[0]).all()
        assert matcher.take(text[cut:]) == len(text) - cut, "the drafts have left a trace"


def test_drafts_are_cut_before_the_first_that_does_not_fit_and_before_the_end() -> None:
    matcher = vocabulary().matcher(Grammar("regex", "abc*"))
    a, b, c, x = (ids(character)[0] for character in "abcx")
    assert matcher.fitting([a, b, x, c]) == 2
    assert matcher.fitting([x, a]) == 0
    assert matcher.fitting([a, b, c, EOS]) == 3


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", '{"type": "objekt"}'), "Invalid type: objekt"),
        (Grammar("json_schema", "no json"), "expected"),
        (Grammar("json_schema", '{"properties": ' * 300), "recursion|EOF|expected"),
        (Grammar("regex", "[a"), "unclosed"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("ebnf", 'root ::= "a'), "GBNF"),
        (Grammar("ebnf", ""), "root"),
        (Grammar("regex", "a" * (MAX_TEXT + 1)), "characters"),
        (Grammar("json_schema", '{"type": "object", "properties": {"\\ud800": {}}}'), "."),
    ],
)
def test_what_cannot_be_used(grammar: Grammar, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        vocabulary().check(grammar)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300


def test_a_grammar_that_becomes_too_complex_fails_its_own_output() -> None:
    """No token of it is taken any more, whatever was drawn; it takes milliseconds, not for ever."""
    matcher = vocabulary().matcher(Grammar("regex", "((a{1,100}){1,100}){1,100}"))
    for _ in range(2000):
        allowed(matcher)
        if not matcher.take(ids("a")):
            break
    assert matcher.failed and matcher.take(ids("a")) == 0
    assert len(allowed(matcher)) > SIZE / 2, "the row of a failed matcher is not masked: nothing is drawn from nothing"


def test_many_grammars_are_not_all_kept() -> None:
    own = Vocabulary(tokenizer().to_str(), SIZE, [EOS])
    for number in range(MAX_CACHED + 5):
        own.matcher(Grammar("regex", f"a{{{number + 1}}}"))
    assert len(own._compiled) == MAX_CACHED


def test_a_model_without_an_end_or_a_strange_tokenizer() -> None:
    with pytest.raises(GrammarError, match="ends an output"):
        Vocabulary(tokenizer().to_str(), SIZE, [])
    with pytest.raises(GrammarError, match="tokenizer cannot be used"):
        Vocabulary("{}", SIZE, [EOS])
    with TemporaryDirectory() as directory, pytest.raises(GrammarError, match=r"no tokenizer\.json"):
        Vocabulary.load(Path(directory), SIZE, [EOS])
