"""Forks: requests that share another one's KV as far as both have the same tokens."""

from collections.abc import Iterable

import numpy as np

from dp_engine.ledger import Ledgers
from dp_engine.sequence import Sequence


class Branches:
    """Forks that wait for their parent's prompt. Those that end meanwhile stay in here unseen."""

    def __init__(self) -> None:
        self._children: dict[int, list[Sequence]] = {}  # by the parent's request id

    def __bool__(self) -> bool:
        return bool(self._children)

    def attach(self, parent: Sequence, children: Iterable[Sequence]) -> None:
        if alive := [child for child in children if not child.status.finished]:
            self._children.setdefault(parent.request_id, []).extend(alive)

    def take(self, parent: Sequence) -> list[Sequence]:
        """The parent's forks, in order of arrival, which wait no more."""
        return [child for child in self._children.pop(parent.request_id, []) if not child.status.finished]

    def parents_among(self, request_ids: list[int]) -> list[int]:
        return [request_id for request_id in request_ids if request_id in self._children]


def common_prefix(ledgers: Ledgers, parent: Sequence, child: Sequence, computed: int) -> int:
    """Leading tokens that `child`, which has no row, can share of the parent's `computed` ones: never its last token,
    which has to be computed for the next one to be drawn.
    """
    most = min(computed, len(child.tokens) - 1, int(ledgers.length[parent.row]))
    differ = np.flatnonzero(ledgers.tokens[parent.row, :most] != child.tokens[:most])
    return int(differ[0]) if len(differ) else most
