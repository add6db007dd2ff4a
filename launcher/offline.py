"""`phalanx generate`: requests from a JSONL file, answers to another, in the same order."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import msgspec
from pydantic import Field, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from launcher.config import ConfigError
from launcher.errors import RequestError
from launcher.front.errors import ApiError
from launcher.front.logprobs import TokenLogprob, chat_logprobs
from launcher.front.replies import join
from launcher.front.schemas import MAX_TOP_LOGPROBS, Message, SamplingFields, validate
from launcher.service import Params, Service
from launcher.ticket import RequestPoisoned, RequestRejected

SHOWN_PROBLEMS = 10
CONCURRENCY = 256  # requests in flight
DEFAULT_MAX_TOKENS = 256  # of a line that names none


class BadInput(ConfigError):
    """Lines of the input cannot be used; the message has a line for each, up to ten."""

    def __init__(self, path: Path, problems: Sequence[tuple[int, str]]) -> None:
        lines = [f"{path}, line {number}: {problem}" for number, problem in problems[:SHOWN_PROBLEMS]]
        if len(problems) > SHOWN_PROBLEMS:
            lines.append(f"... and {len(problems) - SHOWN_PROBLEMS} more lines")
        super().__init__("\n".join(lines))


class _Line(SamplingFields):
    """One request: a text, a conversation or token ids, and sampling parameters. `id` comes back in the answer.
    `logprobs`: how many of the likeliest tokens are told beside each one's own log-probability."""

    id: str | int | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _has_one_prompt(self) -> "_Line":
        if sum(value is not None for value in (self.prompt, self.messages, self.prompt_token_ids)) != 1:
            raise ValueError("exactly one of `prompt`, `messages` and `prompt_token_ids` is needed")
        return self

    def params(self) -> Params:
        params = super().params()
        return replace(params, max_tokens=params.max_tokens or DEFAULT_MAX_TOKENS, logprobs=self.logprobs)


@dataclass(frozen=True)
class Requests:
    """The lines of a file, checked by schema; `numbers` are their line numbers, from 1."""

    path: Path
    numbers: list[int]
    lines: list[_Line]


class Answer(msgspec.Struct, omit_defaults=True):
    """One line of the output. Either `error` is set or all the rest."""

    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    id: str | int | None = None
    logprobs: list[TokenLogprob] | None = None  # as in OpenAI's chat answers


def read_requests(path: Path) -> Requests:
    """Read and check a file; empty lines are skipped. Raises ConfigError, for wrong lines BadInput."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    numbers, lines, problems = [], [], []
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        try:
            body = json.loads(text)
            if not isinstance(body, dict):
                raise ApiError(400, "must be a JSON object")
            lines.append(validate(_Line, body))
            numbers.append(number)
        except ApiError as error:
            problems.append((number, error.message))
        except (ValueError, RecursionError) as error:
            problems.append((number, f"not JSON: {error}"))
    if problems:
        raise BadInput(path, problems)
    return Requests(path, numbers, lines)


async def generate_file(service: Service, requests: Requests, output: TextIO, *, console: Console | None = None) -> int:
    """Write the answers in the order of the requests, each as soon as those before it are written.

    A request that a rank rejects gets an answer with `error`; returns the number of these. Raises BadInput before
    anything runs when a prompt does not fit the model, and GangDown when the ranks fail; what was written stays.
    Progress is shown on `console` if that is a terminal.
    """
    prompts = await _encode_all(service, requests)
    pending = iter(range(len(prompts)))
    writer = _InOrder(output)
    columns = (TextColumn("generate"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=console is None or not console.is_terminal) as progress:
        task = progress.add_task("generate", total=len(prompts))

        async def work() -> None:
            for index in pending:
                line = requests.lines[index]
                writer.put(index, await _answer(service, prompts[index], line.params(), line.id))
                progress.advance(task)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENCY, service.router.max_inflight, len(prompts))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return writer.failed


async def _encode_all(service: Service, requests: Requests) -> list[list[int]]:
    prompts, problems = [], []
    for number, line in zip(requests.numbers, requests.lines, strict=True):
        try:
            prompts.append(_encode(service, line))
            await service.check(line.params(), line.grammar_param)
        except RequestError as error:
            problems.append((number, error.message))
    if problems:
        raise BadInput(requests.path, problems)
    return prompts


def _encode(service: Service, line: _Line) -> list[int]:
    service.check_ids(line.stop_token_ids or (), "stop_token_ids")
    if line.prompt is not None:
        return service.prompt_from_text(line.prompt)
    if line.messages is not None:
        return service.prompt_from_chat([message.model_dump(exclude_none=True) for message in line.messages])
    return service.prompt_from_ids(line.prompt_token_ids or (), "prompt_token_ids")


async def _answer(service: Service, prompt: list[int], params: Params, id_: str | int | None) -> Answer:
    job = service.start([prompt], params)
    try:
        pieces = [piece async for piece in job]
    except (RequestPoisoned, RequestRejected) as error:
        return Answer(error=str(error), id=id_)
    finally:
        job.abort()
    choice, (whole,) = job.choices[0], join(job, pieces)
    logprobs = chat_logprobs(whole.shown, service.text.token_bytes).content if params.logprobs is not None else None
    counts = choice.prompt_tokens, choice.completion_tokens
    return Answer(whole.text, whole.finish_reason, *counts, id=id_, logprobs=logprobs)


class _InOrder:
    """Writes answers in order, however they come; holds those that are early."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._early: dict[int, Answer] = {}
        self._next = 0
        self.failed = 0

    def put(self, index: int, answer: Answer) -> None:
        self._early[index] = answer
        for ready in self._take():
            self.failed += ready.error is not None
            self._output.write(msgspec.json.encode(ready).decode() + "\n")
        self._output.flush()

    def _take(self) -> Iterator[Answer]:
        while self._next in self._early:
            yield self._early.pop(self._next)
            self._next += 1
