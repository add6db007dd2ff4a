"""What a scheduler says of its work."""

from dataclasses import dataclass, field

from dp_engine.messages import TokenLogprobs


@dataclass(slots=True)
class Counters:
    """Cumulative since the engine's start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    forks: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(slots=True)
class StepOutput:
    """What a step gave: tokens in order, each with its request, and the requests that ended with it.

    first_token_s: seconds from arrival to first token, of the requests that got theirs.
    logprobs: parallel to `tokens`, None for a request that wants none; None as a whole if nobody wants any.
    """

    request_ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[tuple[int, str]] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] | None = None
