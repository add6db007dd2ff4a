"""A rank's link to a router that follows a script, so that a run of an engine, or of a gang of them, repeats exactly.

The script's clock are turns: a rank looks into its inbox once before every vote, so all ranks are at the same turn.
While the gang sleeps, time jumps to the next turn that brings anybody a message. When it sleeps with nothing to come,
all are asked to stop.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from dp_engine.messages import (
    Abort,
    Add,
    Direction,
    Fault,
    Message,
    Output,
    Pause,
    PauseMode,
    Ready,
    Rejected,
    Report,
    ResetPrefixCache,
    Sampling,
    Shutdown,
    TokenLogprobs,
    ToRank,
    ToRouter,
    Wake,
    decode_to_rank,
    decode_to_router,
    encode,
)

MOST_TURNS = 3000  # between two sleeps


class Script:
    """What a router sends to a gang of `size` ranks, and when. A rank is named modulo `size`: a scenario fits any."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self._wake = 0
        self._messages: dict[int, list[tuple[int, ToRank]]] = defaultdict(list)  # by turn: rank, message

    def add(
        self, turn: int, request_id: int, prompt: list[int], sampling: Sampling, *, rank: int = 0, **more: object
    ) -> None:
        """A request for one rank; it wakes the others."""
        self._wake += 1
        add = Add(self._wake, request_id, prompt, sampling, **more)  # type: ignore[arg-type]
        for other in range(self.size):
            self.tell(turn, add if other == rank % self.size else Wake(self._wake), rank=other)

    def abort(self, turn: int, request_ids: list[int], *, rank: int = 0) -> None:
        self.tell(turn, Abort(request_ids), rank=rank)

    def tell(self, turn: int, message: ToRank, *, rank: int = 0) -> None:
        self._messages[turn].append((rank % self.size, message))

    def ready(self, turn: int, request_id: int, error: str = "") -> None:
        self._to_all(turn, lambda wake: Ready(wake, request_id, error))

    def pause(self, turn: int, mode: PauseMode) -> None:
        self._to_all(turn, lambda wake: Pause(wake, mode))

    def reset_prefix_cache(self, turn: int) -> None:
        self._to_all(turn, ResetPrefixCache)

    def fault(self, turn: int, kind: str, *, rank: int = 0, **more: object) -> None:
        """Something goes wrong at one rank; the others are woken."""
        self._wake += 1
        fault = Fault(self._wake, kind, **more)  # type: ignore[arg-type]
        for other in range(self.size):
            self.tell(turn, fault if other == rank % self.size else Wake(self._wake), rank=other)

    def shutdown(self, turn: int) -> None:
        self._to_all(turn, Shutdown)

    def _to_all(self, turn: int, make: Callable[[int], ToRank]) -> None:
        self._wake += 1
        for rank in range(self.size):
            self.tell(turn, make(self._wake), rank=rank)

    def at(self, turn: int, rank: int) -> list[ToRank]:
        return [message for other, message in self._messages.get(turn, ()) if other == rank]

    def after(self, turn: int) -> int | None:
        """The next turn that brings anybody a message."""
        return min((later for later in self._messages if later > turn), default=None)


@dataclass
class Answer:
    """What a request was given; `reason` is None if it never ended. `logprobs`: of each token, if any were told."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class ScriptedLink:
    """One rank's end. Messages pass through their encoding. `sent`: all that the rank said; `losses`: what it was asked
    to lose, which is not lost here."""

    def __init__(self, script: Script, rank: int = 0) -> None:
        self.rank = rank
        self.bad_messages = 0
        self.sent: list[ToRouter] = []
        self.losses: list[tuple[Direction, int]] = []
        self.turn = -1
        self._script = script
        self._over = False
        self._awake_since = 0

    def send(self, message: Message) -> None:
        self.sent.append(decode_to_router(encode(message)))

    def lose(self, direction: Direction, messages: int) -> None:
        self.losses.append((direction, messages))

    def drain(self) -> list[ToRank]:
        self.turn += 1
        assert self.turn - self._awake_since < MOST_TURNS, f"no sleep since turn {self._awake_since}"
        messages = [Shutdown(0)] if self._over else self._script.at(self.turn, self.rank)
        return [decode_to_rank(encode(message)) for message in messages]

    def wait(self, timeout_s: float | None = None) -> bool:
        del timeout_s
        following = self._script.after(self.turn)
        self._over = following is None
        self.turn = self.turn if following is None else following - 1
        self._awake_since = self.turn
        return True

    @property
    def outputs(self) -> list[Output]:
        return [message for message in self.sent if isinstance(message, Output)]

    @property
    def rejected(self) -> dict[int, str]:
        return {message.request_id: message.reason for message in self.sent if isinstance(message, Rejected)}

    @property
    def reports(self) -> list[Report]:
        return [output.report for output in self.outputs if output.report is not None]

    def answers(self) -> dict[int, Answer]:
        """By request. AssertionError if anything is said of a request after its end."""
        answers: dict[int, Answer] = defaultdict(Answer)
        for output in self.outputs:
            told = output.logprobs or [None] * len(output.tokens)
            for request_id, token, logprobs in zip(output.request_ids, output.tokens, told, strict=True):
                assert answers[request_id].reason is None, f"a token for {request_id} after its end"
                answers[request_id].tokens.append(token)
                answers[request_id].logprobs += [] if logprobs is None else [logprobs]
            for request_id, reason in output.finished:
                assert answers[request_id].reason is None, f"{request_id} ended twice"
                answers[request_id].reason = reason
        return dict(answers)
