"""Request bodies. Unknown parameters, wrong types and values out of range are errors that name the parameter."""

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dp_engine.messages import Grammar
from launcher.front.errors import ApiError
from launcher.front.neutral import CHAT, COMPLETIONS, MESSAGE, drop_neutral
from launcher.front.strict import Strict, character_text
from launcher.front.structured import ResponseFormat, StructuredOutputs
from launcher.service import Params

MAX_STOPS = 4  # as OpenAI
MAX_SALT = 512  # characters of a cache_salt
MAX_LOGPROBS = 5  # of completions, as OpenAI
MAX_TOP_LOGPROBS = 20  # of chat, as OpenAI
COMPLETION_TOKENS = 16  # max_tokens of a completion that names none, as OpenAI

Prompt = list[str] | list[list[int]]


def _stops(value: Any) -> list[str]:
    """One string or several, none of them empty."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are possible")
    if "" in stops:
        raise ValueError("a stop string is empty")
    return [character_text(stop) for stop in stops]


def _prompts(value: Any) -> Prompt:
    """A string, strings, token ids, or lists of token ids; always a list of prompts afterwards."""
    if isinstance(value, str):
        return [character_text(value)]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return [character_text(item) for item in value]
        if _is_ids(value):
            return [value]
        if all(isinstance(item, list) and _is_ids(item) for item in value):
            return value
    if value == []:
        raise ValueError("the prompt is empty")
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")


def _count(value: Any) -> Any:
    """A number; false, which chat has instead, is none."""
    return None if value is False else value


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _content(value: Any) -> str:
    """A string, or parts of type text."""
    if isinstance(value, str):
        return character_text(value)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError("a part must be an object with a type")
        if part["type"] != "text":
            raise ValueError("parts of other types than text are not supported by this server")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('a text part must be {"type": "text", "text": "..."}')
    return character_text("\n".join(part["text"] for part in value))


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; never added here


class SamplingFields(Strict):
    """Parameters that every way of asking has in common."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: Annotated[list[str], BeforeValidator(_stops)] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    cache_salt: Annotated[str, AfterValidator(character_text)] | None = Field(None, min_length=1, max_length=MAX_SALT)

    structured_outputs: StructuredOutputs | None = None

    def params(self) -> Params:
        structured = self.structured_outputs
        return Params(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            grammar=structured.grammar() if structured is not None else None,
        )

    @property
    def grammar_param(self) -> str:
        """The parameter that asks for the output's form."""
        return "structured_outputs"


class _GenerationRequest(SamplingFields):
    model: str
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # this and the next: for the operator's statistics elsewhere, ignored here
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> "_GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` is only possible with `stream`")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(_GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[Prompt, BeforeValidator(_prompts)]
    logprobs: Annotated[int | None, BeforeValidator(_count)] = Field(None, ge=0, le=MAX_LOGPROBS)

    def params(self) -> Params:
        params = super().params()
        return replace(params, max_tokens=params.max_tokens or COMPLETION_TOKENS, logprobs=self.logprobs)


class Message(Strict):
    """One turn of a conversation; parts of text are joined by line ends."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content)]
    name: Annotated[str, AfterValidator(character_text)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        return drop_neutral(body, MESSAGE, "messages[].") if isinstance(body, dict) else body


class ChatRequest(_GenerationRequest):
    """Body of POST /v1/chat/completions. `max_completion_tokens` is the newer name of `max_tokens`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    safety_identifier: str | None = None  # this and the next are ignored
    prompt_cache_key: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("only possible with `logprobs`")
        return value

    @field_validator("response_format")
    @classmethod
    def _alone(cls, value: ResponseFormat | None, info: ValidationInfo) -> ResponseFormat | None:
        if value is not None and value.grammar() is not None and info.data.get("structured_outputs") is not None:
            raise ValueError("not possible together with `structured_outputs`")
        return value

    def _format_grammar(self) -> Grammar | None:
        return self.response_format.grammar() if self.response_format is not None else None

    def params(self) -> Params:
        params = super().params()
        return replace(
            params,
            max_tokens=self.max_completion_tokens or params.max_tokens,
            logprobs=self.top_logprobs or 0 if self.logprobs else None,
            grammar=self._format_grammar() or params.grammar,
        )

    @property
    def grammar_param(self) -> str:
        return "response_format" if self.structured_outputs is None else super().grammar_param


class PauseRequest(Strict):
    """Body of POST /pause."""

    mode: Literal["new", "all"] = "all"


class DoctorRequest(BaseModel):
    """Query of GET /debug/doctor: which gang."""

    model_config = ConfigDict(extra="forbid")

    replica: int = Field(0, ge=0)


class TraceRequest(DoctorRequest):
    """Query of GET /debug/trace."""

    steps: int | None = Field(None, ge=1)


R = TypeVar("R", bound=BaseModel)


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Raises ApiError 400."""
    return validate(CompletionRequest, drop_neutral(body, COMPLETIONS))


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Raises ApiError 400."""
    return validate(ChatRequest, drop_neutral(body, CHAT))


def validate(schema: type[R], body: dict[str, Any]) -> R:
    """Raises ApiError 400 for the first thing that is wrong; values are not repeated in it."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".") or None
    if first["type"] == "extra_forbidden":
        raise ApiError(400, f"unknown parameter `{param}`", param, "unknown_parameter")
    if first["type"] == "missing":
        raise ApiError(400, f"`{param}` is missing", param, "missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    raise ApiError(400, f"`{param}`: {message}" if param else message, param, "invalid_value")
