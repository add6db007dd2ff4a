"""A rank for the explorer: the real step loop, protocol and scheduler, with a pretended model, inbox and group."""

import copyreg
import io
import pickle
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from dp_engine.batch import Batch, Drawn
from dp_engine.config import EngineConfig
from dp_engine.engine import Engine, StepCounters
from dp_engine.messages import Add, Message, Output, Rejected, ToRank
from dp_engine.policies import make_scheduler
from dp_engine.proof.portraits import PORTRAITS
from dp_engine.proof.worlds import World
from dp_engine.scheduler import Scheduler
from dp_engine.worker import StepWorker, Submitted
from vote.automaton import Meetings, Snapshot, Turn
from vote.ballot import Facts
from vote.decision import Clock, StepType
from vote.fingerprint import fingerprint
from vote.foresight import earliest_like
from vote.protocol import Agreement, StepProtocol
from vote.recorder import Recorder
from vote.simulated import SimulatedGroup
from vote.witness import Witness

FIRST_TOKEN = 10  # the token at index i of a sequence is FIRST_TOKEN + i: no end of sequence, and gaps show


@dataclass(frozen=True)
class Cast:
    """Who plays a rank. Tests put mutants here."""

    group: type[SimulatedGroup] = SimulatedGroup
    protocol: type[StepProtocol] = StepProtocol
    engine: type[Engine] = Engine
    scheduler: Callable[..., Scheduler] = make_scheduler
    vote: dict[str, Any] = field(default_factory=dict)  # settings that differ from the world's
    settings: int = 0
    clock: Clock = field(default_factory=Clock)


@dataclass
class Core:
    """What a rank carries from one piece of its way to the next: all that can influence what it does later.

    in_flight: with overlap, the batch of the step in flight, which `moves` experts first or not; moving: how far these
    are, and `wants_rebalance`, whether the rank votes that they should go on; told: what the router has been told of
    each request, a number of tokens, or a reason once it has ended. Not in here: the number of votes, steps and
    collectives so far. They only ever grow, are compared with the other ranks' in `Turn.counts`, and decide nothing.
    """

    scheduler: Scheduler
    clock: Clock
    in_flight: Batch | None = None
    moves: bool = False
    moving: "Moving | None" = None
    wants_rebalance: bool = False
    told: dict[int, int | str] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)  # length, by request
    stopped: bool = False


class ExploredRank:
    """One rank of a world (`vote.automaton.Subject`)."""

    def __init__(self, world: World, rank: int, cast: Cast) -> None:
        self.rank = rank
        self._world = world
        self._cast = cast
        self._vote = world.vote.model_copy(update=cast.vote)
        self._recorder = Recorder(rank, world.ranks)
        self._frozen: dict[bytes, bytes] = {}  # cores by fingerprint

    def begin(self) -> Snapshot:
        world = self._world
        scheduler = self._cast.scheduler(world.engine, world.num_blocks, world.max_model_len, [2])
        moving = Moving(world.rebalance_interval) if world.rebalance_interval else None
        return self._freeze(Core(scheduler, self._cast.clock, moving=moving), asleep=False)

    def receive(self, snapshot: Snapshot, messages: Sequence[ToRank]) -> Snapshot:
        core = self._thaw(snapshot)
        inbox = _Inbox(core, messages)
        engine, _, _ = self._engine(core, inbox, _Nobody(self._world.ranks))
        engine.receive()
        return self._freeze(core, asleep=False)

    def step(self, snapshot: Snapshot, meetings: Meetings) -> tuple[Snapshot, Turn]:
        core = self._thaw(snapshot)
        inbox = _Inbox(core, ())
        engine, heard, worker = self._engine(core, inbox, meetings)
        core.stopped = not engine.step()
        core.scheduler.check_integrity()
        worker.keep_in(core)
        core.clock = earliest_like(heard.clock, self._world.vote)
        counts = (heard.clock, worker.num_collectives, worker.num_submitted, core.in_flight is None)
        turn = Turn(heard.facts, heard.agreement, heard.served, could_work(core.scheduler), counts)
        return self._freeze(core, asleep=inbox.asleep), turn

    def _freeze(self, core: Core, *, asleep: bool) -> Snapshot:
        key = fingerprint(core, PORTRAITS)
        if key not in self._frozen:
            self._frozen[key] = _pickled(core)
        return Snapshot(key, asleep, core.stopped)

    def _thaw(self, snapshot: Snapshot) -> Core:
        return pickle.loads(self._frozen[snapshot.key])

    def left_over(self, snapshot: Snapshot) -> str:
        core = self._thaw(snapshot)
        scheduler = core.scheduler
        faults = [
            f"{scheduler.num_unfinished} requests" * bool(scheduler.num_unfinished),
            f"{scheduler.pool.num_used} blocks" * bool(scheduler.pool.num_used),
            f"rows {scheduler.running.tolist()}" * bool(len(scheduler.running)),
            "a step in flight" * (core.in_flight is not None),
            *[
                f"request {request} without an end"
                for request, told in core.told.items()
                if not isinstance(told, str) and request not in self._world.aborted
            ],
        ]
        return ", ".join(fault for fault in faults if fault)

    def _engine(self, core: Core, inbox: "_Inbox", meetings: Meetings) -> tuple[Engine, "HeardProtocol", "_Worker"]:
        """The rank as `dp_engine.rank` puts it together, in the state of `core`."""
        cast, config = self._cast, self._world.engine
        worker = _Worker(core, meetings, self.rank, self._recorder)
        mixed = config.policy == "unified"
        protocol = cast.protocol(
            cast.group(meetings, self.rank), self._vote, Witness(self._recorder), mixed=mixed,
            settings=cast.settings, count_collectives=lambda: worker.num_collectives,
            placement=lambda: worker.placement,
        )  # fmt: skip
        protocol.clock = core.clock
        heard = HeardProtocol(protocol)
        parts: Any = (inbox, heard, core.scheduler, worker, StepCounters())
        engine = cast.engine(*parts, mixed=mixed, overlap=config.overlap, ring=self._recorder.control)
        engine._step = None if core.in_flight is None else 0
        return engine, heard, worker


class HeardProtocol:
    """A step protocol, and what was voted and agreed last; stands between it and the step loop."""

    def __init__(self, protocol: StepProtocol) -> None:
        self.protocol = protocol
        self.broken = protocol.broken
        self.facts = Facts()
        self.agreement = Agreement(0, StepType.IDLE)
        self._attempted = False  # with success

    @property
    def clock(self) -> Clock:
        return self.protocol.clock

    @property
    def served(self) -> bool:
        """This rank got what it wanted a prefill for, or told that it has ended."""
        return self.agreement.step_type is StepType.PREFILL and self._attempted

    def agree(self, facts: Facts, attempt_prefill: Callable[[], bool]) -> Agreement:
        def attempt() -> bool:
            self._attempted = attempt_prefill()
            return self._attempted

        self.facts, self._attempted = facts, False
        self.agreement = self.protocol.agree(facts, attempt)
        return self.agreement


class _Nobody:
    """For the part of a turn that meets nobody."""

    def __init__(self, size: int) -> None:
        self.size = size

    def meet(self, rank: int, place: Hashable, value: Any) -> list[Any]:
        raise AssertionError(f"rank {rank} is at {place} before its vote")


class _Inbox:
    """The end of a link. Checks what the rank tells the router: every token once, in order, and one end."""

    bad_messages = 0

    def __init__(self, core: Core, messages: Sequence[ToRank]) -> None:
        self.asleep = False
        self._core = core
        self._messages = messages

    def drain(self) -> list[ToRank]:
        for message in self._messages:
            if isinstance(message, Add):
                self._core.told[message.request_id] = 0
                self._core.prompts[message.request_id] = len(message.prompt)
        return list(self._messages)

    def wait(self) -> None:
        self.asleep = True

    def send(self, message: Message) -> None:
        told, prompts = self._core.told, self._core.prompts
        if isinstance(message, Rejected):
            told[message.request_id] = "rejected"
        if not isinstance(message, Output):
            return
        for request, token in zip(message.request_ids, message.tokens, strict=True):
            before = told[request]
            assert isinstance(before, int), f"a token for request {request} after its end"
            assert token == FIRST_TOKEN + prompts[request] + before, f"request {request} was told another token"
            told[request] = before + 1
        for request, reason in message.finished:
            assert isinstance(told[request], int), f"request {request} ended twice"
            told[request] = reason


class _Worker(StepWorker):
    """Runs the pretended model, whose forward is one collective."""

    def __init__(self, core: Core, meetings: Meetings, rank: int, recorder: Recorder) -> None:
        model: Any = _Model(meetings, rank)
        super().__init__(model, recorder.data, _Rebalancer(core.moving, model) if core.moving else None)  # type: ignore[arg-type]
        self._submitted = None if core.in_flight is None else Submitted(core.in_flight, 0, core.moves)
        self.wants_rebalance = core.wants_rebalance
        self.num_submitted = 0

    def submit(self, batch: Batch, step: int, rebalance: bool = False) -> None:
        super().submit(batch, step, rebalance)
        self.num_submitted += 1

    def keep_in(self, core: Core) -> None:
        """Write down what has to be there when it goes on."""
        core.in_flight, _, core.moves = self._submitted or (None, 0, False)
        core.wants_rebalance = self.wants_rebalance


class _Model:
    def __init__(self, meetings: Meetings, rank: int) -> None:
        self.num_collectives = 0
        self._meetings = meetings
        self._rank = rank

    def run(self, batch: Batch) -> Drawn:
        self.meet(f"the {batch.step_type.value} forward")
        counts = 1 + batch.num_drafts
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return Drawn(FIRST_TOKEN + np.repeat(batch.sampling.position, counts) + offsets)

    def meet(self, place: str) -> None:
        """A collective."""
        self.num_collectives += 1
        self._meetings.meet(self._rank, place, None)


@dataclass
class Moving:
    """How far a rank is with moving experts, which it begins every `interval` forwards."""

    interval: int
    forwards: int = 0  # since the last round, up to `interval`
    pieces: int = 0  # of this round that are done


class _Rebalancer:
    """A round is two layers: experts of the first move, those of the second stay where they are."""

    def __init__(self, moving: Moving, model: _Model) -> None:
        self._moving = moving
        self._model = model

    @property
    def placement(self) -> int:
        return self._moving.pieces

    @property
    def wanted(self) -> bool:
        return self._moving.pieces > 0 or self._moving.forwards == self._moving.interval

    def advance(self) -> None:
        self._model.meet(f"the loads of layer {self._moving.pieces}")
        if self._moving.pieces == 0:
            self._model.meet("the weights of layer 0")
            self._moving.pieces = 1
        else:
            self._moving.pieces = self._moving.forwards = 0

    def step_done(self) -> None:
        self._moving.forwards = min(self._moving.forwards + 1, self._moving.interval)


def could_work(scheduler: Scheduler) -> bool:
    """Is there anything this rank could do now, judged by its queues, not by what it votes?"""
    if scheduler.unreported:
        return True
    if scheduler.paused == "all":
        return False
    if len(scheduler.running) > 0:
        return True
    return scheduler.paused == "none" and (
        bool(scheduler.prompted) or (len(scheduler.waiting) > 0 and scheduler.waiting.head.schedulable)
    )


# ---- freezing


def _pickled(core: Core) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {EngineConfig: _by_text}
    pickler.dump(core)
    return buffer.getvalue()


@lru_cache
def _by_text(config: EngineConfig) -> tuple[Any, ...]:
    return _of_text, (config.model_dump_json(),)


@lru_cache
def _of_text(text: str) -> EngineConfig:
    """One object per configuration, however often it is thawed."""
    return EngineConfig.model_validate_json(text)
