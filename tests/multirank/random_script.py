"""What a router might send: floods of requests, aborts and pauses, which reach each rank when they do."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dp_engine.messages import Abort, Add, Pause, Sampling, ToRank, Wake
from tests.scheduler_world import prompt_of
from tests.scripted_link import Script

QUIET = 1000  # turns between the beginnings of two floods: everybody has fallen asleep
LATENESS = (0, 0, 0, 1, 2, 5)  # turns that a message is on its way to a rank
PAUSE_MODES = ("new", "all")
Make = Callable[[int], ToRank]  # from a wake-up number


@dataclass(frozen=True)
class Ask:
    """A request as it was sent."""

    rank: int
    prompt: list[int]
    max_tokens: int


class RandomScript(Script):
    """The same on all ranks for the same arguments. Lengths are at most `longest`, the answer included.

    Some floods are for one rank alone; in some a rank is paused while the others work. `asks`, `aborted`: by request.
    """

    def __init__(self, size: int, seed: int, *, floods: int, longest: int) -> None:
        super().__init__(size)
        self.asks: dict[int, Ask] = {}
        self.aborted: set[int] = set()
        self._rng = random.Random(seed)
        self._longest = longest
        self._arrived = [0] * size  # when the last message for each rank does: they keep their order
        for number in range(floods):
            for turn, rank, make in sorted(self._flood(number * QUIET), key=lambda event: event[0]):
                self._send(turn, rank, make)

    def _flood(self, start: int) -> list[tuple[int, int, Make]]:
        """Turn, rank, message."""
        rng, events, turn = self._rng, [], start
        ranks = [rng.randrange(self.size)] if rng.random() < 0.3 else list(range(self.size))
        for _ in range(rng.randrange(3, 14) * len(ranks)):
            turn += rng.choice((0, 0, 1, 2, 7))
            request_id, ask = len(self.asks) + 1, self._ask(rng.choice(ranks))
            self.asks[request_id] = ask
            events.append((turn, ask.rank, partial(_add, request_id, ask)))
            if rng.random() < 0.15:
                self.aborted.add(request_id)
                events.append((turn + rng.randrange(15), ask.rank, lambda wake, ids=[request_id]: Abort(ids)))
        if rng.random() < 0.4:
            rank = rng.choice(ranks)
            events.append((rng.randint(start, turn), rank, partial(Pause, mode=rng.choice(PAUSE_MODES))))
            events.append((turn + 5, rank, partial(Pause, mode="none")))
        return events

    def _ask(self, rank: int) -> Ask:
        """Prompts of a group begin alike."""
        rng = self._rng
        length, own = rng.randint(1, self._longest - 1), 50 + len(self.asks)
        shared = rng.randint(0, length)
        prompt = prompt_of(rng.randrange(4), shared) + prompt_of(own, length - shared)
        return Ask(rank, prompt, rng.randint(1, min(24, self._longest - length)))

    def _send(self, turn: int, rank: int, make: Make) -> None:
        """All but aborts wake the other ranks."""
        message = make(self._wake + 1)
        if isinstance(message, Abort):
            self._late(turn, message, rank)
            return
        self._wake += 1
        for other in range(self.size):
            self._late(turn, message if other == rank else Wake(self._wake), other)

    def _late(self, turn: int, message: ToRank, rank: int) -> None:
        self._arrived[rank] = max(self._arrived[rank], turn + self._rng.choice(LATENESS))
        self.tell(self._arrived[rank], message, rank=rank)


def _add(request_id: int, ask: Ask, wake: int) -> Add:
    return Add(wake, request_id, ask.prompt, Sampling(ask.max_tokens))
