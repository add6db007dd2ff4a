"""Small worlds for the explorer: how many ranks, with which settings, and what the router does to them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dp_engine.config import EngineConfig
from dp_engine.messages import Abort, Add, Pause, PauseMode, Ready, ResetPrefixCache, Sampling, Shutdown, ToRank, Wake
from vote.config import VoteConfig
from vote.explorer import Event


@dataclass(frozen=True)
class World:
    """`about`: what it is there for. `aborted`: requests that owe nobody an end. `bounded`: the wait for a prefill is;
    not so where the pool is full and `want` is head, which asks for what does not fit. `rebalance_interval`: forwards
    from one round of moving experts to the next, 0 for none."""

    name: str
    about: str
    ranks: int
    events: tuple[Event, ...]
    engine: EngineConfig
    vote: VoteConfig
    num_blocks: int
    max_model_len: int = 32
    aborted: frozenset[int] = frozenset()
    bounded: bool = True
    rebalance_interval: int = 0


@dataclass
class Router:
    """Writes down what a router sends, as `launcher.roster` does it: whatever one rank is told, all others are woken
    with the same number."""

    ranks: int
    events: list[Event] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    wake: int = 0
    requests: int = 0
    rank_of: dict[int, int] = field(default_factory=dict)  # by request

    def add(self, rank: int, prompt: int, tokens: int, *, like: int | None = None, **more: Any) -> int:
        """A request, whose number is returned. `like`: prompts of the same number begin alike."""
        self.requests += 1
        number = self.requests
        self.rank_of[number] = rank
        sampling = Sampling(max_tokens=tokens)
        ids = [100 * (like or number) + i for i in range(prompt)]
        self._tell(
            f"request {number} of {prompt}+{tokens} tokens for rank {rank}",
            lambda wake, other: (Add(wake, number, ids, sampling, **more) if other == rank else Wake(wake),),
        )
        return number

    def abort(self, rank: int, request: int) -> None:
        self.aborted.add(request)
        self._tell(
            f"abort {request}",
            lambda wake, other: (Abort([request]), Wake(wake)) if other == rank else (Wake(wake),),
        )

    def pause(self, mode: PauseMode) -> None:
        self._tell(f"pause {mode}", lambda wake, other: (Pause(wake, mode),))

    def ready(self, rank: int, request: int, error: str = "") -> None:
        self._tell(
            f"ready {request}", lambda wake, other: (Ready(wake, request, error) if other == rank else Wake(wake),)
        )

    def reset_prefix_cache(self) -> None:
        self._tell("reset", lambda wake, other: (ResetPrefixCache(wake),))

    def shut_down(self) -> None:
        self._tell("shut down", lambda wake, other: (Shutdown(wake),))

    def _tell(self, words: str, messages: Callable[[int, int], tuple[ToRank, ...]]) -> None:
        self.wake += 1
        self.events.append(Event(words, tuple(messages(self.wake, rank) for rank in range(self.ranks))))


def describe(message: ToRank) -> str:
    """A message in a word or two."""
    match message:
        case Add():
            return f"add {message.request_id} ({len(message.prompt)}+{message.sampling.max_tokens})"
        case Abort():
            return f"abort {message.request_ids[0]}"
        case Wake():
            return f"wake {message.wake}"
        case Pause():
            return f"pause {message.mode}"
        case Ready():
            return f"ready {message.request_id}"
    return type(message).__name__.lower()
