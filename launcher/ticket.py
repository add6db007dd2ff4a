"""A request in flight as its consumer sees it: tokens as they come, then one end."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Self

from dp_engine.messages import Sampling, TokenLogprobs


class QueueFull(Exception):
    """No room for another request at present; the client may try again."""


class RankBusy(Exception):
    """A rank takes no more messages at present. The message says which, and what has become of the call."""


class GangDown(Exception):
    """The ranks cannot serve: not there yet, or lost. The message says why."""


class RequestRejected(Exception):
    """The rank refused a request that it can never run. The message says why."""


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


class Ticket:
    """Handle of a submitted request; an async iterator of deltas.

    The router is the only writer (`push`, `finish`, `fail`). Tokens that arrive before the consumer looks are given
    out together, so a slow consumer costs no more than a fast one. After the end everything further is ignored.
    """

    __slots__ = (
        "_ended",
        "_error",
        "_finish_reason",
        "_logprobs",
        "_posted",
        "_tokens",
        "inbox",
        "rank",
        "request_id",
        "sampling",
    )

    def __init__(self, request_id: int, rank: int, sampling: Sampling, inbox: Inbox | None = None) -> None:
        self.request_id = request_id
        self.rank = rank
        self.sampling = sampling
        self.inbox = inbox or Inbox()
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: str | None = None
        self._error: Exception | None = None
        self._posted = False
        self._ended = False  # the consumer has seen the end

    @property
    def open(self) -> bool:
        """Whether more may still arrive."""
        return self._finish_reason is None and self._error is None

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        if self.open:
            self._tokens.append(token)
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

        Raises GangDown or RequestRejected when that is how the request ended; tokens of that moment are lost.
        """
        self._posted = False
        if self._error is not None:
            self._ended = True
            raise self._error
        tokens, self._tokens = self._tokens, []
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
