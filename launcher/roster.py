"""The ranks as the router knows them: who is there, and what each has been told."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from dp_engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    Fault,
    Hello,
    Message,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Shutdown,
    Wake,
    Welcome,
    encode,
)
from launcher.link import Congested, RankLink, Unroutable

SHOWN_REFUSALS = 8


@dataclass(slots=True)
class _Peer:
    """What a rank has been sent; `aborts` is what it has not."""

    identity: bytes
    wake: int = 0
    mode: PauseMode = "none"
    resets: int = 0
    aborts: list[int] = field(default_factory=list)


class Roster:
    """Owns the Hellos, the wake number, the pause mode, and what a full queue has kept from a rank.

    Any message may wake a sleeping rank, and a rank that is awake waits for all others in its vote. So every message
    after the Welcome goes with a new wake number that all ranks hear: at once, or, when a queue is full, as soon as
    there is a sign of that rank (`catch_up`). `on_lost(rank)` is called when one turns out not to be connected.
    """

    def __init__(
        self, world_size: int, launch_id: str, epoch: int, link: RankLink, on_lost: Callable[[int], None]
    ) -> None:
        self.world_size = world_size
        self.hellos: dict[int, Hello] = {}
        self.refusals: list[str] = []  # the last ones
        self.wake = 0
        self.paused: PauseMode = "none"
        self._launch_id = launch_id
        self._epoch = epoch
        self._link = link
        self._on_lost = on_lost
        self._resets = 0
        self._peers: dict[int, _Peer] = {}
        self._ranks: dict[bytes, int] = {}

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.hellos]

    def rank_of(self, identity: bytes) -> int | None:
        return self._ranks.get(identity)

    def admit(self, identity: bytes, hello: Hello) -> bool:
        """Welcome a rank, or note in `refusals` why not."""
        if (fault := self._fault(identity, hello)) is not None:
            self.refusals = [*self.refusals[1 - SHOWN_REFUSALS :], fault]
            return False
        self.hellos[hello.rank] = hello
        self._peers[hello.rank] = _Peer(identity)
        self._ranks[identity] = hello.rank
        self._try_send(hello.rank, Welcome(launch_id=self._launch_id))
        return True

    def _fault(self, identity: bytes, hello: Hello) -> str | None:
        """What is wrong with a Hello, or None."""
        for name, got, wanted in (
            ("protocol", hello.protocol, PROTOCOL_VERSION),
            ("launch", hello.launch_id, self._launch_id),
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

    # ---- to ranks

    def hand(self, rank: int, add: Add) -> None:
        """Send a request that carries the number `wake + 1`; `wake_all` has to follow.

        Raises Congested or Unroutable; then nothing has changed.
        """
        self._send(rank, add)
        self.wake = self._peers[rank].wake = add.wake

    def wake_all(self) -> None:
        """All ranks hear of the wake number."""
        for rank in self._peers:
            self.catch_up(rank)

    def abort(self, rank: int, request_id: int) -> None:
        self._peers[rank].aborts.append(request_id)
        self._spread()

    def pause(self, mode: PauseMode) -> list[int]:
        """Set the mode of all ranks. Return those whose queue is full; they hear of it as soon as there is room."""
        self.paused = mode
        self._spread()
        return [rank for rank, peer in self._peers.items() if peer.mode != mode]

    def reset_prefix_cache(self) -> list[int]:
        """Return the ranks whose queue is full: they forget their prefixes as soon as they hear of it."""
        self._resets += 1
        self._spread()
        return [rank for rank, peer in self._peers.items() if peer.resets != self._resets]

    def inject(self, rank: int, fault: Fault) -> None:
        """Let something go wrong at a rank. Raises Congested or Unroutable; then nothing has changed."""
        self._send(rank, msgspec.structs.replace(fault, wake=self.wake + 1))
        self.wake = self._peers[rank].wake = self.wake + 1
        self.wake_all()

    def shut_down(self, ranks: Iterable[int]) -> list[int]:
        """Ask ranks to leave. Return those that were told."""
        self.wake += 1
        return [rank for rank in ranks if self._try_send(rank, Shutdown(self.wake))]

    def catch_up(self, rank: int) -> None:
        """Tell a rank what it has not been told yet, as far as its queue has room."""
        peer = self._peers[rank]
        if peer.aborts and self._try_send(rank, Abort(peer.aborts)):
            peer.aborts = []
        if peer.resets != self._resets and self._try_send(rank, ResetPrefixCache(self.wake)):
            peer.resets, peer.wake = self._resets, self.wake
        if peer.mode != self.paused and self._try_send(rank, Pause(self.wake, self.paused)):
            peer.mode, peer.wake = self.paused, self.wake
        if peer.wake != self.wake and self._try_send(rank, Wake(self.wake)):
            peer.wake = self.wake

    def _spread(self) -> None:
        self.wake += 1
        self.wake_all()

    def _send(self, rank: int, message: Message) -> None:
        try:
            self._link.send(self._peers[rank].identity, encode(message))
        except Unroutable:
            self._on_lost(rank)
            raise

    def _try_send(self, rank: int, message: Message) -> bool:
        try:
            self._send(rank, message)
        except (Congested, Unroutable):
            return False
        return True


def name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
