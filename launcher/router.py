"""The router: gives every request to a rank of some gang, and every token back to its request. A request whose gang
ends goes on elsewhere, as its prompt and the tokens so far.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from dp_engine.messages import Add, Fault, Hello, Loading, LogLine, Output, PauseMode, Rejected, Sampling
from launcher import suspicion
from launcher.books import Quote
from launcher.death import Death
from launcher.gang_link import GangLink
from launcher.keys import LaunchKeys
from launcher.link import SILENCE_S, Congested, Unroutable
from launcher.replica import Replica
from launcher.roster import name_ranks
from launcher.ticket import (
    Delta,
    GangDown,
    Inbox,
    QueueFull,
    RankBusy,
    RequestRejected,
    Ticket,
    Work,
)
from launcher.waiting_room import WaitingRoom

__all__ = ["Delta", "GangDown", "Inbox", "QueueFull", "RankBusy", "RequestRejected", "Router", "Ticket"]

OnLog = Callable[[int, int, int, str], None]  # replica, rank, logging level, text
OnLoading = Callable[[int, int, Loading], None]  # replica, epoch


class Router:
    """The requests of all gangs. All methods are called on one event loop.

    Owns the tickets, the waiting room, and the replicas.
    """

    def __init__(
        self,
        world_size: int,
        *,
        replicas: int = 1,
        max_inflight: int = 4096,
        max_deaths: int = 2,
        silence_s: float = SILENCE_S,
        on_log: OnLog | None = None,
        on_loading: OnLoading | None = None,
    ) -> None:
        """silence_s: a rank that gives no sign of life for so long is gone."""
        self.world_size = world_size
        self.max_inflight = max_inflight
        self.max_deaths = max_deaths
        self.replicas = [Replica(number, world_size) for number in range(replicas)]
        self.paused: PauseMode = "none"
        self.hellos: dict[int, list[Hello]] = {}  # of each gang's last life that was ready
        self.unplaced: Counter[str] = Counter(abort=0, gang_down=0, poisoned=0)  # ends of requests that waited
        self._silence_s = silence_s
        self._on_log = on_log
        self._on_loading = on_loading
        self._tickets: dict[int, Ticket] = {}
        self._room = WaitingRoom()
        self._next_id = 1
        self._down: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._drain = asyncio.Event()

    # ---- gangs

    def open(self, replica: int, keys: LaunchKeys, epoch: int) -> GangLink:
        """A new life of a gang, which the caller starts and closes."""
        place = self.replicas[replica]
        high_water = 4 * self.max_inflight + 1024
        place.link = GangLink(replica, self.world_size, keys, epoch, self, high_water, self._silence_s)
        return place.link

    def bury(self, replica: int, epoch: int, death: Death) -> int:
        """It is known why a life ended: suspects of it that were not on a rank at fault are none any more, the others
        have one more death to their name. Returns how many requests go on."""
        carried = 0
        for ticket in list(self._tickets.values()):
            rank = ticket.died_with.pop((replica, epoch), None)
            if rank is None:
                continue
            carried += 1
            if death.blames(rank):
                if (error := suspicion.blame(ticket, death, self.max_deaths)) is not None:
                    self._end(ticket, "poisoned")
                    ticket.fail(error)
            elif not ticket.died_with and not ticket.strikes:
                self._acquit(ticket)
            carried -= not ticket.open
        self._pump()
        return carried

    def restarting(self, replica: int, reason: str) -> None:
        """The replica is between two lives, or its next one has not come up either."""
        place = self.replicas[replica]
        place.state, place.reason = "restarting", reason

    def give_up(self, replica: int, reason: str) -> None:
        """There will be no more lives of this replica. When it was the last one, all requests end with GangDown."""
        place = self.replicas[replica]
        place.state, place.reason = "failed", reason
        if all(place.state == "failed" for place in self.replicas):
            self.fail(reason)

    @property
    def unready_reason(self) -> str | None:
        """Why no request can be served at present, or None."""
        if self._down is not None:
            return self._down
        if self.draining:
            return "the server is draining"
        if any(place.serving for place in self.replicas):
            return None
        return "; ".join(dict.fromkeys(place.unready_reason for place in self.replicas))

    @property
    def draining(self) -> bool:
        return self._drain.is_set()

    @property
    def ready(self) -> bool:
        return self.unready_reason is None

    @property
    def links(self) -> list[GangLink]:
        """Of the gangs that serve."""
        return [link for place in self.replicas if (link := place.serving)]

    def fail(self, reason: str) -> None:
        """The end: open requests end with GangDown(reason), later ones are refused. The first call wins."""
        if self._down is not None:
            return
        self._down = reason
        for ticket in list(self._tickets.values()):
            self._close_ticket(ticket, "gang_down")
            ticket.fail(GangDown(reason))

    async def shutdown(self, timeout_s: float = 5.0) -> list[tuple[int, int]]:
        """End open requests, ask all ranks to leave, wait for their Goodbyes. Return (replica, rank) of the silent."""
        self.fail("the server is shutting down")
        links = [place.link for place in self.replicas if place.link is not None and place.link.down is None]
        silent = await asyncio.gather(*(link.shutdown(timeout_s) for link in links))
        return [(link.replica, rank) for link, ranks in zip(links, silent, strict=True) for rank in ranks]

    async def close(self) -> None:
        """Close all links; requests still open end with GangDown. Idempotent."""
        self.fail("the router is closed")
        await asyncio.gather(*(place.link.close() for place in self.replicas if place.link is not None))

    # ---- requests

    @property
    def inflight(self) -> int:
        """Requests that have not ended, waiting ones included."""
        return len(self._tickets)

    @property
    def num_waiting(self) -> int:
        """Of these, the ones that run nowhere at present."""
        return len(self._room)

    @property
    def num_suspects(self) -> int:
        return sum(ticket.suspect for ticket in self._tickets.values())

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
        """Hand a request to the rank where it makes the least resulting load; between two lives of the gang it waits
        for the next one. Raises QueueFull or GangDown.

        Of several choices for one prompt the first names their number, so that the rank is chosen for all of them; the
        others name it as their parent and go to the same rank, which computes the prompt once.
        """
        reason = self._down or ("the server is draining" if self.draining else None)
        if reason is None and not self.hellos:
            reason = self.unready_reason
        if reason is not None:
            raise GangDown(reason)
        if len(self._tickets) >= self.max_inflight:
            raise QueueFull(f"{self.max_inflight} requests are in flight already")
        work = Work(prompt_ids, sampling, priority, cache_salt, choices, parent)
        ticket = Ticket(self._next_id, work, inbox)
        self._tickets[ticket.request_id] = ticket  # before it is placed: that gang may end at this very moment
        try:
            placed = not self._room.has_others and self._place(ticket)
        except Congested as error:
            del self._tickets[ticket.request_id]
            raise QueueFull(str(error)) from None
        self._next_id += 1
        self._idle.clear()
        if not placed and not ticket.suspect:
            self._room.join(ticket)
        return ticket

    def abort(self, ticket: Ticket, reason: str = "abort") -> None:
        """End a request here and at its rank, with `reason` as its finish reason. Idempotent."""
        if ticket.request_id not in self._tickets:
            return
        self._end(ticket, reason)
        ticket.finish(reason)
        self._pump()

    def drain(self) -> None:
        """Take no more requests; those in flight go on."""
        self._drain.set()

    async def wait_drained(self) -> None:
        """Wait until somebody has asked to drain and no request is in flight."""
        await self._drain.wait()
        await self._idle.wait()

    def _end(self, ticket: Ticket, reason: str) -> None:
        """Close a ticket whose rank, if it has one, does not know yet."""
        link = ticket.link
        self._close_ticket(ticket, reason)
        if link is not None and link.down is None:
            link.roster.abort(ticket.rank, ticket.request_id)

    def _close_ticket(self, ticket: Ticket, reason: str) -> None:
        del self._tickets[ticket.request_id]
        if ticket.link is None:
            self._room.leave(ticket)
            self.unplaced[reason] += 1
        else:
            self._leave_rank(ticket, ticket.link, reason)
        if not self._tickets:
            self._idle.set()

    def _leave_rank(self, ticket: Ticket, link: GangLink, reason: str) -> None:
        link.books.release(ticket.request_id)
        self.replicas[link.replica].finished[ticket.rank][reason] += 1
        suspicion.end_probation(ticket)

    # ---- where requests run

    def _pump(self) -> None:
        """Hand out what waits, as far as there is room."""
        if len(self._room) and any(place.serving for place in self.replicas):
            self._room.hand_out(self._try_place)

    def _try_place(self, ticket: Ticket) -> bool:
        try:
            return self._place(ticket)
        except Congested:
            return False  # the next sign of that rank tries again

    def _place(self, ticket: Ticket) -> bool:
        """Hand a request that runs nowhere to a rank. False: there is none at present. Raises Congested."""
        while (spot := self._spot(ticket)) is not None:
            link, rank, parent = spot
            work = ticket.work
            add = Add(
                wake=link.roster.wake + 1,
                request_id=ticket.request_id,
                prompt=work.prompt + ticket.emitted,
                sampling=work.sampling,
                num_emitted=len(ticket.emitted),
                parent=parent,
                priority=work.priority,
                cache_salt=work.cache_salt,
            )
            try:
                link.roster.hand(rank, add)
            except Congested:
                raise Congested(f"rank {rank} takes no more messages") from None
            except Unroutable:
                continue  # that gang is down now
            ticket.link, ticket.rank = link, rank
            link.books.charge(ticket.request_id, rank, 0 if parent else len(add.prompt), ticket.remaining)
            self.replicas[link.replica].started[rank] += 1
            if ticket.suspect:
                suspicion.try_out(ticket, link, rank)
            link.roster.wake_all()
            return True
        return False

    def _spot(self, ticket: Ticket) -> tuple[GangLink, int, int] | None:
        """Gang, rank and parent id for a request, or None if no gang has a place for it."""
        work, parent = ticket.work, ticket.work.parent
        fresh = not ticket.emitted and not ticket.suspect
        if fresh and parent is not None and parent.link is not None and parent.link.ready:
            return parent.link, parent.rank, parent.request_id
        best: tuple[Quote, GangLink] | None = None
        for link in self.links:
            if not (among := suspicion.free_ranks(link, ticket)):
                continue
            tokens = len(work.prompt) + len(ticket.emitted)
            quote = link.books.quote(tokens, ticket.remaining, work.choices if fresh else 1, among)
            if best is None or quote < best[0]:
                best = quote, link
        return None if best is None else (best[1], best[0].rank, 0)

    def _acquit(self, ticket: Ticket) -> None:
        """It was not the cause of any death."""
        if not ticket.suspect:
            return
        suspicion.end_probation(ticket)
        if ticket.link is None:
            self._room.acquit(ticket)
        ticket.suspect = False
        ticket.strikes = 0

    # ---- the operator's

    def pause(self, mode: PauseMode) -> None:
        """Tell all ranks what they may start; "none" is go on. Requests are taken, and wait, all the while.

        Raises GangDown, or RankBusy when a queue is full: then the mode stays as it was.
        """
        self._require_links()
        before, self.paused = self.paused, mode
        busy = {link.replica: ranks for link in self.links if (ranks := link.roster.pause(mode))}
        if busy:
            self.paused = before
            for link in self.links:
                link.roster.pause(before)
        self._require_links()  # a rank may have turned out to be lost
        if busy:
            raise RankBusy(f"the queue to {self._names(busy)} is full; the pause mode is still {self.paused!r}")

    def reset_prefix_cache(self) -> None:
        """Let all ranks forget their cached prefixes.

        Raises GangDown, or RankBusy when a queue is full: that rank forgets them as soon as it reads again.
        """
        self._require_links()
        busy = {link.replica: ranks for link in self.links if (ranks := link.roster.reset_prefix_cache())}
        self._require_links()
        if busy:
            raise RankBusy(f"the queue to {self._names(busy)} is full; prefixes are still cached there")

    def inject(self, replica: int, rank: int, fault: Fault) -> None:
        """Let something go wrong at a rank, in this life of the gang or, if it is poison, in all that follow too.

        Raises GangDown, or RankBusy when the rank's queue is full.
        """
        place = self.replicas[replica]
        if self._down is not None or (link := place.serving) is None:
            raise GangDown(self._down or place.unready_reason)
        try:
            link.roster.inject(rank, fault)
        except Congested:
            raise RankBusy(f"the queue to rank {rank} is full") from None
        except Unroutable:
            raise GangDown(link.down) from None
        if fault.kind == "poison":
            place.standing.append((rank, fault))

    def _require_links(self) -> None:
        if self._down is not None or not self.links:
            raise GangDown(self.unready_reason)

    def _names(self, ranks: dict[int, list[int]]) -> str:
        if len(self.replicas) == 1:
            return name_ranks(ranks[0])
        return ", ".join(f"{name_ranks(found)} of gang {replica}" for replica, found in ranks.items())

    # ---- from the gangs

    def on_ready(self, link: GangLink) -> None:
        place = self.replicas[link.replica]
        place.state, place.reason = "serving", ""
        self.hellos[link.replica] = list(link.hellos.values())
        for rank, fault in place.standing:
            link.roster.inject(rank, fault)
        if self.paused != "none":
            link.roster.pause(self.paused)
        self._pump()

    def on_sign(self, link: GangLink) -> None:
        del link
        self._pump()

    def on_down(self, link: GangLink) -> None:
        """What was running there goes on elsewhere, the oldest first and before what waits already."""
        place = self.replicas[link.replica]
        if place.state == "serving":
            self.restarting(link.replica, link.down or "")
        carried = [ticket for ticket in self._tickets.values() if ticket.link is link]
        for ticket in carried:
            self._leave_rank(ticket, link, "carried_over")
            suspicion.suspect(ticket, link)
        self._room.carry(carried)
        self._pump()

    def on_loading(self, link: GangLink, loading: Loading) -> None:
        if self._on_loading is not None:
            self._on_loading(link.replica, link.epoch, loading)

    def on_line(self, link: GangLink, line: LogLine) -> None:
        if self._on_log is not None:
            self._on_log(link.replica, line.rank, line.level, line.text)

    def on_output(self, link: GangLink, rank: int, output: Output) -> None:
        """Tokens of requests that have ended here meanwhile (aborted) are dropped."""
        tickets, progress = self._tickets, link.books.progress
        logprobs = output.logprobs or [None] * len(output.tokens)
        for request_id, token, shares in zip(output.request_ids, output.tokens, logprobs, strict=True):
            ticket = tickets.get(request_id)
            if ticket is not None and ticket.link is link and ticket.rank == rank:
                ticket.push(token, shares)
                progress(request_id)
                if ticket.suspect:
                    self._on_probation(ticket)
        for request_id, reason in output.finished:
            ticket = tickets.get(request_id)
            if ticket is not None and ticket.link is link and ticket.rank == rank:
                link.fruitful = True
                self._close_ticket(ticket, reason)
                ticket.finish(reason)

    def _on_probation(self, ticket: Ticket) -> None:
        """A suspect has got a token further."""
        ticket.probation -= 1
        if ticket.probation == 0:
            self._acquit(ticket)

    def on_rejected(self, link: GangLink, rank: int, rejected: Rejected) -> None:
        ticket = self._tickets.get(rejected.request_id)
        if ticket is not None and ticket.link is link and ticket.rank == rank:
            self._close_ticket(ticket, "rejected")
            ticket.fail(RequestRejected(rejected.reason))
