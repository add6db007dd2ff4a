"""One life of one gang as the router reaches it: the socket, who is there, and what each rank has yet to compute."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec

from dp_engine.messages import (
    Diagnosis,
    Goodbye,
    Hello,
    Loading,
    LogLine,
    Output,
    Rejected,
    Report,
    decode_to_router,
)
from launcher.books import Books
from launcher.keys import LaunchKeys
from launcher.link import SILENCE_S, RankLink
from launcher.roster import Roster, name_ranks
from launcher.ticket import GangDown, Ticket
from vote.observers import ObserverKeys, Observers

KEPT_LINES = 400  # of the ranks' logs, for a crash report


class Owner(Protocol):
    """Who hears what the ranks say: the router."""

    def on_output(self, link: "GangLink", rank: int, output: Output) -> None: ...
    def on_rejected(self, link: "GangLink", rank: int, rejected: Rejected) -> None: ...
    def on_line(self, link: "GangLink", line: LogLine) -> None: ...
    def on_loading(self, link: "GangLink", loading: Loading) -> None: ...
    def on_ready(self, link: "GangLink") -> None: ...
    def on_sign(self, link: "GangLink") -> None:
        """Some rank has sent something, so its queue may have room again."""

    def on_down(self, link: "GangLink") -> None:
        """Called once, at the first `fail`."""


class GangLink:
    """All methods are called on one event loop. Owns socket, roster and books of this life.

    A rank counts from its Hello on, and nothing is sent to it before. `reports` holds the last Report of each rank,
    `diagnosis` what the ranks found out about the gang's end, `probation` the suspect requests by the rank they are
    tried on. `down`: why this life is over, or None.
    """

    def __init__(
        self,
        replica: int,
        world_size: int,
        keys: LaunchKeys,
        epoch: int,
        owner: Owner,
        send_high_water: int,
        silence_s: float = SILENCE_S,
    ) -> None:
        """silence_s: a rank that gives no sign of life for so long is gone."""
        self.replica = replica
        self.world_size = world_size
        self.epoch = epoch
        self.books = Books(world_size)
        self.reports: dict[int, Report] = {}
        self.bad_messages = 0  # did not parse, or came from a peer that has no say
        self.last_output_at: float | None = None  # time.monotonic()
        self.down: str | None = None
        self.lost_rank: int | None = None  # whose connection is why
        self.moved_at: float | None = None  # time.monotonic(): some rank has loaded more
        self.fruitful = False  # some request has come to its end here
        self.diagnosis: Diagnosis | None = None
        self.probation: dict[int, Ticket] = {}
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._keys = keys
        self._owner = owner
        self._link = RankLink(keys, self._on_message, send_high_water, on_broken=self._on_broken, silence_s=silence_s)
        self.roster = Roster(world_size, keys.launch_id, epoch, self._link, self._on_lost)
        self._stopping = False
        self._goodbyes: set[int] = set()
        self._changed = asyncio.Event()  # a Hello, a Goodbye, a Diagnosis or a failure has come

    # ---- life

    async def start(self, host: str) -> None:
        """Bind the socket; `endpoint` is known afterwards."""
        await self._link.start(host)

    @property
    def endpoint(self) -> str:
        return self._link.endpoint

    @property
    def hellos(self) -> dict[int, Hello]:
        return self.roster.hellos

    @property
    def key(self) -> tuple[int, int]:
        """Names this life: replica and epoch."""
        return self.replica, self.epoch

    @property
    def ready(self) -> bool:
        return self.unready_reason is None

    @property
    def unready_reason(self) -> str | None:
        """Why this gang takes no requests at present, or None."""
        if self.down is not None:
            return self.down
        if missing := self.roster.missing:
            return f"waiting for {name_ranks(missing)}"
        return None

    def observers(self) -> Observers:
        """Whom to ask about the ranks, whatever state they are in. Raises GangDown before all have said Hello."""
        if missing := self.roster.missing:
            raise GangDown(f"waiting for {name_ranks(missing)}")
        keys = ObserverKeys(self._keys.client_public, self._keys.client_secret)
        return Observers({rank: hello.observer for rank, hello in self.hellos.items()}, keys)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for the Hello of every rank. Raises GangDown when the gang fails, TimeoutError naming absent ranks.

        The time counts anew whenever a rank has loaded more: a checkpoint may take longer, a silence may not.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0 and not self.ready and self.down is None:
            with suppress(TimeoutError):
                await self._wait_until(lambda: self.ready or self.down is not None, left_s)
            deadline = max(deadline, (self.moved_at or 0.0) + timeout_s)
        if self.down is not None:
            raise GangDown(self.down)
        if missing := self.roster.missing:
            refusals = self.roster.refusals
            refused = f" (refused: {'; '.join(refusals)})" if refusals else ""
            raise TimeoutError(f"no word from {name_ranks(missing)} within {timeout_s:g} s{refused}")

    async def wait_down(self) -> str:
        """Wait for the first `fail`, whoever calls it; returns its reason."""
        while self.down is None:
            self._changed.clear()
            await self._changed.wait()
        return self.down

    async def wait_diagnosis(self) -> Diagnosis:
        """Wait for what the ranks find out about their end; it may never come."""
        while self.diagnosis is None:
            self._changed.clear()
            await self._changed.wait()
        return self.diagnosis

    def fail(self, reason: str) -> None:
        """This life is over: nothing is handed out here any more. The first call wins."""
        if self.down is None:
            self.down = reason
            self._changed.set()
            self._owner.on_down(self)

    async def shutdown(self, timeout_s: float) -> list[int]:
        """Ask all ranks to leave, wait for their Goodbyes. Return the ranks that stayed silent."""
        self._stopping = True
        self.fail("the server is shutting down")
        told = self.roster.shut_down(rank for rank in self.hellos if rank not in self._goodbyes)
        with suppress(TimeoutError):
            await self._wait_until(lambda: self._goodbyes.issuperset(told), timeout_s)
        return sorted(set(self.hellos) - self._goodbyes)

    async def close(self) -> None:
        """Close the socket. Idempotent."""
        self.fail("the router is closed")
        await self._link.close()

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _on_lost(self, rank: int) -> None:
        self._lose(rank, f"rank {rank} is not connected any more")

    def _on_broken(self, identity: bytes, reason: str) -> None:
        """Messages were lost, or a connection has ended: fatal between a rank's Hello and its Goodbye."""
        rank = self.roster.rank_of(identity)
        if rank is not None and rank not in self._goodbyes and not self._stopping:
            self._lose(rank, f"rank {rank}: {reason}")

    def _lose(self, rank: int, reason: str) -> None:
        if self.down is None:
            self.lost_rank = rank
        self.fail(reason)

    # ---- from ranks

    def _on_message(self, identity: bytes, payload: bytes) -> None:
        """Whatever arrives: parsed by schema, or counted and dropped. A peer has no say before its Hello, except for
        log lines, how far it has loaded, and to tell that its rank failed.
        """
        try:
            message = decode_to_router(payload)
        except (msgspec.DecodeError, RecursionError):
            self.bad_messages += 1
            return
        rank = self.roster.rank_of(identity)
        if isinstance(message, Hello):
            self._on_hello(identity, message)
        elif isinstance(message, Goodbye):
            self._on_goodbye(rank, message)
        elif isinstance(message, LogLine):
            self._on_line(rank, message)
        elif isinstance(message, Loading):
            self._on_loading(rank, message)
        elif isinstance(message, Diagnosis):
            self._on_diagnosis(rank, message)
        elif rank is None:
            self.bad_messages += 1
        elif self.down is not None:
            return  # its requests are somebody else's by now
        elif isinstance(message, Output):
            self._on_output(rank, message)
        elif isinstance(message, Rejected):
            self._owner.on_rejected(self, rank, message)
        if rank is not None and self.down is None:
            self.roster.catch_up(rank)
            self._owner.on_sign(self)

    def _on_output(self, rank: int, output: Output) -> None:
        count = len(output.tokens)
        if len(output.request_ids) != count or len(output.logprobs or output.tokens) != count:
            self.bad_messages += 1
            return
        self.last_output_at = time.monotonic()
        if output.report is not None:
            self.reports[rank] = output.report
        self._owner.on_output(self, rank, output)

    def _on_line(self, rank: int | None, line: LogLine) -> None:
        """Only holders of the launch's key get this far, so a line may name the rank itself while it loads."""
        if rank not in (None, line.rank) or not 0 <= line.rank < self.world_size:
            self.bad_messages += 1
            return
        stamp = time.strftime("%H:%M:%S", time.gmtime())
        self.lines.append(f"{stamp} rank {line.rank} {logging.getLevelName(line.level)} {line.text}")
        self._owner.on_line(self, line)

    def _on_loading(self, rank: int | None, loading: Loading) -> None:
        if rank is not None or not 0 <= loading.rank < self.world_size:
            self.bad_messages += 1
            return
        self.moved_at = time.monotonic()
        self._owner.on_loading(self, loading)

    def _on_diagnosis(self, rank: int | None, diagnosis: Diagnosis) -> None:
        """All ranks that noticed send the same; the first counts. It may come before a Hello: from the warm-up."""
        if rank not in (None, diagnosis.rank):
            self.bad_messages += 1
        elif self.diagnosis is None and not self._stopping:
            self.diagnosis = diagnosis
            self._changed.set()

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        if not self.roster.admit(identity, hello):
            self.bad_messages += 1
            return
        self._changed.set()
        if self.ready:
            self._owner.on_ready(self)

    def _on_goodbye(self, rank: int | None, goodbye: Goodbye) -> None:
        """A rank leaves. Before its Hello only its error counts: loading failed."""
        known = rank is not None and rank == goodbye.rank
        failed_early = rank is None and goodbye.error and goodbye.rank in self.roster.missing
        if not known and not failed_early:
            self.bad_messages += 1
            return
        self._goodbyes.add(goodbye.rank)
        if self.diagnosis is not None:
            self.fail(self.diagnosis.title)
        elif not self._stopping:
            self.fail(f"rank {goodbye.rank} failed: {goodbye.error}" if goodbye.error else f"rank {goodbye.rank} left")
        self._changed.set()
