"""Requests that run nowhere at present, in the order in which they are given a place."""

from collections import deque
from collections.abc import Callable, Sequence

from launcher.ticket import Ticket


class WaitingRoom:
    """Suspects stand apart, since there may be no place for any of them while there is one for others; they come first,
    as they have waited longest."""

    def __init__(self) -> None:
        self._suspects: deque[Ticket] = deque()
        self._others: deque[Ticket] = deque()
        self._busy = False

    def __len__(self) -> int:
        return len(self._suspects) + len(self._others)

    @property
    def has_others(self) -> bool:
        """Whether a new request would have somebody before it."""
        return bool(self._others)

    def join(self, ticket: Ticket) -> None:
        """A new request, behind all others."""
        self._others.append(ticket)

    def carry(self, suspects: Sequence[Ticket]) -> None:
        """The requests of a gang that has ended, in their order, before all that wait."""
        self._suspects.extendleft(reversed(suspects))

    def acquit(self, ticket: Ticket) -> None:
        """It is a suspect no more, and waits before all ordinary ones."""
        self._suspects.remove(ticket)
        self._others.appendleft(ticket)

    def leave(self, ticket: Ticket) -> None:
        """It does not wait any more."""
        (self._suspects if ticket.suspect else self._others).remove(ticket)

    def hand_out(self, place: Callable[[Ticket], bool]) -> None:
        """Offer each a place, in order, until there is none. What `place` sets off may come back here."""
        if self._busy:
            return
        self._busy = True
        try:
            for queue in (self._suspects, self._others):
                while queue:
                    ticket = queue.popleft()  # its new gang may end at once and bring it back, before others
                    if not place(ticket):
                        queue.appendleft(ticket)
                        break
        finally:
            self._busy = False
