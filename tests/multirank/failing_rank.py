"""A rank in mid-load to which something happens, with an observer beside it, and what the others find out."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from dp_engine.batch import Batch, Drawn
from dp_engine.messages import Add, Message, Sampling, ToRank
from tests.multirank.world_rank import WorldRank, WorldRunner
from tests.scheduler_world import prompt_of
from vote.config import VoteConfig
from vote.decision import Clock
from vote.errors import LockstepBroken
from vote.group import CPU, Groups
from vote.observers import ObserverKeys, ObserverProcess, gather_observers
from vote.recorder import Recorder
from vote.witness import Witness

SIZE = 3
TROUBLE_TURN = 60
LATE_S = 0.6  # after the others have given up


@dataclass(frozen=True)
class Case:
    """What happens to which rank. `patience_s`: time-out of the groups."""

    how: str
    rank: int
    patience_s: float
    overlap: bool = False
    control: str = "star"


@dataclass(frozen=True)
class Finding:
    """What a rank was told, and how long after it began its last turn."""

    culprits: dict[int, str]
    step: int
    what: str
    text: str
    report: str
    after_s: float


def run(rank: int, store: dist.Store, case: Case, keys: ObserverKeys) -> Finding | None:
    """One rank's life, as `dp_engine.rank` leads it. None: it failed by itself."""
    recorder = Recorder(rank, SIZE, shared=True)
    observer = ObserverProcess(recorder, "127.0.0.1", keys)
    witness = Witness(recorder, gather_observers(observer, store, rank, SIZE, keys, 60.0))
    groups = Groups()
    groups.connect(
        store, rank, SIZE, control=case.control, device=CPU,
        host="127.0.0.1", secret=b"a secret", timeout_s=case.patience_s,
    )  # fmt: skip
    assert groups.data is not None
    link = LoadedLink(rank)
    engine = WorldRank(
        link, groups.control, groups.data, witness, VoteConfig(), make_runner=TwiceMeetingRunner, overlap=case.overlap
    )  # fmt: skip
    if rank == case.rank:
        link.trouble = troubles(engine, case)[case.how]
    try:
        engine.run()
    except LockstepBroken as error:
        after_s = time.monotonic() - link.looked_at
        return Finding(error.culprits, error.step, error.what, str(error), error.report, after_s)
    except Exception as error:
        recorder.last_words(f"{type(error).__name__}: {error}")
        groups.abandon()
        return None
    raise AssertionError("nobody asked this rank to stop")


class LoadedLink:
    """Brings a request every few turns, for ever; `trouble` comes once."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bad_messages = 0
        self.trouble: Callable[[], object] = lambda: None
        self.looked_at = time.monotonic()
        self._turn = 0

    def send(self, message: Message) -> None:
        del message

    def drain(self) -> list[ToRank]:
        self.looked_at = time.monotonic()
        self._turn += 1
        if self._turn == TROUBLE_TURN:
            self.trouble()
        if self._turn % 6 != 1:
            return []
        return [Add(self._turn, self._turn, prompt_of(self._turn % 50, 12), Sampling(10))]

    def wait(self, timeout_s: float | None = None) -> NoReturn:
        del timeout_s
        oversleep()


class TwiceMeetingRunner(WorldRunner):
    """All ranks wait for each other before and after the model, as for experts' tokens. `between`: what else a rank
    does in a step."""

    between: Callable[[], object] = staticmethod(lambda: None)

    def run(self, batch: Batch) -> Drawn:
        self._meet(b"dispatch", len(batch.input_ids))
        tokens = self._model(batch)
        self.between()
        self._meet(b"combine", len(batch.input_ids))
        return Drawn(tokens)

    def _exchange(self, number: int) -> int:
        total = torch.tensor([number])
        self._group.allreduce([total]).wait()
        return int(total) // self._group.size()


# ---- what may happen


def troubles(rank: WorldRank, case: Case) -> Mapping[str, Callable[[], object]]:
    """By name; all begin between two steps."""
    protocol, runner = rank.protocol, rank.runner

    def lose_count() -> None:
        protocol.clock = Clock(protocol.clock.step, protocol.clock.decode_step + 5)

    def skip_a_collective() -> None:
        rank.worker.num_collectives += 1

    return {
        "killed": lambda: signal_from_outside("KILL"),
        "stopped": lambda: signal_from_outside("STOP"),
        "hangs": oversleep,
        "hangs in a step": lambda: setattr(runner, "between", oversleep),
        "raises": no_such_thing,
        "raises in a step": lambda: setattr(runner, "between", no_such_thing),
        "late": lambda: time.sleep(case.patience_s + LATE_S),
        "decode_step": lose_count,
        "collectives": skip_a_collective,
        "settings": lambda: setattr(protocol, "_settings", 99),
        "sleeps": rank.engine._sleep,
    }


def signal_from_outside(name: str) -> None:
    """In a moment, wherever this process will be then."""
    subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -{name} {os.getpid()}"])


def oversleep() -> NoReturn:
    time.sleep(600)
    raise AssertionError("nobody has ended this process")


def no_such_thing() -> NoReturn:
    raise ValueError("no such thing")
