"""Log-probabilities as OpenAI writes them, in its two shapes."""

from collections.abc import Callable, Sequence

import msgspec

from launcher.service import Shown

Spell = Callable[[int], bytes]  # a token's bytes


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """`text_offset`: characters of the text before each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(shown: Sequence[Shown], spell: Spell) -> ChatLogprobs:
    return ChatLogprobs([_entry(one, spell) for one in shown])


def _entry(shown: Shown, spell: Spell) -> TokenLogprob:
    top = [TopLogprob(*_token(token, logprob, spell)) for token, logprob in shown.logprobs.top]
    return TokenLogprob(*_token(shown.token, shown.logprobs.logprob, spell), top)


def _token(token: int, logprob: float, spell: Spell) -> tuple[str, float, list[int]]:
    spelt = spell(token)
    return _text(spelt, ""), logprob, list(spelt)


def completion_logprobs(shown: Sequence[Shown], spell: Spell) -> CompletionLogprobs:
    """The drawn token is always among the top ones, so these may be one more than was asked for."""
    return CompletionLogprobs(
        [_name(one.token, spell) for one in shown],
        [one.logprobs.logprob for one in shown],
        [_top(one, spell) for one in shown],
        [one.offset for one in shown],
    )


def _top(shown: Shown, spell: Spell) -> dict[str, float]:
    """Of tokens that read the same the likeliest counts."""
    top: dict[str, float] = {}
    for token, logprob in [*shown.logprobs.top, (shown.token, shown.logprobs.logprob)]:
        top.setdefault(_name(token, spell), logprob)
    return top


def _name(token: int, spell: Spell) -> str:
    return _text(spell(token), "bytes:")


def _text(spelt: bytes, mark: str) -> str:
    r"""The token as text; one that is a part of a character as `\xf0\x9f`, behind `mark`."""
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in spelt)
