"""Which step the gang takes: pure functions of the tally and of what earlier votes decided.

Nothing here reads a local fact or a clock: every rank computes the same answer from the same tally.
"""

from dataclasses import dataclass, replace
from enum import Enum

from vote.ballot import Tally
from vote.config import VoteConfig


class StepType(Enum):
    """Kind of a step, the same on all ranks."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # unified policy
    IDLE = "idle"  # nobody has work


@dataclass(frozen=True, slots=True)
class Clock:
    """What earlier steps left behind. `step` counts votes that led to a step or to sleep, since the gang's start.

    `decode_step` counts decode steps since the last prefill step, empty ones included (DeepInfer's counter).
    """

    step: int = 0
    decode_step: int = 0

    def after(self, step_type: StepType) -> "Clock":
        """The clock after a step of this type."""
        if step_type is StepType.PREFILL:
            return Clock(self.step + 1, 0)
        if step_type is StepType.DECODE:
            return Clock(self.step + 1, self.decode_step + 1)
        return replace(self, step=self.step + 1)


def decide(tally: Tally, clock: Clock, config: VoteConfig, mixed: bool = False) -> StepType:
    """The kind of step that follows from the first ballot. `mixed`: the policy knows no phases."""
    if not tally.any("unfinished") and not tally.any("scheduled"):
        return StepType.IDLE
    if mixed:
        return StepType.MIXED
    rule = cadence if config.decision == "cadence" else adaptive
    return StepType.PREFILL if rule(tally, clock, config) else StepType.DECODE


def cadence(tally: Tally, clock: Clock, config: VoteConfig) -> bool:
    """DeepInfer's rule: prefill at ALL points if every rank wants it, at ANY points if any does.

    `fast_path` (ours) grants any wish while no rank has decode work: there is no token interval to protect.
    """
    if config.fast_path and not tally.any("has_decode"):
        return tally.any("wants_prefill")
    if clock.decode_step != 0 and clock.decode_step % config.any_interval == 0:
        return tally.any("wants_prefill")
    return clock.decode_step % config.all_interval == 0 and tally.all("wants_prefill")


def adaptive(tally: Tally, clock: Clock, config: VoteConfig) -> bool:
    """Ours: any wish is granted once enough decode steps have passed since the last prefill step.

    A wish shared by all ranks costs nobody an empty step, so one decode step in between is enough for it. No request
    waits more than `decode_steps_per_prefill` steps for its turn, and while any rank decodes, no more than one step in
    1 + `decode_steps_per_prefill` (one in two when all want) is a prefill.
    """
    if not tally.any("wants_prefill"):
        return False
    if not tally.any("has_decode"):
        return True
    enough = 1 if tally.all("wants_prefill") else config.decode_steps_per_prefill
    return clock.decode_step >= enough
