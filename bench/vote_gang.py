"""A ballot against a bare all-reduce of 4 bytes, on a gang of real processes over loopback.

Both travel over the same processes, one of each kind in turn, so that what slows the machine slows both. The bare one
is `torch.distributed.all_reduce` of one int32, MIN, over gloo. A ballot is `StepProtocol.agree` whole: facts written,
recorder kept, exchange, tally proved, decision taken.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

from bench.gang import TIMEOUT_S, in_turns, on_all
from vote.ballot import Facts
from vote.config import VoteConfig
from vote.group import ControlGroup, TorchControlGroup
from vote.protocol import StepProtocol
from vote.recorder import Recorder
from vote.star import connect_star
from vote.witness import Witness

WARM_UP = 200
DECODES = Facts(has_decode=True, unfinished=True, running=8)


@dataclass(frozen=True)
class BallotCost:
    """Medians of rank 0, in µs; one entry per round. `control`: what ballots travel over."""

    ranks: int
    control: str
    ballot_us: list[float]
    bare_us: list[float]

    @property
    def ratios(self) -> list[float]:
        return [ballot / bare for ballot, bare in zip(self.ballot_us, self.bare_us, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def measure_ballots(ranks: int, control: str, rounds: int, turns: int) -> BallotCost:
    """`rounds` of `turns` of each kind. Raises GangFailed."""
    ballots, bare = on_all(ranks, _alternate, control, rounds, turns)
    return BallotCost(ranks, control, ballots, bare)


def _alternate(rank: int, group: Any, control: str, rounds: int, turns: int) -> tuple[list[float], list[float]]:
    import torch
    import torch.distributed as dist

    size = group.size()
    store = dist.distributed_c10d._get_default_store()
    ballots: ControlGroup = TorchControlGroup(group)
    if control == "star":
        ballots = connect_star(store, rank, size, host="127.0.0.1", secret=b"a secret", timeout_s=TIMEOUT_S)
    protocol = StepProtocol(ballots, VoteConfig(), Witness(Recorder(rank, size)))
    number = torch.zeros(1, dtype=torch.int32)

    kinds = (lambda: protocol.agree(DECODES, _nothing), lambda: dist.all_reduce(number, dist.ReduceOp.MIN, group))
    in_turns(kinds, WARM_UP)
    medians: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for column, found in zip(medians, in_turns(kinds, turns), strict=True):
            column.append(1e6 * statistics.median(found))
    return medians


def _nothing() -> bool:
    raise AssertionError("nobody wants a prefill")


def recorder_ns(entries: int, rounds: int) -> list[float]:
    """Nanoseconds of an entry, entered and left, the loop around it included; one median per round of a thousandth."""
    ring = Recorder(0, 1, shared=True).control
    found = []
    for _ in range(rounds):
        blocks = []
        for _ in range(entries // 1000):
            began = time.perf_counter_ns()
            for _ in range(1000):
                ring.leave(ring.enter(b"first ballot", ordinal=1))
            blocks.append((time.perf_counter_ns() - began) / 1000)
        found.append(statistics.median(blocks))
    return found
