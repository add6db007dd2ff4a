"""Runs a function on every rank of a small gang of real processes.

They are forked from a server that has imported torch and our packages once: a gang starts in a moment.
"""

import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from vote.rendezvous import join_store, open_store

HOST = "127.0.0.1"
JOIN_TIMEOUT_S = 60.0
IMPORTED = ["torch", "torch.distributed", "dp_engine.rank", "ep.alltoall", "tests.multirank.engine_rank"]


class GangError(AssertionError):
    """A rank failed, died or did not end in time; the message has every known traceback."""


def run_gang(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    group_timeout_s: float | None = None,
    answers: Collection[int] | None = None,
) -> list[Any]:
    """`function(rank, group, *args)` on `world_size` processes; the results by rank.

    `group` is a gloo group of all ranks on loopback, whose collectives take `group_timeout_s` at most. Function,
    arguments and results must be picklable. The first failure ends all ranks. With `answers`, only the results of these
    ranks are waited for, and the others may do what they like. No process outlives the call.
    """
    store, port = open_store(HOST, timeout_s)
    group_timeout = timedelta(seconds=group_timeout_s or timeout_s)
    with Gang(timeout_s) as gang:
        for rank in range(world_size):
            gang.start(rank, _in_group, world_size, port, group_timeout, function, args)
        results = gang.results(range(world_size) if answers is None else answers)
    del store
    return list(results.values())


class Gang:
    """Ranks that run beside the test; whoever is left at the end of the `with` is killed."""

    def __init__(self, timeout_s: float = 120.0) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Any] = {}

    def __enter__(self) -> "Gang":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Run `function(rank, *args)` in a new process."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run, args=(theirs, rank, function, args))
        process.start()
        theirs.close()
        self._processes[rank], self._pipes[rank] = process, ours

    def start_all(self, function: Callable[..., Any], world_size: int, *args: Any) -> None:
        """`function(rank, store, *args)` on all ranks. As in a real gang, rank 0 keeps the store and says where."""
        self.start(0, _with_own_store, function, args)
        port = self._receive(0)
        for rank in range(1, world_size):
            self.start(rank, _with_store, port, function, args)

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def results(self, ranks: Collection[int]) -> dict[int, Any]:
        """Wait for what these ranks return. GangError when one fails, or time is over."""
        results: dict[int, Any] = {}
        while missing := {self._pipes[rank]: rank for rank in ranks if rank not in results}:
            timeout = max(self._deadline - time.monotonic(), 0)
            ready = mp.connection.wait(list(missing), timeout)
            if not ready:
                raise GangError(f"ranks {sorted(missing.values())} did not end in time")
            failures = []
            for pipe in ready:
                rank = missing[pipe]
                try:
                    results[rank] = self._receive(rank)
                except GangError as error:
                    failures.append(str(error))
            if failures:
                raise GangError("\n".join(failures))
        return {rank: results[rank] for rank in ranks}

    def _receive(self, rank: int) -> Any:
        try:
            ok, value = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            ok, value = False, "died without a word"
        if not ok:
            raise GangError(f"rank {rank}: {value}")
        return value


# ---- in the processes


def leave_together(rank: int, store: Any, world_size: int) -> None:
    """Wait for all others; rank 0 also until nobody asks its store any more."""
    everybody = range(world_size)
    store.set(f"leaves/{rank}", "")
    store.wait([f"leaves/{other}" for other in everybody])
    store.set(f"left/{rank}", "")
    if rank == 0:
        store.wait([f"left/{other}" for other in everybody])


def _run(pipe: Any, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)

    def say(value: Any, ok: bool = True) -> None:
        pipe.send_bytes(pickle.dumps((ok, value)))  # tensors by value

    try:
        say(function(say, rank, *args) if function is _with_own_store else function(rank, *args))
    except BaseException:
        say(traceback.format_exc(), ok=False)


def _with_own_store(say: Callable[[Any], None], rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    store, port = open_store(HOST, JOIN_TIMEOUT_S)
    say(port)
    return function(rank, store, *args)


def _with_store(rank: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(rank, join_store(HOST, port, JOIN_TIMEOUT_S), *args)


def _in_group(
    rank: int, world_size: int, port: int, timeout: timedelta, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    import torch.distributed as dist

    store = join_store(HOST, port, JOIN_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    result = function(rank, dist.group.WORLD, *args)
    dist.destroy_process_group()
    return result
