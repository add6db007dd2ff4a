"""The router: gives every request to a rank, and every token back to its request."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import msgspec

from dp_engine.messages import (
    Add,
    Diagnosis,
    Goodbye,
    Hello,
    LogLine,
    Output,
    PauseMode,
    Rejected,
    Report,
    Sampling,
    decode_to_router,
)
from launcher.books import Books
from launcher.keys import LaunchKeys
from launcher.link import Congested, RankLink, Unroutable
from launcher.roster import Roster, name_ranks
from launcher.ticket import Delta, GangDown, Inbox, QueueFull, RankBusy, RequestRejected, Ticket
from vote.observers import ObserverKeys, Observers

__all__ = ["Delta", "GangDown", "Inbox", "QueueFull", "RankBusy", "RequestRejected", "Router", "Ticket"]

OnLog = Callable[[int, int, str], None]  # rank, logging level, text


class Router:
    """One gang's requests. All methods are called on one event loop.

    Owns the books, the tickets and the roster. A rank counts from its Hello on, and nothing is sent to it before.
    `reports` holds the last Report of each rank. `started` and `finished` count requests per rank (and per finish
    reason); reasons of the router's own are `abort`, `rejected` and `gang_down`.
    """

    def __init__(
        self,
        world_size: int,
        keys: LaunchKeys,
        epoch: int,
        host: str = "127.0.0.1",
        max_inflight: int = 4096,
        on_log: OnLog | None = None,
        on_diagnosis: Callable[[str], None] | None = None,
    ) -> None:
        self.world_size = world_size
        self.max_inflight = max_inflight
        self.reports: dict[int, Report] = {}
        self.started = [0] * world_size
        self.finished: list[Counter[str]] = [Counter() for _ in range(world_size)]
        self.bad_messages = 0  # did not parse, or came from a peer that has no say
        self.last_output_at: float | None = None  # time.monotonic()
        self.books = Books(world_size)
        self._keys = keys
        self._host = host
        self._on_log = on_log
        self._on_diagnosis = on_diagnosis  # called once
        self._link = RankLink(keys, self._on_message, send_high_water=4 * max_inflight + 1024)
        self._roster = Roster(world_size, keys.launch_id, epoch, self._link, self._on_lost)
        self._tickets: dict[int, Ticket] = {}
        self._next_id = 1
        self._down: str | None = None
        self._stopping = False
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
    def hellos(self) -> dict[int, Hello]:
        return self._roster.hellos

    def observers(self) -> Observers:
        """Whom to ask about the ranks, whatever state they are in. Raises GangDown before all have said Hello."""
        if missing := self._roster.missing:
            raise GangDown(f"waiting for {name_ranks(missing)}")
        keys = ObserverKeys(self._keys.client_public, self._keys.client_secret)
        return Observers({rank: hello.observer for rank, hello in self.hellos.items()}, keys)

    @property
    def wake(self) -> int:
        """The last wake number."""
        return self._roster.wake

    @property
    def paused(self) -> PauseMode:
        """What all ranks were told last by `pause`."""
        return self._roster.paused

    @property
    def ready(self) -> bool:
        return self.unready_reason is None

    @property
    def unready_reason(self) -> str | None:
        """Why no request can be served at present, or None."""
        if self._down is not None:
            return self._down
        if missing := self._roster.missing:
            return f"waiting for {name_ranks(missing)}"
        return None

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for the Hello of every rank. Raises GangDown when the gang fails, TimeoutError naming absent ranks."""
        with suppress(TimeoutError):
            await self._wait_until(lambda: self.ready or self._down is not None, timeout_s)
        if self._down is not None:
            raise GangDown(self._down)
        if missing := self._roster.missing:
            refusals = self._roster.refusals
            refused = f" (refused: {'; '.join(refusals)})" if refusals else ""
            raise TimeoutError(f"no word from {name_ranks(missing)} within {timeout_s:g} s{refused}")

    async def shutdown(self, timeout_s: float = 5.0) -> list[int]:
        """End open requests, ask all ranks to leave, wait for their Goodbyes. Return the ranks that stayed silent."""
        self._stopping = True
        self._end_all("the server is shutting down")
        told = self._roster.shut_down(rank for rank in self.hellos if rank not in self._goodbyes)
        with suppress(TimeoutError):
            await self._wait_until(lambda: self._goodbyes.issuperset(told), timeout_s)
        return sorted(set(self.hellos) - self._goodbyes)

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

    def _require_ready(self) -> None:
        if (reason := self.unready_reason) is not None:
            raise GangDown(reason)

    def _on_lost(self, rank: int) -> None:
        self.fail(f"rank {rank} is not connected any more")

    # ---- requests

    @property
    def inflight(self) -> int:
        return len(self._tickets)

    def submit(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        inbox: Inbox | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        choices: int = 1,
        parent: Ticket | None = None,
    ) -> Ticket:
        """Hand a request to the rank where it makes the least resulting load. Raises QueueFull or GangDown.

        Of several choices for one prompt the first names their number, so that the rank is chosen for all of them; the
        others name it as their parent and go to the same rank, which computes the prompt once.
        """
        self._require_ready()
        if len(self._tickets) >= self.max_inflight:
            raise QueueFull(f"{self.max_inflight} requests are in flight already")
        prefill = len(prompt_ids) if parent is None else 0
        rank = self.books.choose(prefill, sampling.max_tokens, choices) if parent is None else parent.rank
        add = Add(
            wake=self.wake + 1,
            request_id=self._next_id,
            prompt=prompt_ids,
            sampling=sampling,
            parent=parent.request_id if parent is not None else 0,
            priority=priority,
            cache_salt=cache_salt,
        )
        try:
            self._roster.hand(rank, add)
        except Congested:
            raise QueueFull(f"rank {rank} takes no more messages") from None
        except Unroutable:
            raise GangDown(self._down) from None
        self._next_id += 1
        self.books.charge(add.request_id, rank, prefill, sampling.max_tokens)
        self.started[rank] += 1
        ticket = self._tickets[add.request_id] = Ticket(add.request_id, rank, sampling, inbox)
        self._roster.wake_all()
        return ticket

    def abort(self, ticket: Ticket, reason: str = "abort") -> None:
        """End a request here and at its rank, with `reason` as its finish reason. Idempotent."""
        if ticket.request_id not in self._tickets:
            return
        self._close_ticket(ticket, reason)
        ticket.finish(reason)
        self._roster.abort(ticket.rank, ticket.request_id)

    def _close_ticket(self, ticket: Ticket, reason: str) -> None:
        del self._tickets[ticket.request_id]
        self.books.release(ticket.request_id)
        self.finished[ticket.rank][reason] += 1

    # ---- the operator's

    def pause(self, mode: PauseMode) -> None:
        """Tell all ranks what they may start; "none" is go on. Requests are taken, and wait, all the while.

        Raises GangDown, or RankBusy when a queue is full: then the mode stays as it was.
        """
        self._require_ready()
        busy = self._roster.pause(mode)
        self._require_ready()  # a rank may have turned out to be lost
        if busy:
            raise RankBusy(f"the queue to {name_ranks(busy)} is full; the pause mode is still {self.paused!r}")

    def reset_prefix_cache(self) -> None:
        """Let all ranks forget their cached prefixes.

        Raises GangDown, or RankBusy when a queue is full: that rank forgets them as soon as it reads again.
        """
        self._require_ready()
        busy = self._roster.reset_prefix_cache()
        self._require_ready()
        if busy:
            raise RankBusy(f"the queue to {name_ranks(busy)} is full; prefixes are still cached there")

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
        rank = self._roster.rank_of(identity)
        if isinstance(message, Hello):
            self._on_hello(identity, message)
        elif isinstance(message, Goodbye):
            self._on_goodbye(rank, message)
        elif isinstance(message, LogLine):
            self._on_line(rank, message)
        elif isinstance(message, Diagnosis):
            self._on_report(rank, message)
        elif rank is None:
            self.bad_messages += 1
        elif isinstance(message, Output):
            self._on_output(rank, message)
        elif isinstance(message, Rejected):
            self._on_rejected(rank, message)
        if rank is not None and self._down is None:
            self._roster.catch_up(rank)

    def _on_line(self, rank: int | None, line: LogLine) -> None:
        """Only holders of the launch's key get this far, so a line may name the rank itself while it loads."""
        if rank not in (None, line.rank) or not 0 <= line.rank < self.world_size:
            self.bad_messages += 1
        elif self._on_log is not None:
            self._on_log(line.rank, line.level, line.text)

    def _on_report(self, rank: int | None, diagnosis: Diagnosis) -> None:
        """All ranks that noticed send the same; the first is shown. It may come before a Hello: from the warm-up."""
        if rank not in (None, diagnosis.rank):
            self.bad_messages += 1
        elif self._on_diagnosis is not None and not self._stopping:
            self._on_diagnosis(diagnosis.text)
            self._on_diagnosis = None

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        if self._roster.admit(identity, hello):
            self._changed.set()
        else:
            self.bad_messages += 1

    def _on_goodbye(self, rank: int | None, goodbye: Goodbye) -> None:
        """A rank leaves. Before its Hello only its error counts: loading failed."""
        known = rank is not None and rank == goodbye.rank
        failed_early = rank is None and goodbye.error and goodbye.rank in self._roster.missing
        if not known and not failed_early:
            self.bad_messages += 1
            return
        self._goodbyes.add(goodbye.rank)
        if not self._stopping:
            self.fail(f"rank {goodbye.rank} failed: {goodbye.error}" if goodbye.error else f"rank {goodbye.rank} left")
        self._changed.set()

    def _on_output(self, rank: int, output: Output) -> None:
        """Tokens of requests that have ended here meanwhile (aborted) are dropped."""
        logprobs = [None] * len(output.tokens) if output.logprobs is None else output.logprobs
        if not len(output.request_ids) == len(output.tokens) == len(logprobs):
            self.bad_messages += 1
            return
        self.last_output_at = time.monotonic()
        if output.report is not None:
            self.reports[rank] = output.report
        tickets, progress = self._tickets, self.books.progress
        for request_id, token, logprob in zip(output.request_ids, output.tokens, logprobs, strict=True):
            ticket = tickets.get(request_id)
            if ticket is not None and ticket.rank == rank:
                ticket.push(token, logprob)
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
