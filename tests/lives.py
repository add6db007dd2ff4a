"""A router and the gangs it outlives, all played by the test."""

from typing import Any

from dp_engine.messages import PROTOCOL_VERSION, Add, Hello, Output, Wake, decode_to_rank, encode
from launcher.death import Death
from launcher.gang_link import GangLink
from launcher.keys import LaunchKeys
from launcher.link import Congested, Unroutable
from launcher.router import Router, Ticket


class Lives:
    """A router whose gangs the test plays: nothing runs. `sent` has (replica, epoch, rank, message)."""

    def __init__(self, world_size: int = 2, replicas: int = 1, **options: Any) -> None:
        self.router = Router(world_size, replicas=replicas, **options)
        self.sent: list[tuple[int, int, int, Any]] = []
        self.full: set[tuple[int, int]] = set()
        self.lost: dict[tuple[int, int], int] = {}  # ranks that are found to be gone after so many wake-ups
        self.links: dict[int, GangLink] = {}
        for replica in range(replicas):
            self.begin(replica)

    def begin(self, replica: int = 0, *, present: bool = True) -> GangLink:
        """The next life of a gang."""
        epoch = self.links[replica].epoch + 1 if replica in self.links else 1
        keys = LaunchKeys.generate()
        link = self.links[replica] = self.router.open(replica, keys, epoch)

        def send(identity: bytes, payload: bytes) -> None:
            if (replica, int(identity)) in self.full:
                raise Congested
            if isinstance(decode_to_rank(payload), Wake) and self._is_lost(replica, int(identity)):
                raise Unroutable
            self.sent.append((replica, epoch, int(identity), decode_to_rank(payload)))

        link._link.send = send  # type: ignore[method-assign]
        size = self.router.world_size
        for rank in range(size if present else 0):
            self.say(link, rank, Hello(PROTOCOL_VERSION, keys.launch_id, epoch, rank, size, 1, 100, 512, ""))
        return link

    def _is_lost(self, replica: int, rank: int) -> bool:
        left = self.lost.pop((replica, rank), None)
        if left:
            self.lost[replica, rank] = left - 1
        return left == 0

    def say(self, link: GangLink, rank: int, message: Any) -> None:
        link._on_message(b"%d" % rank, encode(message))

    def adds(self) -> list[tuple[int, int, int, Add]]:
        """Requests handed out since the last call."""
        sent, self.sent = self.sent, []
        return [entry for entry in sent if isinstance(entry[3], Add)]

    def emit(self, ticket: Ticket, *tokens: int, end: str | None = None) -> None:
        """The rank that has the request says these tokens of it."""
        assert ticket.link is not None
        finished = [] if end is None else [(ticket.request_id, end)]
        self.say(ticket.link, ticket.rank, Output(1, [ticket.request_id] * len(tokens), list(tokens), finished))

    def die(
        self, culprits: set[int] | None, *, replica: int = 0, innocent: bool = False, reason: str = "it died"
    ) -> int:
        link = self.links[replica]
        link.fail(reason)
        blamed = frozenset(culprits) if culprits is not None else None
        return self.router.bury(replica, link.epoch, Death(reason, blamed, innocent))
