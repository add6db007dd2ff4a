"""Queues of waiting sequences: head, push and removal of any member cost O(1) or O(log n), however long they are."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from dp_engine.sequence import Sequence


class FifoQueue:
    """In order of arrival; a sequence that has to go again is put before all others."""

    def __init__(self) -> None:
        self._members: OrderedDict[int, Sequence] = OrderedDict()  # by arrival number

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def __reversed__(self) -> Iterator[Sequence]:
        return iter(reversed(self._members.values()))

    def __contains__(self, seq: Sequence) -> bool:
        return seq.number in self._members

    @property
    def head(self) -> Sequence:
        return next(iter(self._members.values()))

    def push(self, seq: Sequence) -> None:
        self._members[seq.number] = seq

    def push_front(self, seq: Sequence) -> None:
        self._members[seq.number] = seq
        self._members.move_to_end(seq.number, last=False)

    def remove(self, seq: Sequence) -> None:
        del self._members[seq.number]


class PriorityQueue:
    """By (priority, arrival), lower first. Removed members stay in the heap until they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._members: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._members.values(), key=place))

    def __reversed__(self) -> Iterator[Sequence]:
        return iter(sorted(self._members.values(), key=place, reverse=True))

    def __contains__(self, seq: Sequence) -> bool:
        return seq.number in self._members

    @property
    def head(self) -> Sequence:
        while self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def push(self, seq: Sequence) -> None:
        if seq.number not in self._members:
            self._members[seq.number] = seq
            heapq.heappush(self._heap, (*place(seq), seq))

    push_front = push

    def remove(self, seq: Sequence) -> None:
        del self._members[seq.number]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(*place(member), member) for member in self._members.values()]
            heapq.heapify(self._heap)


def place(seq: Sequence) -> tuple[int, int]:
    """Order by priority, then by arrival; the greatest is the worst."""
    return seq.priority, seq.number
