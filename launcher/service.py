"""Text in, text out, on top of the router: what the HTTP front and `phalanx generate` are made of."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from dp_engine.detokenizer import Detokenizer
from dp_engine.grammar import GrammarError
from dp_engine.messages import Grammar, Sampling, TokenLogprobs
from launcher.errors import RequestError
from launcher.grammar_check import GrammarChecker
from launcher.router import Delta, GangDown, Inbox, Router, Ticket
from launcher.text import Text, too_long

SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Params:
    """Parameters of a request, in range already. None: the model's default, and all the tokens that fit."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str = ""
    logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """A token of the text, which begins `offset` characters into it."""

    token: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of choice `index` that is new. `finish_reason` is set on the choice's last piece only.

    shown: tokens that begin in it, if log-probabilities were asked for.
    """

    index: int
    text: str
    finish_reason: str | None
    shown: list[Shown] = field(default_factory=list)


class Choice:
    """One answer in the making. Owns the detokeniser of its ticket."""

    def __init__(self, index: int, ticket: Ticket, detokenizer: Detokenizer, prompt_tokens: int) -> None:
        self.index = index
        self.ticket = ticket
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._given = 0  # characters of text
        self._held: list[Shown] = []  # tokens whose text is not certain yet

    def advance(self, delta: Delta) -> Piece:
        """Take the rank's tokens in. A token that ended the request (eos, stop token) counts but is not shown."""
        reason = delta.finish_reason
        shown = delta.tokens[:-1] if reason == "stop" else delta.tokens
        text = self._push(shown, delta.logprobs)
        if reason is not None and not self._detokenizer.stopped:
            text += self._detokenizer.flush()
        if self._detokenizer.stopped:
            reason = "stop"
            self.completion_tokens = self._detokenizer.num_tokens
        else:
            self.completion_tokens += len(delta.tokens)
        self.finish_reason = reason
        return Piece(self.index, text, reason, self._begun(len(text)))

    def _push(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> str:
        if self.ticket.work.sampling.logprobs is None:
            return self._detokenizer.push(tokens)
        text = ""
        for token, values in zip(tokens, logprobs[: len(tokens)], strict=True):
            self._held.append(Shown(token, self._detokenizer.num_characters, values))
            text += self._detokenizer.push([token])
        return text

    def _begun(self, length: int) -> list[Shown]:
        """Held tokens that begin in the next `length` characters of text; at the end all that no stop string cuts."""
        if not self._held:
            return []
        self._given += length
        whole = self.finish_reason is not None and not self._detokenizer.stopped
        begun = [shown for shown in self._held if whole or shown.offset < self._given]
        self._held = self._held[len(begun) :]
        return begun


class Job:
    """All choices of one request; an async iterator of pieces as they come, in any order of choices.

    Raises GangDown or RequestRejected when the ranks fail it. Whoever leaves early calls `abort`.
    """

    def __init__(self, router: Router, inbox: Inbox) -> None:
        self._router = router
        self._inbox = inbox
        self._choices: dict[int, Choice] = {}  # by request id
        self._unfinished = 0

    @property
    def choices(self) -> list[Choice]:
        return list(self._choices.values())

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self._choices.values())

    def add(self, choice: Choice) -> None:
        self._choices[choice.ticket.request_id] = choice
        self._unfinished += 1

    def abort(self) -> None:
        """Free the ranks of what is still running. Idempotent; pieces that follow end with `abort`."""
        for choice in self._choices.values():
            self._router.abort(choice.ticket)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while self._unfinished:
            ticket = await self._inbox.get()
            delta = ticket.take()
            choice = self._choices[ticket.request_id]
            if choice.finish_reason is not None:
                continue  # news of a choice that a stop string has ended here
            piece = choice.advance(delta)
            if piece.finish_reason is not None:
                self._unfinished -= 1
                self._router.abort(ticket, piece.finish_reason)  # still running there after a stop string
            if piece.text or piece.finish_reason is not None:
                return piece
        raise StopAsyncIteration


class Service:
    """One model behind one router. `block_size` is the engine's: ranks with a small KV pool shorten what fits."""

    def __init__(self, text: Text, router: Router, model_name: str, block_size: int) -> None:
        self.text = text
        self.router = router
        self.model_name = model_name
        self._block_size = block_size
        self._grammars = GrammarChecker(text.tokenizer_json, text.vocab_size)

    @property
    def max_len(self) -> int:
        """Longest sequence that every rank can hold, prompt included. Raises GangDown before the ranks are there."""
        if not self.router.hellos:
            raise GangDown(self.router.unready_reason or "no rank is there")
        return min(
            min(hello.max_model_len, hello.num_blocks * self._block_size)
            for hellos in self.router.hellos.values()
            for hello in hellos
        )

    # ---- prompts; all raise RequestError

    def prompt_from_text(self, text: str, param: str = "prompt") -> list[int]:
        if not text:
            raise RequestError("the prompt is empty", param)
        return self.text.encode(text, self.max_len - 1, param=param)

    def prompt_from_ids(self, ids: Sequence[int], param: str = "prompt") -> list[int]:
        if not ids:
            raise RequestError("the prompt is empty", param)
        if len(ids) >= self.max_len:
            raise too_long(f"{len(ids)}", self.max_len - 1, param)
        self.check_ids(ids, param)
        return list(ids)

    def prompt_from_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        if not messages:
            raise RequestError("there are no messages", "messages")
        prompt = self.text.render_chat(messages)
        if not prompt:
            raise RequestError("the chat template makes an empty prompt of these messages", "messages")
        return self.text.encode(prompt, self.max_len - 1, special=False, param="messages")

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        if (wrong := next((token for token in ids if not 0 <= token < self.text.vocab_size), None)) is not None:
            raise RequestError(f"token id {wrong} is not in the vocabulary (0 to {self.text.vocab_size - 1})", param)

    # ---- requests

    async def check(self, params: Params, grammar_param: str) -> None:
        """Refuse what the text's form makes impossible. Raises RequestError, QueueFull."""
        if params.logprobs is not None:
            self.text.require_spelling()
        if params.grammar is None:
            return
        if params.ignore_eos:
            message = "not possible for an output that is bound to a form: it ends where the form does"
            raise RequestError(f"`ignore_eos`: {message}", "ignore_eos", "invalid_value")
        try:
            await self._grammars.check(params.grammar)
        except GrammarError as error:
            raise RequestError(f"this form cannot be used: {error}", grammar_param, "invalid_value") from None

    def start(self, prompts: Sequence[list[int]], params: Params, n: int = 1) -> Job:
        """Submit `n` choices for every prompt; choice k of prompt p has index p * n + k. One rank has all of a prompt.

        Raises RequestError, QueueFull or GangDown; then nothing is left running. Without a seed every choice draws one,
        with a seed choice k has seed + k.
        """
        self.check_ids(params.stop_token_ids, "stop_token_ids")
        if (wanted := len(prompts) * n) > (most := self.router.max_inflight):
            raise RequestError(f"{wanted} choices are more than the {most} that can be in flight at once", "n")
        job = Job(self.router, inbox := Inbox())
        try:
            for number, prompt in enumerate(prompts):
                first: Ticket | None = None
                for k in range(n):
                    ticket = self.router.submit(
                        prompt,
                        self._sampling(prompt, params, k),
                        inbox,
                        priority=params.priority,
                        cache_salt=params.cache_salt,
                        choices=n,
                        parent=first,
                    )
                    first = first or ticket
                    detokenizer = Detokenizer(self.text.decode, prompt, params.stop)
                    job.add(Choice(number * n + k, ticket, detokenizer, len(prompt)))
        except BaseException:
            job.abort()
            raise
        return job

    def _sampling(self, prompt: list[int], params: Params, k: int) -> Sampling:
        room = self.max_len - len(prompt)
        defaults = self.text.defaults
        temperature = defaults.temperature if params.temperature is None else params.temperature
        top_p = defaults.top_p if params.top_p is None else params.top_p
        top_k = defaults.top_k if params.top_k is None else params.top_k
        return Sampling(
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            temperature=temperature if top_p > 0 else 0.0,  # no mass at all: the likeliest token, greedy
            top_p=top_p if top_p > 0 else 1.0,
            top_k=max(top_k, 0),
            seed=secrets.randbits(63) if params.seed is None else (params.seed + k) & SEED_MASK,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            grammar=params.grammar,
        )
