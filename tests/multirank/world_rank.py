"""A rank of a gang with a scheduler world's fake model: real loop, votes, scheduler and collectives, no weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dp_engine.batch import Batch, Drawn
from dp_engine.engine import Engine, StepCounters
from dp_engine.messages import Report
from dp_engine.worker import make_worker
from ep.dispatch import CollectiveFailed
from tests.scheduler_world import World
from tests.scripted_link import Answer, Script, ScriptedLink
from vote.ballot import Facts
from vote.config import VoteConfig
from vote.decision import StepType
from vote.group import ControlGroup, TorchControlGroup
from vote.protocol import Agreement, StepProtocol
from vote.recorder import Recorder, Ring
from vote.witness import Witness

GROUP_TIMEOUT_S = 30.0


class WorldRunner:
    """A world's model, and a data collective in which a rank after the other tells all which one it is in."""

    def __init__(self, model: Callable[[Batch], np.ndarray], group: dist.ProcessGroup, ring: Ring) -> None:
        self.num_collectives = 0
        self._model = model
        self._group = group
        self._ring = ring

    def run(self, batch: Batch) -> Drawn:
        self._meet(b"experts", len(batch.input_ids))
        return Drawn(self._model(batch))

    def _meet(self, kind: bytes, size: int) -> None:
        self.num_collectives = number = self.num_collectives + 1
        entry = self._ring.enter(kind, size, number)
        try:
            said = self._exchange(number)
        except RuntimeError as error:
            raise CollectiveFailed(f"{kind.decode()} number {number} failed: {error}") from error
        self._ring.leave(entry)
        assert said == number, "ranks are in different collectives"

    def _exchange(self, number: int) -> int:
        said, speaker = torch.tensor([number]), number % self._group.size()
        self._group.broadcast(said, speaker).wait()
        return int(said)


@dataclass(frozen=True)
class Turn:
    """One vote as every rank has to see it. `tried`: a second ballot was held; `collectives`: entered before."""

    step: int
    step_type: str
    compute: bool
    sleep: bool
    tried: bool
    collectives: int


@dataclass(frozen=True)
class Standing:
    """How one rank stands: free blocks of its pool, its requests, and of these the running and the half-prefilled."""

    free: int
    unfinished: int
    running: int
    half_prefilled: int


@dataclass(frozen=True)
class Issued:
    """One step as one rank ran it. `size`: sequences; 0: a placeholder step."""

    step_type: str
    size: int
    standing: Standing


class NotedProtocol(StepProtocol):
    """Keeps all turns, and at which this rank wanted a prefill that the gang did not take."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.turns: list[Turn] = []
        self.put_off: list[bool] = []

    def agree(self, facts: Facts, attempt_prefill: Callable[[], bool]) -> Agreement:
        attempts: list[bool] = []

        def attempt() -> bool:
            attempts.append(attempt_prefill())
            return attempts[-1]

        collectives = self._count_collectives()
        agreed = super().agree(facts, attempt)
        kind = agreed.step_type.value
        self.turns.append(Turn(agreed.step, kind, agreed.compute, agreed.sleep, bool(attempts), collectives))
        self.put_off.append(facts.wants_prefill and agreed.step_type is not StepType.PREFILL)
        return agreed


class WorldRank:
    """Put together as `dp_engine.rank` does it. `standings`: before each vote; `issued`: its share of each step."""

    def __init__(
        self,
        link: Any,
        control: ControlGroup,
        data: dist.ProcessGroup,
        witness: Witness,
        vote: VoteConfig,
        *,
        make_runner: Callable[..., WorldRunner] = WorldRunner,
        **config: Any,
    ) -> None:
        """`config`: of the engine and its pool."""
        self.link = link
        self.world = World(**config)
        self.standings: list[Standing] = []
        self.issued: list[Issued] = []
        recorder = witness.recorder
        self.runner = make_runner(self.world.model, data, recorder.data)
        mixed, overlap = self.world.config.policy == "unified", self.world.config.overlap
        self.worker = make_worker(self.runner, overlap, 1, recorder.data)  # type: ignore[arg-type]
        self.counters = StepCounters()
        self.protocol = NotedProtocol(
            control, vote, witness, mixed=mixed,
            count_collectives=lambda: self.worker.num_collectives, on_ballot=self.counters.count_ballot,
        )  # fmt: skip
        parts = link, self.protocol, self.world.scheduler, self.worker, self.counters
        self.engine = Engine(*parts, mixed=mixed, overlap=overlap, ring=recorder.control)
        self._submit = self.worker.submit
        self.worker.submit = self._note_and_submit  # type: ignore[method-assign]

    def _note_and_submit(self, batch: Batch, step: int, rebalance: bool) -> None:
        self.issued.append(Issued(batch.step_type.value, len(batch), self._standing()))
        self._submit(batch, step, rebalance)

    def _standing(self) -> Standing:
        scheduler = self.world.scheduler
        half = sum(seq.has_row for seq in scheduler.waiting)
        return Standing(scheduler.pool.num_free, scheduler.num_unfinished, scheduler.num_running, half)

    def run(self) -> None:
        """Until all ranks were asked to stop, which leaves nothing behind."""
        going = True
        while going:
            self.engine.receive()
            self.standings.append(self._standing())
            going = self.engine.step()
        assert self.worker.num_collectives == self.runner.num_collectives, "stopped with a step in flight"
        self.world.check_drained()
        self.world.scheduler.check_integrity()


@dataclass(frozen=True)
class Story:
    """What a gang is told, with its settings."""

    script: Script
    engine: Mapping[str, Any]
    vote: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """What became of a story on one rank. See `NotedProtocol`, `WorldRank`."""

    turns: list[Turn]
    put_off: list[bool]
    standings: list[Standing]
    issued: list[Issued]
    answers: dict[int, Answer]
    report: Report
    num_collectives: int


def tell_all(rank: int, group: Any, stories: Mapping[str, Story]) -> dict[str, Told]:
    """One rank of a gang (`tests.multirank.gang`): all stories, one after the other."""
    data = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    told = {}
    for name, story in stories.items():
        link = ScriptedLink(story.script, rank)
        witness = Witness(Recorder(rank, group.size()))
        engine = WorldRank(link, TorchControlGroup(group), data, witness, VoteConfig(**story.vote), **story.engine)
        try:
            engine.run()
        except Exception as error:
            raise RuntimeError(f"in story {name}") from error
        assert not link.rejected
        notes = engine.protocol.turns, engine.protocol.put_off, engine.standings, engine.issued
        told[name] = Told(*notes, link.answers(), link.reports[-1], engine.runner.num_collectives)
    return told
