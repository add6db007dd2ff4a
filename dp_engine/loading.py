"""A rank's word on how far it has loaded: to its router for people to see, and to the other ranks, who wait for it."""

import time
from typing import TYPE_CHECKING

from dp_engine.link import Link
from dp_engine.messages import Loading

if TYPE_CHECKING:
    from torch.distributed import Store

EVERY_S = 0.25
_COUNTER = "loading/reports"


class LoadingReports:
    """Called by the loop thread, as the link is. Only bytes that have moved are reported."""

    def __init__(self, link: Link, store: "Store | None") -> None:
        self._link = link
        self._store = store
        self._last = (-1, -1)
        self._due = 0.0

    def on_bytes(self, done: int, total: int) -> None:
        """Report, unless the last report was sent a moment ago."""
        if time.monotonic() >= self._due:
            self._send(done, total)

    def close(self) -> None:
        """Loaded: what was estimated as the total and not taken is not needed."""
        total = max(self._last)
        if total >= 0:
            self._send(total, total)

    def _send(self, done: int, total: int) -> None:
        if (done, total) == self._last:
            return
        self._last = (done, total)
        self._due = time.monotonic() + EVERY_S
        self._link.send(Loading(self._link.rank, done, total))
        if self._store is not None:
            self._store.add(_COUNTER, 1)


def num_reports(store: "Store") -> int:
    """Of all ranks together so far: it rises as long as somebody loads."""
    return int(store.add(_COUNTER, 0))
