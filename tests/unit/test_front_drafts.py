"""Answers whose tokens come several at a time, as accepted drafts do."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from dp_engine.messages import Add
from launcher.books import Load
from tests.fake_gang import link_of
from tests.front_server import MODEL, FrontServer, small_text

ANSWER = "One café, two cafés, three cafés 🙂 and so on."
IDS = small_text().encode(ANSWER, 1000)


def answer(add: Add) -> Iterator[int]:
    """Says ANSWER, then eos; forks say it twice."""
    yield from IDS * (2 if add.parent else 1)
    yield 1


@pytest.fixture(scope="module", params=[2, 5, 1000])
def server(request: pytest.FixtureRequest) -> Iterator[FrontServer]:
    with FrontServer(reply=answer, burst=request.param) as server:
        yield server


@pytest.fixture
def client(server: FrontServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_text_and_usage(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="x", max_tokens=300)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (ANSWER, "stop")
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(IDS) + 1


def test_stream_and_usage(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(client.completions.create(
        model=MODEL, prompt="x", max_tokens=300, stream=True, stream_options=options
    ))  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == ANSWER
    assert all("\ufffd" not in chunk.choices[0].text for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(IDS) + 1


def test_max_tokens_hold(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="x", max_tokens=7)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (small_text().decode(IDS[:7]), "length")
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 7


def test_stop_string_ends_all_choices_and_frees_their_rank(client: openai.OpenAI, server: FrontServer) -> None:
    reply = client.completions.create(model=MODEL, prompt="x", max_tokens=300, n=3, stop=" two")
    assert [(choice.text, choice.finish_reason) for choice in reply.choices] == [("One café,", "stop")] * 3
    upto = next(n for n in range(len(IDS)) if " two" in small_text().decode(IDS[:n]))
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3 * upto
    assert link_of(server.router).books.loads == [Load(0, 0)] * 2


def test_a_choice_that_ends_early_leaves_its_forks_alone(client: openai.OpenAI, server: FrontServer) -> None:
    """The first choice, the parent, says its answer once; the others go on."""
    reply = client.completions.create(model=MODEL, prompt="x", max_tokens=300, n=3)
    assert [choice.text for choice in reply.choices] == [ANSWER, ANSWER * 2, ANSWER * 2]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5 * len(IDS) + 3
    assert link_of(server.router).books.loads == [Load(0, 0)] * 2
