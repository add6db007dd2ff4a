"""The `openai` package, unchanged, against the front over a real socket."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from dp_engine.messages import Add
from launcher.front.schemas import COMPLETION_TOKENS
from tests.fake_gang import link_of
from tests.front_server import MODEL, FrontServer, small_text

ANSWER = "The capital of France is Paris 🙂 and it is café time."
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def ids(text: str) -> list[int]:
    return small_text().encode(text, 1000)


def answer(add: Add) -> Iterator[int]:
    """Says ANSWER and ends with the eos token, which is not to be shown."""
    del add
    yield from ids(ANSWER)
    yield 1


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with FrontServer(reply=answer) as server:
        yield server


@pytest.fixture
def client(server: FrontServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def last_add(server: FrontServer) -> Add:
    return max((add for rank in server.ranks for add in rank.adds), key=lambda add: add.request_id)


def test_chat(client: openai.OpenAI, server: FrontServer) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    add = last_add(server)
    prompt = ids("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert add.prompt == prompt
    assert add.sampling.temperature == 0
    assert add.sampling.max_tokens == 512 - len(prompt)  # all the room there is
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == len(ids(ANSWER)) + 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_chat_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == ANSWER
    assert "\ufffd" not in "".join(texts)
    assert sum(text != "" for text in texts) > 5  # it came bit by bit
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids(ANSWER)) + 1


def test_text_parts_and_all_roles(client: openai.OpenAI, server: FrontServer) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "S"},
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "text", "text": "U1"}, {"type": "text", "text": "U2"}], "name": "me"},
        {"role": "assistant", "content": "A", "refusal": None, "tool_calls": None, "audio": None},
        {"role": "tool", "content": "T", "tool_call_id": "x"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages)
    prompt = small_text()._tokenizer.decode(last_add(server).prompt)
    roles = [("system", "S"), ("developer", "D"), ("user", "U1\nU2"), ("assistant", "A"), ("tool", "T")]
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in roles)
    assert prompt == turns + "<|im_start|>assistant\n"


def test_completion(client: openai.OpenAI, server: FrontServer) -> None:
    reply = client.completions.create(model=MODEL, prompt="The capital")
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].text == small_text().decode(ids(ANSWER)[:COMPLETION_TOKENS])
    sampling = last_add(server).sampling
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)  # the checkpoint's generation_config.json
    assert sampling.max_tokens == COMPLETION_TOKENS


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("one", [ids("one")]),
        (["one", "two"], [ids("one"), ids("two")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_prompt_kinds(client: openai.OpenAI, server: FrontServer, prompt: Any, sent: list[list[int]]) -> None:
    before = {add.request_id for rank in server.ranks for add in rank.adds}
    reply = client.completions.create(model=MODEL, prompt=prompt, max_tokens=100)
    new = [add for rank in server.ranks for add in rank.adds if add.request_id not in before]
    assert sorted(add.prompt for add in new) == sorted(sent)
    assert [choice.index for choice in reply.choices] == list(range(len(sent)))
    assert all(choice.text == ANSWER for choice in reply.choices)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(map(len, sent))


def test_several_choices_have_seeds_of_their_own(client: openai.OpenAI, server: FrontServer) -> None:
    before = {add.request_id for rank in server.ranks for add in rank.adds}
    client.completions.create(model=MODEL, prompt="x", n=3, seed=41)
    client.completions.create(model=MODEL, prompt="x", n=3)
    adds = sorted((add for rank in server.ranks for add in rank.adds), key=lambda add: add.request_id)
    seeds = [add.sampling.seed for add in adds if add.request_id not in before]
    assert seeds[:3] == [41, 42, 43]
    assert len(set(seeds[3:])) == 3


def test_choices_of_a_prompt_are_forks_at_one_rank(client: openai.OpenAI, server: FrontServer) -> None:
    """Two prompts, two ranks: the books spread prompts, never the choices of one."""
    before = {add.request_id for rank in server.ranks for add in rank.adds}
    extra = {"cache_salt": "s", "priority": 5}
    reply = client.completions.create(model=MODEL, prompt=["x y z", "w"], n=3, max_tokens=100, extra_body=extra)
    assert [choice.text for choice in reply.choices] == [ANSWER] * 6
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(ids("x y z")) + len(ids("w"))
    groups = [[add for add in rank.adds if add.request_id not in before] for rank in server.ranks]
    for first, *forks in groups:
        assert first.parent == 0
        assert [(add.parent, add.prompt) for add in forks] == [(first.request_id, first.prompt)] * 2
        assert {(add.cache_salt, add.priority) for add in (first, *forks)} == {("s", 5)}
    assert sorted(group[0].prompt for group in groups) == sorted([ids("x y z"), ids("w")])
    assert [(load.prefill, load.decode) for load in link_of(server.router).books.loads] == [(0, 0)] * 2


def test_choices_of_a_stream_are_whole(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in client.completions.create(model=MODEL, prompt=["x", "y"], n=2, stream=True, max_tokens=100):
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys(range(4), ANSWER)
    assert ends == dict.fromkeys(range(4), "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_cuts_and_frees_the_rank(client: openai.OpenAI, server: FrontServer, stream: bool) -> None:
    stop = ["nowhere", " Paris"]
    reply: Any = client.completions.create(model=MODEL, prompt="x", max_tokens=100, stop=stop, stream=stream)
    choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
    assert "".join(choice.text for choice in choices) == "The capital of France is"
    assert choices[-1].finish_reason == "stop"
    assert server.router.inflight == 0
    if not stream:
        assert reply.usage.completion_tokens < len(ids(ANSWER))


def test_extensions_reach_the_rank(client: openai.OpenAI, server: FrontServer) -> None:
    extra = {"top_k": 7, "ignore_eos": True, "stop_token_ids": [9, 10], "priority": -3, "cache_salt": "tenant 7 🙂"}
    client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0.7, top_p=0.8, seed=-1, max_completion_tokens=5, extra_body=extra
    )
    add = last_add(server)
    sampling = add.sampling
    assert (add.priority, add.cache_salt) == (-3, "tenant 7 🙂")
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.8, 7)
    assert (sampling.ignore_eos, sampling.stop_token_ids, sampling.max_tokens) == (True, (9, 10), 5)
    assert sampling.seed == (1 << 64) - 1


def test_top_p_zero_is_greedy(client: openai.OpenAI, server: FrontServer) -> None:
    client.completions.create(model=MODEL, prompt="x", top_p=0)
    assert last_add(server).sampling.temperature == 0


def test_neutral_values_of_unserved_parameters(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        logprobs=False,
        n=1,
        response_format={"type": "text"},
        tools=[],
        user="someone",
        metadata={"a": "b"},
    )
    assert reply.choices[0].message.content == ANSWER


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "phalanx"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


def test_context_length_error_is_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * 512)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    assert client.completions.create(model=MODEL, prompt=[5] * 511).choices[0].finish_reason == "length"


def test_many_at_once(server: FrontServer) -> None:
    """32 clients at a time, half of them streaming; every one gets its own answer and both ranks serve half."""

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        if number % 2:
            reply = await client.chat.completions.create(model=MODEL, messages=QUESTION, seed=number)
            return reply.choices[0].message.content or ""
        stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, seed=number, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    started = list(server.router.replicas[0].started)
    assert asyncio.run(all_of_them()) == [ANSWER] * 32
    shares = [now - before for now, before in zip(server.router.replicas[0].started, started, strict=True)]
    assert sum(shares) == 32
    assert all(14 <= share <= 18 for share in shares)
    assert server.router.inflight == 0
