"""Ranks with a fault in their step protocol, step loop, scheduler or group."""

from dataclasses import replace

import numpy as np

from dp_engine.engine import Engine
from dp_engine.phased import PhasedScheduler
from dp_engine.sequence import Sequence
from vote.ballot import BallotKind, Facts, Tally
from vote.decision import StepType
from vote.group import SoloGroup
from vote.protocol import Agreement, StepProtocol
from vote.simulated import SimulatedGroup


class MaxGroup(SimulatedGroup):
    """Reduces by MAX. No library notices."""

    def all_reduce_min(self, vector: np.ndarray) -> np.ndarray:
        return np.maximum.reduce(self._gang.meet(self.rank, "control", vector.copy()))


class SkipsVoteWithoutWork(Engine):
    def step(self) -> bool:
        if self._step is None and not self._scheduler.facts().unfinished:
            return True
        return super().step()


class SleepsAlone(Engine):
    """Blocks as soon as it has nothing to do itself."""

    def step(self) -> bool:
        goes_on = super().step()
        if self._step is None and not self._scheduler.num_unfinished:
            self._link.wait()
        return goes_on


class OverlapsWhenBusy(Engine):
    """Leaves a step in flight if it has much to do itself."""

    def step(self) -> bool:
        self._overlap = self._scheduler.num_running > 1
        return super().step()


class MovesExpertsWhenBusy(Engine):
    """Does not move experts, as agreed, while it has nothing to do itself."""

    def _issue(self, agreement: Agreement) -> None:
        super()._issue(replace(agreement, rebalance=agreement.rebalance and self._scheduler.num_unfinished > 0))


class ByItself(StepProtocol):
    """Can count its own ballot for that of all."""

    def _vote_alone(self, kind: BallotKind, facts: Facts) -> Tally:
        others, self._group = self._group, SoloGroup()
        try:
            return StepProtocol._vote(self, kind, facts)
        finally:
            self._group = others


class SkipsSecondBallot(ByItself):
    """Whoever has scheduled something knows that the answer is yes."""

    def _vote(self, kind: BallotKind, facts: Facts) -> Tally:
        if kind is BallotKind.SECOND and facts.scheduled:
            return self._vote_alone(kind, facts)
        return super()._vote(kind, facts)


class AnswersSecondWithFirst(StepProtocol):
    """Has forgotten, when the others ask whether anything was scheduled, that a step has begun."""

    def _vote(self, kind: BallotKind, facts: Facts) -> Tally:
        return super()._vote(BallotKind.FIRST, facts)


class EmptyPrefillResets(ByItself):
    """An empty prefill is a prefill, too: the counter starts again."""

    def _vote(self, kind: BallotKind, facts: Facts) -> Tally:
        tally = super()._vote(kind, facts)
        return tally if kind is BallotKind.FIRST else self._vote_alone(kind, Facts(scheduled=True))


class SleepsInSpiteOfWakeUps(StepProtocol):
    """Does not compare what wake-ups the ranks have seen."""

    def _agreement(self, tally: Tally, step_type: StepType) -> Agreement:
        idle = step_type is StepType.IDLE and not tally.any("wants_stop")
        return replace(super()._agreement(tally, step_type), sleep=idle)


class NeverSleeps(StepProtocol):
    def _agreement(self, tally: Tally, step_type: StepType) -> Agreement:
        return replace(super()._agreement(tally, step_type), sleep=False)


class KeepsDeadHead(PhasedScheduler):
    """A head that has been aborted is never swept out; it cannot be prefilled, and says so in every vote."""

    def _sweep_waiting(self) -> None:
        pass

    def _wants_prefill(self, head: Sequence) -> bool:
        return not head.status.finished and super()._wants_prefill(head)


class DeafToWork(PhasedScheduler):
    """Has no work to speak of while nothing runs."""

    def facts(self) -> Facts:
        facts = super().facts()
        return replace(facts, unfinished=facts.has_decode)
