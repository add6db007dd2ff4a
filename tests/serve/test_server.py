"""Real servers of two ranks and real clients: answers, load, metrics, clients that leave, bad input, idleness, and what
the schedulers do for them.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.server import Server, wait_until


def total(server: Server, name: str) -> float:
    """A metric, all ranks together."""
    return sum(value for sample, value in server.metrics().items() if sample.startswith(name + "{"))


def unfinished(server: Server) -> float:
    return sum(total(server, f"phalanx_requests_{state}") for state in ("running", "waiting", "inflight"))


def assert_drained(server: Server) -> None:
    """Nothing running or waiting, every block free."""
    wait_until(lambda: unfinished(server) == 0, 10, "drained")
    assert all(value == 0 for name, value in server.metrics().items() if name.startswith("phalanx_kv_blocks_used"))


def test_ready_line_names_url_model_and_ranks(server: Server) -> None:
    ready = [line for line in server.lines if line.startswith("ready")]
    assert len(ready) == 1 and "2 ranks" in ready[0] and "model tiny" in ready[0]
    assert [line for line in server.lines if line.startswith("try    curl http://127.0.0.1:")]
    assert not [line for line in server.lines if "ray" in line.lower() and "starting Ray" not in line], server.output


def test_greedy_tokens_equal_transformers_over_http(server: Server, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [[5, 9, 40, 200, 17], list(range(30, 75)), [7], [300 - i for i in range(90)]]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, 12, ignore_eos=True), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert answer["choices"][0]["text"] == tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(prompt), 12)


def test_openai_package_streams_what_it_answers_whole(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "capital of France"}]}
        whole = client.chat.completions.create(**ask, temperature=0, max_tokens=24)  # type: ignore[call-overload]
        pieces = client.chat.completions.create(**ask, temperature=0, max_tokens=24, stream=True)  # type: ignore[call-overload]
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        assert streamed == whole.choices[0].message.content
        assert whole.usage.completion_tokens <= 24
        assert [model.id for model in client.models.list()] == ["tiny"]


def test_forms_and_log_probabilities(server: Server) -> None:
    """Random weights write what a schema says; log-probabilities are those of the model, which would not."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    messages: list[Any] = [{"role": "user", "content": "capital of France"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        ask: Any = {"model": "tiny", "messages": messages, "seed": 3, "logprobs": True, "top_logprobs": 2}
        whole = client.chat.completions.create(**ask, n=3, response_format=form)
        pieces = client.chat.completions.create(**ask, response_format=form, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content)["city"] in ("Paris", "Rome")
        entries = choice.logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        assert any(entry.logprob < entry.top_logprobs[1].logprob for entry in entries)
    assert streamed == whole.choices[0].message.content
    greedy = server.complete([5, 6, 7], 6, ignore_eos=True, logprobs=1)["choices"][0]["logprobs"]
    assert all(list(top.values()) == [value] for top, value in zip(*list(greedy.values())[2:0:-1], strict=True))
    assert_drained(server)


def test_seeded_samples_repeat_whatever_else_runs(server: Server) -> None:
    ask = {"temperature": 1.0, "seed": 42, "ignore_eos": True}
    alone = server.complete([3, 4, 5, 6], 20, **ask)["choices"][0]["text"]
    with ThreadPoolExecutor(12) as pool:
        noise = [pool.submit(server.complete, [9, i + 2], 30, temperature=1.0) for i in range(8)]
        again = [pool.submit(server.complete, [3, 4, 5, 6], 20, **ask) for _ in range(4)]
        assert {future.result()["choices"][0]["text"] for future in again} == {alone}
        assert all(future.result() for future in noise)
    others = {server.complete([3, 4, 5, 6], 20, **(ask | {"seed": seed}))["choices"][0]["text"] for seed in range(4)}
    assert len(others | {alone}) == 5


def test_32_requests_are_shared_out_evenly(server: Server) -> None:
    before = server.metrics()
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda i: server.complete([i + 2] * 16, 64, ignore_eos=True), range(32)))
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [64] * 32
    after = server.metrics()
    for rank in (0, 1):
        name = f'phalanx_requests_started_total{{gang="0",rank="{rank}"}}'
        assert 14 <= after[name] - before[name] <= 18
    assert_drained(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted(server: Server, stream: bool) -> None:
    body = {"model": "tiny", "prompt": [5] * 8, "max_tokens": 4000, "ignore_eos": True, "stream": stream}

    def leave() -> None:
        with httpx.Client(timeout=0.5 if not stream else 30) as client:
            if not stream:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{server.url}/v1/completions", json=body)
                return
            with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                next(response.iter_lines())

    tokens = server.metrics()['phalanx_generated_tokens_total{gang="0",rank="0"}']
    threads = [threading.Thread(target=leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_drained(server)
    assert server.metrics()['phalanx_generated_tokens_total{gang="0",rank="0"}'] - tokens < 2 * 4000


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b"{not json", 400, None),
        ("/v1/completions", b"[1]", 400, None),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "surprise": 1}, 400, "surprise"),
        ("/v1/completions", {"model": "tiny", "prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": [99999]}, 400, "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": [5] * 4096}, 400, "prompt"),
        ("/v1/completions", {"model": "gpt-9", "prompt": "x"}, 404, "model"),
        ("/v1/chat/completions", {"model": "tiny", "messages": "hello"}, 400, "messages"),
        ("/v1/nothing", {}, 404, None),
    ],
)
def test_bad_requests_get_a_4xx_and_the_server_goes_on(
    server: Server, path: str, body: object, status: int, param: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = httpx.post(f"{server.url}{path}", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status
    error = response.json()["error"]
    assert error["message"] and set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert server.complete("still there", 2)["usage"]["completion_tokens"] == 2


def test_probes_and_metrics(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    server.complete("hello", 8, ignore_eos=True)
    wait_until(lambda: unfinished(server) == 0, 5, "asleep")
    metrics = server.metrics()
    for rank in (0, 1):
        assert metrics[f'phalanx_steps_total{{gang="0",rank="{rank}",type="decode"}}'] > 0
        assert metrics[f'phalanx_steps_total{{gang="0",rank="{rank}",type="prefill"}}'] > 0
        assert metrics[f'phalanx_placeholder_steps_total{{gang="0",rank="{rank}"}}'] > 0
        assert metrics[f'phalanx_ballot_seconds_count{{gang="0",rank="{rank}"}}'] > 0
    steps = [metrics[f'phalanx_steps_total{{gang="0",rank="{rank}",type="decode"}}'] for rank in (0, 1)]
    assert steps[0] == steps[1], "ranks take every step together"


def test_an_idle_gang_burns_nothing_and_wakes_at_once(server: Server) -> None:
    """Asleep: no timer, no collective. Awake again: the first request is served as by a warm gang."""
    ask = {"ignore_eos": True}
    server.complete([5] * 20, 4, **ask)
    assert_drained(server)
    ranks = [psutil.Process(pid) for pid in server.rank_pids()]
    assert len(ranks) == 2
    before = sum(sum(process.cpu_times()[:2]) for process in ranks)
    time.sleep(5)
    used = sum(sum(process.cpu_times()[:2]) for process in ranks) - before
    assert used / 5 < 0.03, f"{used / 5:.1%} of a core while idle"
    assert server.complete([5] * 20, 4, **ask)["usage"]["completion_tokens"] == 4


def test_sleep_and_wake_up_never_lose_a_request(server: Server) -> None:
    """One request to a random rank 0-5 ms after the last one ended."""
    with httpx.Client(timeout=30) as client:
        for i in range(150):
            body = {"model": "tiny", "prompt": [7, 8, i % 250 + 2], "max_tokens": 1 + i % 3}
            assert client.post(f"{server.url}/v1/completions", json=body).status_code == 200
            time.sleep((i * 7 % 50) / 10_000)
    assert_drained(server)


# ---- what the schedulers do


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_choices_of_one_prompt_share_its_kv(server: Server) -> None:
    prompt, ask = list(range(40, 60)), {"ignore_eos": True}
    alone = texts(server.complete(prompt, 12, **ask))
    before = total(server, "phalanx_forks_total")
    assert texts(server.complete(prompt, 12, n=3, **ask)) == alone * 3
    wait_until(lambda: total(server, "phalanx_forks_total") == before + 2, 5, "two forks counted")
    drawn = texts(server.complete(prompt, 12, n=3, temperature=1.0, seed=7, **ask))
    assert drawn == [texts(server.complete(prompt, 12, temperature=1.0, seed=7 + k, **ask))[0] for k in range(3)]
    assert_drained(server)


def test_prefixes_are_shared_within_a_salt_until_they_are_forgotten(server: Server) -> None:
    """The first two of a kind go to different ranks, so the third finds its 32 tokens (two blocks) wherever it goes."""
    prompt = list(range(100, 140))
    hits = [total(server, "phalanx_prefix_hit_tokens_total")]

    def ask_thrice(**more: str) -> float:
        """Tokens found."""
        queries = total(server, "phalanx_prefix_query_tokens_total")
        assert len({texts(server.complete(prompt, 8, ignore_eos=True, **more))[0] for _ in range(3)}) == 1
        wait_until(lambda: total(server, "phalanx_prefix_query_tokens_total") == queries + 120, 5, "counted")
        hits.append(total(server, "phalanx_prefix_hit_tokens_total"))
        return hits[-1] - hits[-2]

    assert ask_thrice() == 32
    assert ask_thrice() == 96
    assert ask_thrice(cache_salt="mine") == 32
    assert server.post("/reset_prefix_cache", {}).status_code == 200
    assert ask_thrice() == 32


def test_a_pause_holds_requests_where_they_are(server: Server) -> None:
    ask = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
    whole = texts(server.complete([5, 6, 7], 4000, ignore_eos=True))
    pieces: list[str] = []
    started = threading.Event()

    def read() -> None:
        for event in server.stream("/v1/completions", ask):
            pieces.append(event["choices"][0]["text"])
            started.set()

    sleeps = total(server, "phalanx_idle_sleeps_total")
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(read)
        assert started.wait(10)
        try:
            assert server.post("/pause", {"mode": "all"}).json() == {"mode": "all"}
            waiting = pool.submit(server.complete, [9, 9], 4)
            wait_until(lambda: total(server, "phalanx_requests_waiting") == 1, 10, "one waits")
            wait_until(lambda: total(server, "phalanx_idle_sleeps_total") > sleeps, 5, "the gang sleeps")
            generated = total(server, "phalanx_generated_tokens_total")
            time.sleep(0.5)
            assert total(server, "phalanx_generated_tokens_total") == generated
            assert total(server, "phalanx_requests_running") == 1
            assert not running.done() and not waiting.done()
            assert httpx.get(f"{server.url}/ready").json()["paused"] == "all"
        finally:
            assert server.post("/resume", {}).json() == {"mode": "none"}
        assert waiting.result(20)["usage"]["completion_tokens"] == 4
        running.result(20)
    assert ["".join(pieces)] == whole
    assert_drained(server)


@pytest.mark.slow  # the default run compares them over gloo, without a server
@pytest.mark.parametrize(
    ("settings", "sign"),
    [
        (
            ("engine.overlap=true", "engine.num_draft_tokens=3", "engine.draft_ngram_min=1"),
            'phalanx_accepted_draft_tokens_total{{gang="0",rank="{rank}"}}',
        ),
        (("engine.policy=unified",), 'phalanx_steps_total{{gang="0",rank="{rank}",type="mixed"}}'),
    ],
    ids=["overlap-drafts", "unified"],
)
def test_other_schedulers_give_the_same_texts(
    server: Server, checkpoint: Path, settings: tuple[str, ...], sign: str
) -> None:
    """`sign`: what shows that it is another one."""
    prompts = [[7, 9, 11] * 8, list(range(30, 75)), [300 - i for i in range(90)], [4]]
    asks: list[dict[str, Any]] = [{}, {"n": 3}, {"temperature": 0.8, "seed": 5, "top_p": 0.9}]
    jobs = [(prompt, ask | {"ignore_eos": True}) for prompt in prompts for ask in asks]

    def answers(one: Server) -> list[list[str]]:
        with ThreadPoolExecutor(len(jobs)) as pool:
            return list(pool.map(lambda job: texts(one.complete(job[0], 40, **job[1])), jobs))

    with Server("--model", str(checkpoint), *(word for setting in settings for word in ("--set", setting))) as other:
        assert answers(other) == answers(server)
        assert_drained(other)
        metrics = other.metrics()
        assert sum(metrics[sign.format(rank=rank)] for rank in (0, 1)) > 0
        assert total(other, "phalanx_forks_total") == 2 * 3  # a prompt of one token has nothing to share
