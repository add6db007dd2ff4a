"""A ballot against a bare all-reduce of 4 bytes, on a gang of real processes over loopback.

Both travel over the same processes, one of each kind in turn, so that what slows the machine slows both. The bare one
is `torch.distributed.all_reduce` of one int32, MIN, over gloo. A ballot is `StepProtocol.agree` whole: facts written,
recorder kept, exchange, tally proved, decision taken.
"""

import multiprocessing as mp
import os
import pickle
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from vote.ballot import Facts
from vote.config import VoteConfig
from vote.group import ControlGroup, TorchControlGroup
from vote.protocol import StepProtocol
from vote.recorder import Recorder
from vote.rendezvous import join_store, open_store
from vote.star import connect_star
from vote.witness import Witness

TIMEOUT_S = 120.0
WARM_UP = 200
DECODES = Facts(has_decode=True, unfinished=True, running=8)


class GangFailed(RuntimeError):
    """A rank failed; the message is its traceback."""


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
    ballots, bare = _on_all(ranks, _alternate, control, rounds, turns)
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
    _in_turns(kinds, WARM_UP)
    medians: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for column, found in zip(medians, _in_turns(kinds, turns), strict=True):
            column.append(1e6 * statistics.median(found))
    return medians


def _nothing() -> bool:
    raise AssertionError("nobody wants a prefill")


def _in_turns(kinds: Sequence[Callable[[], object]], turns: int) -> list[list[float]]:
    """Seconds of each kind, one after the other."""
    clock, times = time.perf_counter, [[0.0] * turns for _ in kinds]
    for turn in range(turns):
        for kind, column in zip(kinds, times, strict=True):
            began = clock()
            kind()
            column[turn] = clock() - began
    return times


def _on_all(ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(rank, group, *args)` in a process per rank; what rank 0 returns."""
    context = mp.get_context("spawn")
    store, port = open_store("127.0.0.1", TIMEOUT_S)
    ours, theirs = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_be_rank, args=(theirs, rank, ranks, port, function, args)) for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        theirs.close()
        ok, value = pickle.loads(ours.recv_bytes())
    except EOFError:
        raise GangFailed("the ranks died without a word") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store
    if not ok:
        raise GangFailed(value)
    return value


def _be_rank(pipe: Any, rank: int, ranks: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = join_store("127.0.0.1", port, TIMEOUT_S)
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        value = function(rank, dist.group.WORLD, *args)
        dist.barrier()
        if rank == 0:
            pipe.send_bytes(pickle.dumps((True, value)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


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
