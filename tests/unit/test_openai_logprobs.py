"""Log-probabilities and forms of answers as the `openai` package sees them, streamed and whole."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from dp_engine.messages import LEAST_LOGPROB, Add, Grammar
from tests.fake_rank import logprobs_of
from tests.front_server import MODEL, FrontServer, small_text

ANSWER = "The capital of France is 🙂🚀, naïve."  # some characters are made of several tokens
QUESTION: list[Any] = [{"role": "user", "content": "Where?"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def ids(text: str) -> list[int]:
    return small_text().encode(text, 1000)


def answer(add: Add) -> Iterator[int]:
    """Says ANSWER and ends with the eos token, which is not to be shown."""
    del add
    yield from ids(ANSWER)
    yield 1


@pytest.fixture(scope="module", params=[1, 3], ids=["one-by-one", "bursts"])
def server(request: pytest.FixtureRequest) -> Iterator[FrontServer]:
    with FrontServer(reply=answer, burst=request.param) as server:
        yield server


@pytest.fixture
def client(server: FrontServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def last_add(server: FrontServer) -> Add:
    return max((add for rank in server.ranks for add in rank.adds), key=lambda add: add.request_id)


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=4)
    choice = reply.choices[0]
    assert choice.message.content == ANSWER
    assert choice.logprobs is not None and choice.logprobs.content is not None and choice.logprobs.refusal is None
    content = choice.logprobs.content
    assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == ANSWER
    assert [entry.logprob for entry in content] == [logprobs_of(token, 0).logprob for token in ids(ANSWER)]
    for entry, token in zip(content, ids(ANSWER), strict=True):
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].bytes == entry.bytes
        assert entry.top_logprobs[3].logprob == LEAST_LOGPROB
        assert [top.logprob for top in entry.top_logprobs] == [value for _, value in logprobs_of(token, 4).top]
    parts = [entry.token for entry in content if entry.token.startswith("\\x")]
    assert parts and parts[0] == "".join(f"\\x{byte:02x}" for byte in _entry_bytes(content, parts[0]))


def _entry_bytes(content: Any, token: str) -> list[int]:
    return next(entry.bytes for entry in content if entry.token == token)


def test_chat_streamed_is_the_same(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**ask).choices[0].logprobs.content
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**ask, stream=True):
        logprobs = chunk.choices[0].logprobs
        assert (logprobs is None) == (not chunk.choices[0].delta.content)
        streamed += logprobs.content if logprobs is not None else []
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in whole]


def test_chat_without_top_ones(client: openai.OpenAI, server: FrontServer) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True)
    assert last_add(server).sampling.logprobs == 0
    assert reply.choices[0].logprobs is not None
    assert all(entry.top_logprobs == [] for entry in reply.choices[0].logprobs.content or ())
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, top_logprobs=0)
    assert last_add(server).sampling.logprobs is None and reply.choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_completion(client: openai.OpenAI, stream: bool) -> None:
    reply: Any = client.completions.create(model=MODEL, prompt="x", max_tokens=100, logprobs=2, stream=stream)
    choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
    text = "".join(choice.text for choice in choices)
    found = [choice.logprobs for choice in choices]
    tokens = [token for logprobs in found for token in logprobs.tokens]
    offsets = [offset for logprobs in found for offset in logprobs.text_offset]
    values = [value for logprobs in found for value in logprobs.token_logprobs]
    tops = [top for logprobs in found for top in logprobs.top_logprobs]
    assert text == ANSWER and len(tokens) == len(offsets) == len(values) == len(tops) == len(ids(ANSWER))
    assert offsets == sorted(offsets) and offsets[0] == 0
    for token, offset, value, top in zip(tokens, offsets, values, tops, strict=True):
        assert text[offset:].startswith(token) or token.startswith("bytes:\\x")
        assert top[token] == value and len(top) == 2
    assert any(token.startswith("bytes:\\x") for token in tokens)


def test_completion_with_the_drawn_one_only(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="x", logprobs=0, max_tokens=3)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert logprobs.top_logprobs == [{t: v} for t, v in zip(logprobs.tokens, logprobs.token_logprobs, strict=True)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_them_too(client: openai.OpenAI, stream: bool) -> None:
    reply: Any = client.completions.create(
        model=MODEL, prompt="x", max_tokens=100, logprobs=0, stop=[" France is"], stream=stream
    )
    choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
    assert "".join(choice.text for choice in choices) == "The capital of"
    assert "".join(token for choice in choices for token in choice.logprobs.tokens) == "The capital of"


def test_choices_have_their_own(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=["x", "y"], n=2, max_tokens=5, logprobs=1)
    for choice in reply.choices:
        assert choice.logprobs is not None and "".join(choice.logprobs.tokens or ()) == choice.text


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Grammar("json_schema", json.dumps(SCHEMA)),
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, Grammar("json_object")),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, Grammar("json_schema", json.dumps(SCHEMA))),
        (
            {"extra_body": {"structured_outputs": {"json": '{"type":"null"}'}}},
            Grammar("json_schema", '{"type":"null"}'),
        ),
        ({"extra_body": {"structured_outputs": {"regex": "a+", "json": None}}}, Grammar("regex", "a+")),
        ({"extra_body": {"structured_outputs": {"choice": ["a", "ü"]}}}, Grammar("choice", '["a", "\\u00fc"]')),
        ({"extra_body": {"structured_outputs": {"grammar": 'root ::= "a"'}}}, Grammar("ebnf", 'root ::= "a"')),
        ({"extra_body": {"structured_outputs": {"json_object": True}}}, Grammar("json_object")),
    ],
)
def test_forms_reach_the_rank(
    client: openai.OpenAI, server: FrontServer, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    client.chat.completions.create(model=MODEL, messages=QUESTION, **fields)
    assert last_add(server).sampling.grammar == grammar
