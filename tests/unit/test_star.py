"""Ballots by way of rank 0, over real sockets between threads."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from vote.star import StarGroup, connect_star

SECRET = b"of this launch"


class Store:
    """A gang's store, as far as a star needs one."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 10)
            return self._values[key]


def gang(
    size: int, script: Callable[[StarGroup], Any], timeout_s: float = 10.0, store: Store | None = None
) -> list[Any]:
    """Run `script(group)` on every rank; results or exceptions."""
    store = store or Store()

    def rank_main(rank: int) -> Any:
        group = connect_star(store, rank, size, host="127.0.0.1", secret=SECRET, timeout_s=timeout_s)  # type: ignore[arg-type]
        try:
            return script(group)
        except RuntimeError as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_main, range(size)))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_everybody_gets_the_minimum(size: int) -> None:
    rounds = [np.random.default_rng(n).integers(-(2**31), 2**31, (size, 5 + n % 3), np.int32) for n in range(60)]

    def script(group: StarGroup) -> list[list[int]]:
        return [group.all_reduce_min(ballots[group.rank]).tolist() for ballots in rounds]

    assert gang(size, script) == [[ballots.min(axis=0).tolist() for ballots in rounds]] * size


def test_a_result_is_the_callers() -> None:
    def script(group: StarGroup) -> int:
        first = group.all_reduce_min(np.array([group.rank + 7], np.int32))
        group.all_reduce_min(np.array([group.rank], np.int32))
        return int(first[0])

    assert gang(2, script) == [7, 7]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_does_not_come(missing: int) -> None:
    over = threading.Event()

    def script(group: StarGroup) -> str:
        if group.rank == missing:
            assert over.wait(10)
            return "was away"
        try:
            group.all_reduce_min(np.zeros(4, np.int32))
        finally:
            over.set()
        return "nobody was missed"

    said = gang(3, script, timeout_s=0.5)
    assert said.pop(missing) == "was away"
    assert {type(error) for error in said} == {RuntimeError}
    assert any("did not come in time" in str(error) for error in said)


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_a_rank_that_goes_is_noticed_by_all_at_once(leaving: int) -> None:
    def script(group: StarGroup) -> float:
        group.all_reduce_min(np.zeros(4, np.int32))
        if group.rank == leaving:
            return 0.0
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"closed its connection|reset|pipe"):
            for _ in range(2):
                group.all_reduce_min(np.zeros(4, np.int32))
        return time.monotonic() - started

    assert max(gang(3, script, timeout_s=30.0)) < 10


def test_who_does_not_know_the_secret_stays_outside() -> None:
    store = Store()
    refused = threading.Event()

    def intrude() -> None:
        host, port = store.get("star").decode().split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(bytes(36))
            assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32  # the nonce
            assert stranger.recv(1) == b""
            refused.set()

    intruder = threading.Thread(target=intrude)
    intruder.start()

    class Slow(Store):
        """Rank 1 comes after the stranger."""

        set = store.set

        def get(self, key: str) -> bytes:
            assert refused.wait(10)
            return store.get(key)

    assert gang(2, lambda group: int(group.all_reduce_min(np.array([3], np.int32))[0]), store=Slow()) == [3, 3]
    intruder.join()


def test_a_gang_that_is_not_complete() -> None:
    with pytest.raises(RuntimeError, match="rank 0 cannot reach the others to vote: a rank did not come in time"):
        connect_star(Store(), 0, 2, host="127.0.0.1", secret=SECRET, timeout_s=0.2)  # type: ignore[arg-type]
