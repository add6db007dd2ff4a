"""A request in flight as its consumer sees it: tokens as they come, then one end."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from dp_engine.messages import Sampling, TokenLogprobs

if TYPE_CHECKING:
    from launcher.gang_link import GangLink


class QueueFull(Exception):
    """No room for another request at present; the client may try again."""


class RankBusy(Exception):
    """A rank takes no more messages at present. The message says which, and what has become of the call."""


class GangDown(Exception):
    """The ranks cannot serve: not there yet, or lost for good. The message says why."""


class RequestRejected(Exception):
    """The rank refused a request that it can never run. The message says why."""


class RequestPoisoned(Exception):
    """The request was running on the rank at fault at too many ends of a gang. The message tells of each."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens since the last delta. `finish_reason` is set on the last one only.

    logprobs: parallel to `tokens`, empty when the request did not ask for them.
    """

    tokens: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Inbox:
    """Where tickets report news; one consumer waits here for any number of tickets. Lives on one event loop."""

    def __init__(self) -> None:
        self._ready: deque[Ticket] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def post(self, ticket: "Ticket") -> None:
        """Note that a ticket has news; the ticket sees to it that it is in here once at most."""
        self._ready.append(ticket)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> "Ticket":
        """Wait for a ticket with news; take these with `Ticket.take`."""
        while not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._ready.popleft()


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks for: token ids of the prompt, and how to go on. `parent`: another choice of this prompt."""

    prompt: list[int]
    sampling: Sampling
    priority: int = 0
    cache_salt: str = ""
    choices: int = 1
    parent: "Ticket | None" = None


class Ticket:
    """Handle of a submitted request; an async iterator of deltas. It outlives the gangs that the request runs on.

    The router is the only writer. Tokens that arrive before the consumer looks are given out together, so a slow
    consumer costs no more than a fast one. After the end everything further is ignored.

    emitted: all tokens so far, whichever gang they came from. link, rank: where the request runs; link None: it waits.
    died_with: rank by (replica, epoch) of the gangs it was running on when they ended, until it is known who was at
    fault; deaths: the reasons of those where it was its rank; strikes: how many of them came before it had got over the
    one before. suspect: it may have been the cause, and `probation` more tokens have to come before it counts as an
    ordinary request again.
    """

    __slots__ = (
        "_ended", "_error", "_finish_reason", "_logprobs", "_posted", "_taken",
        "deaths", "died_with", "emitted", "inbox", "link", "probation", "rank", "request_id",
        "strikes", "suspect", "work",
    )  # fmt: skip

    def __init__(self, request_id: int, work: Work, inbox: Inbox | None = None) -> None:
        self.request_id = request_id
        self.work = work
        self.inbox = inbox or Inbox()
        self.emitted: list[int] = []
        self.link: GangLink | None = None
        self.rank = -1
        self.suspect = False
        self.probation = 0
        self.died_with: dict[tuple[int, int], int] = {}
        self.deaths: list[str] = []
        self.strikes = 0
        self._logprobs: list[TokenLogprobs] = []
        self._taken = 0
        self._finish_reason: str | None = None
        self._error: Exception | None = None
        self._posted = False
        self._ended = False  # the consumer has seen the end

    @property
    def open(self) -> bool:
        """Whether more may still arrive."""
        return self._finish_reason is None and self._error is None

    @property
    def remaining(self) -> int:
        """Tokens up to max_tokens."""
        return self.work.sampling.max_tokens - len(self.emitted)

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        if self.open:
            self.emitted.append(token)
            if logprobs is not None:
                self._logprobs.append(logprobs)
            self._post()

    def finish(self, reason: str) -> None:
        if self.open:
            self._finish_reason = reason
            self._post()

    def fail(self, error: Exception) -> None:
        if self.open:
            self._error = error
            self._post()

    def _post(self) -> None:
        if not self._posted:
            self._posted = True
            self.inbox.post(self)

    def take(self) -> Delta:
        """Return what has arrived, to be called once for every time the inbox names this ticket.

        Raises GangDown, RequestRejected or RequestPoisoned when that is how the request ended; tokens of that moment
        are lost.
        """
        self._posted = False
        if self._error is not None:
            self._ended = True
            raise self._error
        tokens, self._taken = self.emitted[self._taken :], len(self.emitted)
        logprobs, self._logprobs = self._logprobs, []
        self._ended = self._finish_reason is not None
        return Delta(tokens, self._finish_reason, logprobs)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        await self.inbox.get()
        return self.take()
