"""In-flight books of the router: what every rank still has to compute, from the router's own knowledge alone.

Lockstep pays for the busiest rank in every step: a prefill step lasts as long as the rank with most prompt tokens, a
decode step as the rank with most sequences. So the gang's remaining time is estimated as
`max(prefill over ranks) + DECODE_WEIGHT * max(decode over ranks)` and a request goes where that grows least.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DECODE_WEIGHT = 4  # one decoded token costs about as much as this many prompt tokens, which are computed in bulk
EXPECTED_TOKENS = 512  # cap on the tokens a request is expected to emit yet: most end long before a large max_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens a rank still has to prefill and to decode."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, order=True)
class Quote:
    """What a request would cost on `rank`: what the gang's busiest ranks then have to do, and what this one has."""

    gang: int
    own: int
    turn: int  # ties rotate
    rank: int


def quote(
    loads: Sequence[Load], prefill: int, decode: int, start: int = 0, among: Iterable[int] | None = None
) -> Quote:
    """The rank on which a request of `prefill` and `decode` tokens makes the least resulting maximum load.

    Ties go to the rank with the least load of its own, remaining ties to the first one at or after `start`. `among`:
    the ranks to choose from, at least one; default: all.
    """
    world = len(loads)
    most_prefill = max(load.prefill for load in loads)
    most_decode = max(load.decode for load in loads)

    def cost(rank: int) -> Quote:
        new_prefill, new_decode = loads[rank].prefill + prefill, loads[rank].decode + decode
        gang = max(most_prefill, new_prefill) + DECODE_WEIGHT * max(most_decode, new_decode)
        return Quote(gang, new_prefill + DECODE_WEIGHT * new_decode, (rank - start) % world, rank)

    return min(cost(rank) for rank in (range(world) if among is None else among))


@dataclass(slots=True)
class _Entry:
    rank: int
    prefill: int
    remaining: int  # tokens up to max_tokens

    @property
    def decode(self) -> int:
        return min(self.remaining, EXPECTED_TOKENS)


class Books:
    """Load per rank. Owner of all entries: charged once on submit, released once on any end; other calls are ignored.

    Invariant: a rank's load is the sum over its entries, so it is 0 when the rank has none.
    """

    def __init__(self, world_size: int) -> None:
        self._entries: dict[int, _Entry] = {}
        self._prefill = [0] * world_size
        self._decode = [0] * world_size
        self._requests = [0] * world_size
        self._next = 0  # where ties start, so that they rotate

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def loads(self) -> list[Load]:
        return [Load(prefill, decode) for prefill, decode in zip(self._prefill, self._decode, strict=True)]

    @property
    def requests(self) -> list[int]:
        """Requests in flight per rank."""
        return list(self._requests)

    def quote(self, prompt_tokens: int, max_tokens: int, choices: int = 1, among: Iterable[int] | None = None) -> Quote:
        """The rank for a request, or for all choices of one prompt, and its cost. Nothing is charged yet."""
        decode = choices * min(max_tokens, EXPECTED_TOKENS)
        return quote(self.loads, prompt_tokens, decode, self._next, among)

    def charge(self, request_id: int, rank: int, prompt_tokens: int, max_tokens: int) -> None:
        """Enter a request. Raises ValueError when the id is in the books already."""
        if request_id in self._entries:
            raise ValueError(f"request {request_id} is in the books already")
        entry = self._entries[request_id] = _Entry(rank, prompt_tokens, max_tokens)
        self._prefill[rank] += entry.prefill
        self._decode[rank] += entry.decode
        self._requests[rank] += 1
        self._next = (rank + 1) % len(self._prefill)

    def progress(self, request_id: int, tokens: int = 1) -> None:
        """`tokens` more were emitted: the prompt is done, and so many fewer are to decode."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        if entry.prefill:
            self._prefill[entry.rank] -= entry.prefill
            entry.prefill = 0
        before = entry.decode
        entry.remaining = max(entry.remaining - tokens, 0)
        self._decode[entry.rank] -= before - entry.decode

    def release(self, request_id: int) -> None:
        """The request has ended, whatever the way."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self._prefill[entry.rank] -= entry.prefill
        self._decode[entry.rank] -= entry.decode
        self._requests[entry.rank] -= 1
