"""Response bodies, as OpenAI writes them, and the two renderers that fill them: completions and chat."""

import secrets
import time
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from launcher.front.logprobs import ChatLogprobs, CompletionLogprobs, Spell, chat_logprobs, completion_logprobs
from launcher.service import Job, Piece, Shown

encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, job: Job, n: int) -> "Usage":
        """Every prompt counts once, however many choices it has."""
        prompt = sum(choice.prompt_tokens for choice in job.choices[::n])
        return cls(prompt, job.completion_tokens, prompt + job.completion_tokens)


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct, tag_field="object", tag="text_completion"):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class Chat(msgspec.Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Renderer(Protocol):
    """Makes the bodies of one response. Streams call `chunks` for every piece and `usage_chunk` at the end."""

    n: int  # choices per prompt
    include_usage: bool

    def whole(self, job: Job, pieces: list[Piece]) -> bytes: ...
    def chunks(self, piece: Piece) -> list[bytes]: ...
    def usage_chunk(self, job: Job) -> bytes: ...


def join(job: Job, pieces: list[Piece]) -> list[Piece]:
    """Every choice as one piece, in order."""
    texts: dict[int, list[str]] = {}
    shown: dict[int, list[Shown]] = {}
    for piece in pieces:
        texts.setdefault(piece.index, []).append(piece.text)
        shown.setdefault(piece.index, []).extend(piece.shown)
    return [
        Piece(choice.index, "".join(texts.get(choice.index, ())), choice.finish_reason, shown.get(choice.index, []))
        for choice in job.choices
    ]


class CompletionRenderer:
    """`spell`: bytes of a token, for log-probabilities; None: there are none."""

    def __init__(self, model: str, n: int, include_usage: bool, spell: Spell | None = None) -> None:
        self.n = n
        self.include_usage = include_usage
        self._id, self._created, self._model = f"cmpl-{secrets.token_hex(16)}", int(time.time()), model
        self._chunk_usage = None if include_usage else UNSET
        self._spell = spell

    def whole(self, job: Job, pieces: list[Piece]) -> bytes:
        choices = [self._choice(piece) for piece in join(job, pieces)]
        return encode(Completion(self._id, self._created, self._model, choices, Usage.of(job, self.n)))

    def chunks(self, piece: Piece) -> list[bytes]:
        return [encode(Completion(self._id, self._created, self._model, [self._choice(piece)], self._chunk_usage))]

    def _choice(self, piece: Piece) -> CompletionChoice:
        logprobs = completion_logprobs(piece.shown, self._spell) if self._spell is not None else None
        return CompletionChoice(piece.index, piece.text, piece.finish_reason, logprobs)

    def usage_chunk(self, job: Job) -> bytes:
        return encode(Completion(self._id, self._created, self._model, [], Usage.of(job, self.n)))


class ChatRenderer:
    """The first chunk of every choice carries the role, the last one the finish reason and no text. `spell`: as with
    completions."""

    def __init__(self, model: str, n: int, include_usage: bool, spell: Spell | None = None) -> None:
        self.n = n
        self.include_usage = include_usage
        self._id, self._created, self._model = f"chatcmpl-{secrets.token_hex(16)}", int(time.time()), model
        self._chunk_usage = None if include_usage else UNSET
        self._begun: set[int] = set()
        self._spell = spell

    def whole(self, job: Job, pieces: list[Piece]) -> bytes:
        choices = [
            ChatChoice(piece.index, ChatMessage(piece.text), piece.finish_reason, self._logprobs(piece))
            for piece in join(job, pieces)
        ]
        return encode(Chat(self._id, self._created, self._model, choices, Usage.of(job, self.n)))

    def chunks(self, piece: Piece) -> list[bytes]:
        chunks = []
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            chunks.append(self._chunk(ChunkChoice(piece.index, ChatDelta("assistant", ""), None)))
        if piece.text or piece.shown:
            delta = ChatDelta(content=piece.text)
            chunks.append(self._chunk(ChunkChoice(piece.index, delta, None, self._logprobs(piece))))
        if piece.finish_reason is not None:
            chunks.append(self._chunk(ChunkChoice(piece.index, ChatDelta(), piece.finish_reason)))
        return chunks

    def usage_chunk(self, job: Job) -> bytes:
        return encode(ChatChunk(self._id, self._created, self._model, [], Usage.of(job, self.n)))

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(piece.shown, self._spell) if self._spell is not None else None

    def _chunk(self, choice: ChunkChoice) -> bytes:
        return encode(ChatChunk(self._id, self._created, self._model, [choice], self._chunk_usage))
