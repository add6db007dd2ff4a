"""A gang of bare processes over loopback, for measuring what ranks do to each other."""

import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from vote.rendezvous import join_store, open_store

TIMEOUT_S = 120.0


class GangFailed(RuntimeError):
    """A rank failed; the message is its traceback."""


def on_all(ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(rank, group, *args)` in a process per rank, `group` being gloo's; what rank 0 returns. Raises
    GangFailed."""
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


def in_turns(kinds: Sequence[Callable[[], object]], turns: int) -> list[list[float]]:
    """Seconds of each kind, one after the other, so that all meet the same moods of the machine."""
    clock, times = time.perf_counter, [[0.0] * turns for _ in kinds]
    for turn in range(turns):
        for kind, column in zip(kinds, times, strict=True):
            began = clock()
            kind()
            column[turn] = clock() - began
    return times


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
