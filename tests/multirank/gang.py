"""Runs a function on every rank of a small gang of real processes."""

import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from vote.rendezvous import join_store, open_store


class GangError(AssertionError):
    """A rank failed, died or did not end in time; the message has every known traceback."""


def run_gang(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    group_timeout_s: float | None = None,
    answers: Sequence[int] | None = None,
) -> list[Any]:
    """`function(rank, group, *args)` on `world_size` spawned processes; the results by rank.

    `group` is a gloo group of all ranks on loopback, whose collectives take `group_timeout_s` at most. Function,
    arguments and results must be picklable. The first failure ends all ranks. With `answers`, only the results of these
    ranks are waited for, and the others may do what they like. No process outlives the call.
    """
    context = mp.get_context("spawn")
    store, port = open_store("127.0.0.1", timeout_s)
    processes, pipes = [], []
    group_timeout_s = group_timeout_s or timeout_s
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            facts = (rank, world_size, port, group_timeout_s)
            process = context.Process(target=_run_rank, args=(theirs, facts, function, args))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        wanted = pipes if answers is None else [pipes[rank] for rank in answers]
        return _collect(wanted, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def _collect(pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = mp.connection.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            raise GangError(f"ranks {sorted(waiting.values())} did not end in time")
        failures = []
        for pipe in ready:
            rank = waiting[pipe]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, value = False, "died without a word"
            if ok:
                results[rank] = value
            else:
                failures.append(f"rank {rank}: {value}")
        if failures:
            raise GangError("\n".join(failures))
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    pipe: Any, facts: tuple[int, int, int, float], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    rank, world_size, port, timeout_s = facts
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = join_store("127.0.0.1", port, 60.0)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        pipe.send_bytes(pickle.dumps((True, function(rank, dist.group.WORLD, *args))))  # tensors by value
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
