"""Faults for simulated ranks, and the observer that sees them from outside."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dp_engine.proof.simulated_rank import SimulatedRunner
from dp_engine.worker import StepWorker
from vote.protocol import StepProtocol
from vote.recorder import Recorder
from vote.report import Report, compose, sight


class Gone(Exception):
    """A simulated rank comes no more. Others cannot know why."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank in a turn. `kind`: one of FAULTS."""

    kind: str
    rank: int
    turn: int

    def strike(self, protocol: StepProtocol, runner: SimulatedRunner, worker: StepWorker) -> None:
        FAULTS[self.kind].strike(protocol, runner, worker)

    @property
    def state(self) -> str:
        """Of the rank's process afterwards."""
        return FAULTS[self.kind].state

    @property
    def in_forward(self) -> bool:
        """It happens in the next forward, not before the vote."""
        return FAULTS[self.kind].in_forward

    @property
    def silent(self) -> bool:
        """The rank goes on as if nothing had happened; between two ranks nobody can tell who is wrong."""
        return FAULTS[self.kind].silent


@dataclass(frozen=True)
class _Kind:
    strike: Callable[[StepProtocol, SimulatedRunner, StepWorker], None]
    state: str = "running"
    silent: bool = False
    in_forward: bool = False


def _leave(protocol: StepProtocol, runner: SimulatedRunner, worker: StepWorker) -> None:
    raise Gone


def _leave_in_forward(protocol: StepProtocol, runner: SimulatedRunner, worker: StepWorker) -> None:
    def leave() -> None:
        raise Gone

    runner.before = leave


def _fail_in_forward(protocol: StepProtocol, runner: SimulatedRunner, worker: StepWorker) -> None:
    def fail() -> None:
        raise ValueError("no such thing")

    runner.before = fail


def _forget_decode_step(protocol: StepProtocol, runner: SimulatedRunner, worker: StepWorker) -> None:
    protocol.clock = replace(protocol.clock, decode_step=0 if protocol.clock.decode_step else 1)


def _other_settings(protocol: StepProtocol, runner: SimulatedRunner, worker: StepWorker) -> None:
    protocol._settings += 1


def _miscount(protocol: StepProtocol, runner: SimulatedRunner, worker: StepWorker) -> None:
    worker.num_collectives += 1


FAULTS: dict[str, _Kind] = {
    "fails": _Kind(_fail_in_forward, in_forward=True),
    "hangs": _Kind(_leave),
    "hangs-in-forward": _Kind(_leave_in_forward, in_forward=True),
    "is-stopped": _Kind(_leave, "stopped"),
    "is-killed": _Kind(_leave, "dead"),
    "decode-step": _Kind(_forget_decode_step, silent=True),
    "settings": _Kind(_other_settings, silent=True),
    "collectives": _Kind(_miscount, silent=True),
}


class SimulatedReporter:
    """Sees all ranks' recorders (`vote.witness.Reporter`). `made`: the one report."""

    def __init__(self, recorders: Sequence[Recorder], fault: Fault | None) -> None:
        self.made: Report | None = None
        self._recorders = recorders
        self._fault = fault

    def report(self, *, mismatch: bool) -> Report | None:
        if self.made is None:
            now = time.time()
            seen = {
                rank: sight(recorder.read(), state=self._state(rank), host="here", now=now)
                for rank, recorder in enumerate(self._recorders)
            }
            self.made = compose(seen, mismatch=mismatch)
        return self.made

    def _state(self, rank: int) -> str:
        return self._fault.state if self._fault is not None and self._fault.rank == rank else "running"
