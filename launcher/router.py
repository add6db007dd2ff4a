"""The router: gives every request to a rank, and every token back to its request."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import msgspec

from dp_engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    Goodbye,
    Hello,
    LogLine,
    Output,
    Rejected,
    Report,
    Sampling,
    Shutdown,
    ToRank,
    Wake,
    Welcome,
    decode_to_router,
    encode,
)
from launcher.books import Books
from launcher.keys import LaunchKeys
from launcher.link import Congested, RankLink, Unroutable
from launcher.ticket import Delta, GangDown, Inbox, QueueFull, RequestRejected, Ticket

__all__ = ["Delta", "GangDown", "Inbox", "QueueFull", "RequestRejected", "Router", "Ticket"]

OnLog = Callable[[int, int, str], None]  # rank, logging level, text


class Router:
    """One gang's requests. All methods are called on one event loop.

    Owns the books, the tickets and the wake number. A rank counts from its Hello on, and nothing is sent to it before.
    `reports` and `hellos` hold the last Report and the Hello of each rank. `started` and `finished` count requests per
    rank (and per finish reason); reasons of the router's own are `abort`, `rejected` and `gang_down`.
    """

    def __init__(
        self,
        world_size: int,
        keys: LaunchKeys,
        epoch: int,
        host: str = "127.0.0.1",
        max_inflight: int = 4096,
        on_log: OnLog | None = None,
    ) -> None:
        self.world_size = world_size
        self.max_inflight = max_inflight
        self.wake = 0
        self.hellos: dict[int, Hello] = {}
        self.reports: dict[int, Report] = {}
        self.started = [0] * world_size
        self.finished: list[Counter[str]] = [Counter() for _ in range(world_size)]
        self.bad_messages = 0  # did not parse, or came from a peer that has no say
        self.last_output_at: float | None = None  # time.monotonic()
        self.books = Books(world_size)
        self._keys = keys
        self._epoch = epoch
        self._host = host
        self._on_log = on_log
        self._link = RankLink(keys, self._on_message, send_high_water=4 * max_inflight + 1024)
        self._tickets: dict[int, Ticket] = {}
        self._identities: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._late_aborts: dict[int, list[int]] = {}
        self._next_id = 1
        self._down: str | None = None
        self._stopping = False
        self._refusals: list[str] = []
        self._goodbyes: set[int] = set()
        self._changed = asyncio.Event()  # a Hello, a Goodbye or a failure has come

    # ---- life

    async def start(self) -> None:
        """Bind the socket; `endpoint` is known afterwards."""
        await self._link.start(self._host)

    @property
    def endpoint(self) -> str:
        return self._link.endpoint

    @property
    def ready(self) -> bool:
        return self.unready_reason is None

    @property
    def unready_reason(self) -> str | None:
        """Why no request can be served at present, or None."""
        if self._down is not None:
            return self._down
        if missing := self._missing():
            return f"waiting for {_name_ranks(missing)}"
        return None

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for the Hello of every rank. Raises GangDown when the gang fails, TimeoutError naming absent ranks."""
        with suppress(TimeoutError):
            await self._wait_until(lambda: self.ready or self._down is not None, timeout_s)
        if self._down is not None:
            raise GangDown(self._down)
        if missing := self._missing():
            refused = f" (refused: {'; '.join(self._refusals)})" if self._refusals else ""
            raise TimeoutError(f"no word from {_name_ranks(missing)} within {timeout_s:g} s{refused}")

    async def shutdown(self, timeout_s: float = 5.0) -> list[int]:
        """End open requests, ask all ranks to leave, wait for their Goodbyes. Return the ranks that stayed silent."""
        self._stopping = True
        self._end_all("the server is shutting down")
        self.wake += 1
        farewell = Shutdown(wake=self.wake)
        told = [rank for rank in self._identities if rank not in self._goodbyes and self._try_send(rank, farewell)]
        with suppress(TimeoutError):
            await self._wait_until(lambda: self._goodbyes.issuperset(told), timeout_s)
        return sorted(set(self._identities) - self._goodbyes)

    async def close(self) -> None:
        """Close the socket; requests still open end with GangDown. Idempotent."""
        self._end_all("the router is closed")
        await self._link.close()

    def fail(self, reason: str) -> None:
        """The gang has failed: open requests end with GangDown(reason), later ones are refused. First call wins."""
        self._end_all(reason)

    async def failed(self) -> str:
        """Wait for the first `fail`, whoever calls it; returns its reason."""
        while self._down is None:
            self._changed.clear()
            await self._changed.wait()
        return self._down

    def _end_all(self, reason: str) -> None:
        if self._down is not None:
            return
        self._down = reason
        for ticket in list(self._tickets.values()):
            self._close_ticket(ticket, "gang_down")
            ticket.fail(GangDown(reason))
        self._changed.set()

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.hellos]

    # ---- requests

    @property
    def inflight(self) -> int:
        return len(self._tickets)

    def submit(self, prompt_ids: list[int], sampling: Sampling, inbox: Inbox | None = None) -> Ticket:
        """Hand a request to the rank where it makes the least resulting load. Raises QueueFull or GangDown."""
        if (reason := self.unready_reason) is not None:
            raise GangDown(reason)
        if len(self._tickets) >= self.max_inflight:
            raise QueueFull(f"{self.max_inflight} requests are in flight already")
        rank = self.books.choose(len(prompt_ids), sampling.max_tokens)
        wake, request_id = self.wake + 1, self._next_id
        try:
            self._send(rank, Add(wake=wake, request_id=request_id, prompt=prompt_ids, sampling=sampling))
        except Congested:
            raise QueueFull(f"rank {rank} takes no more messages") from None
        self.wake, self._next_id = wake, request_id + 1
        self.books.charge(request_id, rank, len(prompt_ids), sampling.max_tokens)
        self.started[rank] += 1
        ticket = self._tickets[request_id] = Ticket(request_id, rank, sampling, inbox)
        waking = Wake(wake=wake)
        for other in range(self.world_size):
            if other != rank:
                self._try_send(other, waking)  # a full queue wakes its rank anyhow
        return ticket

    def abort(self, ticket: Ticket, reason: str = "abort") -> None:
        """End a request here and at its rank, with `reason` as its finish reason. Idempotent."""
        if ticket.request_id not in self._tickets:
            return
        self._close_ticket(ticket, reason)
        ticket.finish(reason)
        self._late_aborts.setdefault(ticket.rank, []).append(ticket.request_id)
        self._flush_aborts(ticket.rank)

    def _flush_aborts(self, rank: int) -> None:
        """Send the aborts a rank has not got yet; those that find its queue full wait for the rank's next message."""
        if (request_ids := self._late_aborts.pop(rank, None)) and not self._try_send(rank, Abort(request_ids)):
            self._late_aborts[rank] = request_ids

    def _close_ticket(self, ticket: Ticket, reason: str) -> None:
        del self._tickets[ticket.request_id]
        self.books.release(ticket.request_id)
        self.finished[ticket.rank][reason] += 1

    # ---- to ranks

    def _send(self, rank: int, message: ToRank) -> None:
        """Raises Congested, or GangDown (after failing the gang) when the rank is gone."""
        try:
            self._link.send(self._identities[rank], encode(message))
        except Unroutable:
            self.fail(f"rank {rank} is not connected any more")
            raise GangDown(f"rank {rank} is not connected any more") from None

    def _try_send(self, rank: int, message: ToRank) -> bool:
        try:
            self._send(rank, message)
        except (Congested, GangDown):
            return False
        return True

    # ---- from ranks

    def _on_message(self, identity: bytes, payload: bytes) -> None:
        """Whatever arrives: parsed by schema, or counted and dropped. A peer has no say before its Hello, except for
        log lines, and to tell that its rank failed.
        """
        try:
            message = decode_to_router(payload)
        except (msgspec.DecodeError, RecursionError):
            self.bad_messages += 1
            return
        rank = self._ranks.get(identity)
        if isinstance(message, Hello):
            self._on_hello(identity, message)
        elif isinstance(message, Goodbye):
            self._on_goodbye(rank, message)
        elif isinstance(message, LogLine):
            self._on_line(rank, message)
        elif rank is None:
            self.bad_messages += 1
        elif isinstance(message, Output):
            self._on_output(rank, message)
        elif isinstance(message, Rejected):
            self._on_rejected(rank, message)
        if rank in self._late_aborts:
            self._flush_aborts(rank)

    def _on_line(self, rank: int | None, line: LogLine) -> None:
        """Only holders of the launch's key get this far, so a line may name the rank itself while it loads."""
        if rank not in (None, line.rank) or not 0 <= line.rank < self.world_size:
            self.bad_messages += 1
        elif self._on_log is not None:
            self._on_log(line.rank, line.level, line.text)

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        if (fault := self._fault(identity, hello)) is not None:
            self.bad_messages += 1
            self._refusals = [*self._refusals[-7:], fault]
            return
        self.hellos[hello.rank] = hello
        self._identities[hello.rank] = identity
        self._ranks[identity] = hello.rank
        self._try_send(hello.rank, Welcome(launch_id=self._keys.launch_id))
        self._changed.set()

    def _fault(self, identity: bytes, hello: Hello) -> str | None:
        """What is wrong with a Hello, or None."""
        for name, got, wanted in (
            ("protocol", hello.protocol, PROTOCOL_VERSION),
            ("launch", hello.launch_id, self._keys.launch_id),
            ("epoch", hello.epoch, self._epoch),
            ("world size", hello.world_size, self.world_size),
        ):
            if got != wanted:
                return f"rank {hello.rank} comes with {name} {got}, here it is {wanted}"
        if not 0 <= hello.rank < self.world_size:
            return f"rank {hello.rank} of {self.world_size}"
        if hello.rank in self.hellos or identity in self._ranks:
            return f"rank {hello.rank} is there already"
        return None

    def _on_goodbye(self, rank: int | None, goodbye: Goodbye) -> None:
        """A rank leaves. Before its Hello only its error counts: loading failed."""
        known = rank is not None and rank == goodbye.rank
        failed_early = rank is None and goodbye.error and goodbye.rank in self._missing()
        if not known and not failed_early:
            self.bad_messages += 1
            return
        self._goodbyes.add(goodbye.rank)
        if not self._stopping:
            self.fail(f"rank {goodbye.rank} failed: {goodbye.error}" if goodbye.error else f"rank {goodbye.rank} left")
        self._changed.set()

    def _on_output(self, rank: int, output: Output) -> None:
        """Tokens of requests that have ended here meanwhile (aborted) are dropped."""
        if len(output.request_ids) != len(output.tokens):
            self.bad_messages += 1
            return
        self.last_output_at = time.monotonic()
        if output.report is not None:
            self.reports[rank] = output.report
        tickets, progress = self._tickets, self.books.progress
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            ticket = tickets.get(request_id)
            if ticket is not None and ticket.rank == rank:
                ticket.push(token)
                progress(request_id)
        for request_id, reason in output.finished:
            ticket = tickets.get(request_id)
            if ticket is not None and ticket.rank == rank:
                self._close_ticket(ticket, reason)
                ticket.finish(reason)

    def _on_rejected(self, rank: int, rejected: Rejected) -> None:
        ticket = self._tickets.get(rejected.request_id)
        if ticket is not None and ticket.rank == rank:
            self._close_ticket(ticket, "rejected")
            ticket.fail(RequestRejected(rejected.reason))


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
