"""Which experts travel between ranks when a layer is placed anew, and in how many goes: pure."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ep.placement import ExpertPlacement


@dataclass(frozen=True, slots=True)
class Transfer:
    """A logical expert that rank `source` sends to rank `target`."""

    expert: int
    source: int
    target: int


def transfers(old: ExpertPlacement, new: ExpertPlacement) -> list[Transfer]:
    """What each rank lacks, from whichever holder has the least to send. The same on all ranks."""
    sent: Counter[int] = Counter()
    found = []
    for target in range(new.world_size):
        for expert in sorted(set(new.local_experts(target)) - set(old.local_experts(target))):
            holders = [old.rank_of[physical] for physical in old.physical_of[expert]]
            source = min(holders, key=lambda rank: (sent[rank], rank))
            sent[source] += 1
            found.append(Transfer(expert, source, target))
    return found


def in_goes(moves: Iterable[Transfer], most: int) -> Iterator[list[Transfer]]:
    """All of them, so that in one go no rank sends or receives more than `most` experts. None: no go."""
    rest = list(moves)
    while rest:
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        go, later = [], []
        for move in rest:
            if sent[move.source] < most and received[move.target] < most:
                sent[move.source] += 1
                received[move.target] += 1
                go.append(move)
            else:
                later.append(move)
        yield go
        rest = later
