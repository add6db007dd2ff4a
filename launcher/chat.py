"""`phalanx chat`: a conversation in the terminal with a running server, over its HTTP API."""

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import httpx
from rich.console import Console

from launcher.client import open_client, refusal

HELP = "Enter sends. Ctrl-C stops an answer, Ctrl-D leaves, /reset forgets the conversation."


class ChatError(Exception):
    """A question could not be answered; the message is one line."""


class Conversation:
    """What was said so far; owner of the history. A question whose answer failed is forgotten."""

    def __init__(self, client: httpx.Client, model: str, system: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)

    def reset(self) -> None:
        self._messages = list(self._start)

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield the answer as it comes. Closing early keeps what was said. Raises ChatError."""
        asked = {"role": "user", "content": question}
        body = {"model": self._model, "messages": [*self._messages, asked], "stream": True, **self._options}
        said: list[str] = []
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise ChatError(refusal(reply))
                for text in _texts(reply.iter_lines()):
                    said.append(text)
                    yield text
        except httpx.HTTPError as error:
            raise ChatError(f"the connection to the server failed: {error or type(error).__name__}") from None
        except (ValueError, LookupError, TypeError):
            raise ChatError("the server's answer makes no sense to an OpenAI client") from None
        except (GeneratorExit, KeyboardInterrupt):
            self._remember(asked, said)
            raise
        self._remember(asked, said)

    def _remember(self, asked: dict[str, str], said: list[str]) -> None:
        if said:
            self._messages += [asked, {"role": "assistant", "content": "".join(said)}]


def _texts(lines: Iterator[str]) -> Iterator[str]:
    """Text of server-sent chat chunks. Raises ChatError for an error event or a stream that breaks off."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatError(event["error"]["message"])
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise ChatError("the answer broke off")


def _served_model(client: httpx.Client) -> str:
    """Raises ChatError when there is no phalanx (or other OpenAI-like) server."""
    try:
        reply = client.get("/v1/models")
        if reply.status_code == 401:
            raise ChatError(refusal(reply))
        return str(reply.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        hint = "start one with `phalanx serve`, or name it with --url"
        why = f" ({error})" if client.base_url.scheme == "https" else ""
        raise ChatError(f"no server answers at {client.base_url}{why}; {hint}") from None
    except (ValueError, LookupError, TypeError):
        raise ChatError(f"{client.base_url} is no OpenAI-compatible server") from None


def run_chat(
    url: str,
    *,
    model: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> int:
    """Talk until the user leaves. Returns the exit code: 0, or 2 when there is no server to talk to."""
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    options = {
        name: value for name, value in (("temperature", temperature), ("max_tokens", max_tokens)) if value is not None
    }
    try:
        client = open_client(url, timeout=httpx.Timeout(10, read=None))
        with client:
            name = model or _served_model(client)
            console.print(f"{name} at {client.base_url}. {HELP}", style="dim", markup=False)
            _talk(Conversation(client, name, system, options), console, errors)
    except (ChatError, httpx.InvalidURL) as error:
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    return 0


def _talk(conversation: Conversation, console: Console, errors: Console) -> None:
    while True:
        try:
            question = console.input("[bold green]> [/]").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print()
            continue
        if question == "/reset":
            conversation.reset()
            console.print("forgotten", style="dim")
        elif question:
            _show_answer(conversation.ask(question), console, errors)


def _show_answer(answer: Generator[str, None, None], console: Console, errors: Console) -> None:
    try:
        with closing(answer):
            for text in answer:
                console.print(text, end="", markup=False, soft_wrap=True)
        console.print()
    except KeyboardInterrupt:
        console.print(" (stopped)", style="dim")
    except ChatError as error:
        console.print()
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
