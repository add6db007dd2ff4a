"""Text on this side, token ids on the other: the checkpoint's tokenizer, chat template and generation defaults."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from llguidance import LLTokenizer

from launcher.config import ConfigError
from launcher.environment import shield_transformers
from launcher.errors import RequestError

PIECE_CHARS = 1 << 16  # a long text is first counted in pieces of this length


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling parameters of requests that name none: the checkpoint's generation_config.json, else neutral values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def load(cls, directory: Path) -> Self:
        path = directory / "generation_config.json"
        given = _read_json(path) if path.exists() else {}
        return cls(**{name: kind(given[name]) for name, kind in _DEFAULTS.items() if given.get(name) is not None})


_DEFAULTS: dict[str, Any] = {"temperature": float, "top_p": float, "top_k": int}


class Text:
    """Tokenizer of one model. To be used from one thread only: the event loop's.

    `vocab_size` is the model's: ids from 0 to below it may be sent to the ranks. `tokenizer` is a fast one of
    `transformers`; its chat template runs in the sandbox of `transformers`, checkpoint code never does.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, defaults: GenerationDefaults) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.tokenizer_json: str = self._backend.to_str()
        self._spelling = _spelling(self.tokenizer_json)
        self.vocab_size = vocab_size
        self.defaults = defaults

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read tokenizer and settings of a checkpoint; takes seconds. Raises ConfigError."""
        config = _read_json(directory / "config.json")
        shield_transformers()
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever the library makes of a broken file
            raise ConfigError(f"cannot load the tokenizer of {directory}: {_first_line(error)}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"{directory} has no tokenizer.json: a fast tokenizer is needed")
        vocab_size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        return cls(tokenizer, int(vocab_size or len(tokenizer)), GenerationDefaults.load(directory))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def require_spelling(self) -> None:
        """Raises RequestError if the bytes of single tokens are not known."""
        if self._spelling is None:
            raise RequestError("this model's tokenizer does not tell its tokens' bytes", "logprobs")

    def token_bytes(self, token: int) -> bytes:
        """How a token is spelt, special ones by their names. A character may be made of several tokens' bytes."""
        assert self._spelling is not None, "require_spelling comes first"
        return self._spelling.decode_bytes([token])

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def encode(self, text: str, limit: int, *, special: bool = True, param: str = "prompt") -> list[int]:
        """Return the ids of `text`, with the tokenizer's own special tokens (bos) if `special`.

        Raises RequestError for more than `limit` tokens. The work is bounded by `limit`, not by the length of the text.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("the text contains a lone surrogate, which is no character", param) from None
        self._refuse_hopeless(text, limit, param)
        ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        if len(ids) > limit:
            raise too_long(f"{len(ids)}", limit, param)
        return ids

    def _refuse_hopeless(self, text: str, limit: int, param: str) -> None:
        """Refuse a text whose pieces alone make far more than `limit` tokens, without encoding all of it."""
        if len(text) <= PIECE_CHARS:
            return
        counted = 0
        for start in range(0, len(text), PIECE_CHARS):
            counted += len(self._backend.encode(text[start : start + PIECE_CHARS], add_special_tokens=False))
            if counted > limit + limit // 4 + 64:  # cuts between pieces make some tokens more
                raise too_long(f"more than {limit}", limit, param)

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Apply the chat template, up to where the assistant begins to speak. Raises RequestError."""
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        try:
            return self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like about roles and their order
            message = f"the model's chat template refuses these messages: {_first_line(error)}"
            raise RequestError(message, "messages") from None


def too_long(tokens: str, limit: int, param: str) -> RequestError:
    """The error for a prompt that leaves no room; `tokens` says in words how many it has."""
    return RequestError(
        f"this model's maximum context length is {limit + 1} tokens, one of them to be generated; "
        f"the prompt has {tokens} tokens",
        param,
        "context_length_exceeded",
    )


def _spelling(tokenizer: str) -> LLTokenizer | None:
    try:
        return LLTokenizer(tokenizer, slices=[])
    except ValueError:
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a JSON object")
    return content


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
