"""The step protocol: the one place of a step that touches the control group."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from vote.ballot import BALLOT_SIZE, MAX_VALUE, PROTOCOL_VERSION, BallotKind, Facts, Lockstep, Tally, write_ballot
from vote.config import VoteConfig
from vote.decision import Clock, Rule, StepType, decide, price
from vote.group import ControlGroup
from vote.witness import Witness

_KINDS = {BallotKind.FIRST: b"first ballot", BallotKind.SECOND: b"second ballot"}


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the gang does now; equal on all ranks.

    sleep: nobody has work and all have seen the same wake-ups, so every rank may block until the next message.
    stop: every rank was asked to leave the loop.
    rebalance: before the forward, every rank does a piece of moving experts. There is none without a forward, so a gang
    without work sleeps, and goes on with it when it wakes.
    compute: a forward follows (PREFILL, DECODE while some rank has decode work, MIXED if some rank scheduled anything).
    """

    step: int
    step_type: StepType
    compute: bool = False
    sleep: bool = False
    stop: bool = False
    rebalance: bool = False


class StepProtocol:
    """Owns the gang's clock on this rank. Not thread-safe: the step loop is its only caller.

    mixed: the scheduling policy knows no phases, so steps are MIXED; its ballots say what was scheduled already.
    settings: digest of what `vote.settings` compared; epoch: the gang's generation; count_collectives: the data-plane
    collectives this rank has entered so far, and placement: the digest of where it takes the experts to be, which every
    first ballot compares; rule: a decision of one's own, instead of the one that `config` names.
    """

    def __init__(
        self,
        group: ControlGroup,
        config: VoteConfig,
        witness: Witness,
        *,
        mixed: bool = False,
        settings: int = 0,
        epoch: int = 0,
        count_collectives: Callable[[], int] = lambda: 0,
        placement: Callable[[], int] = lambda: 0,
        on_ballot: Callable[[float], None] = lambda seconds: None,
        rule: Rule | None = None,
    ) -> None:
        self.clock = Clock()
        self._group = group
        self._config = config
        self._witness = witness
        self._mixed = mixed
        self._settings = settings
        self._epoch = epoch
        self._count_collectives = count_collectives
        self._placement = placement
        self._on_ballot = on_ballot
        self._rule = rule
        self._ballot = np.zeros(BALLOT_SIZE, np.int32)
        self._votes_cast = 0

    def agree(self, facts: Facts, attempt_prefill: Callable[[], bool]) -> Agreement:
        """Vote on the next step. Every rank calls this at the same time, with work or without.

        `attempt_prefill` is called if PREFILL was chosen; it schedules, and says whether this rank has anything to run
        or to report. If no rank has, the step becomes DECODE, so an empty prefill never resets the counter.
        Raises LockstepBroken.
        """
        tally = self._vote(BallotKind.FIRST, facts)
        step_type = decide(tally, self.clock, self._config, self._mixed, self._rule)
        if step_type is StepType.PREFILL:
            second = self._vote(BallotKind.SECOND, Facts(scheduled=attempt_prefill()))
            if not second.any("scheduled"):
                step_type = StepType.DECODE
        agreement = self._agreement(tally, step_type)
        if not agreement.sleep:
            self.clock = self.clock.after(step_type, price(tally, self.clock, self._config))
        return agreement

    def broken(self, error: Exception, what: str, step: int) -> NoReturn:
        """Turn a failed collective of a step into an error that names the ranks that left."""
        raise self._witness.broken(step, what, error) from error

    def _agreement(self, tally: Tally, step_type: StepType) -> Agreement:
        if step_type is StepType.IDLE:
            least, greatest = tally.range("wake")
            compute, sleep = False, least == greatest and not tally.any("wants_stop")
        else:
            work = "scheduled" if step_type is StepType.MIXED else "has_decode"
            compute, sleep = step_type is StepType.PREFILL or tally.any(work), False
        rebalance = compute and tally.any("wants_rebalance")
        return Agreement(self.clock.step, step_type, compute, sleep, tally.all("wants_stop"), rebalance)

    def _vote(self, kind: BallotKind, facts: Facts) -> Tally:
        lockstep = Lockstep(
            protocol=PROTOCOL_VERSION,
            epoch=self._epoch,
            vote=self._votes_cast & MAX_VALUE,
            step=self.clock.step & MAX_VALUE,
            ballot=kind,
            decode_step=self.clock.decode_step,
            settings=self._settings,
            collectives=self._count_collectives() & MAX_VALUE,
            owed=self.clock.owed,
            placement=self._placement(),
        )
        self._votes_cast += 1
        write_ballot(self._ballot, lockstep, facts)
        recorder = self._witness.recorder
        recorder.ballot(self._ballot)
        recorder.control.step = self.clock.step
        started = time.perf_counter()
        entry = recorder.control.enter(_KINDS[kind], ordinal=self._votes_cast)
        try:
            minimum = self._group.all_reduce_min(self._ballot)
        except RuntimeError as error:
            self.broken(error, f"the {kind.name.lower()} ballot", self.clock.step)
        recorder.control.leave(entry)
        self._on_ballot(time.perf_counter() - started)
        tally = Tally(minimum)
        if fields := tally.disagreements():
            raise self._witness.disagreement(self.clock.step, fields)
        return tally
