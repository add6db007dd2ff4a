"""Which step the gang takes: pure functions of the tally and of what earlier votes decided.

Nothing here reads a local fact or a clock: every rank computes the same answer from the same tally.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from vote.ballot import Tally
from vote.config import VoteConfig

LONELY = 8


class StepType(Enum):
    """Kind of a step, the same on all ranks."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # unified policy
    IDLE = "idle"  # nobody has work


@dataclass(frozen=True, slots=True)
class Clock:
    """What earlier steps left behind. `step` counts votes that led to a step or to sleep, since the gang's start.

    decode_step: decode steps since the last prefill step, empty ones included (DeepInfer's counter).
    owed: decode steps still to be made for the prefill steps that interrupted others (`price`).
    """

    step: int = 0
    decode_step: int = 0
    owed: int = 0

    def after(self, step_type: StepType, price: int = 0) -> "Clock":
        """The clock after a step of this type. `price`: of a prefill."""
        if step_type is StepType.PREFILL:
            return Clock(self.step + 1, 0, self.owed + price)
        if step_type is StepType.DECODE:
            return Clock(self.step + 1, self.decode_step + 1, max(self.owed - 1, 0))
        return replace(self, step=self.step + 1)


# Is a wish for prefill granted? One of these is a pure function and a row of RULES.
Rule = Callable[[Tally, Clock, VoteConfig], bool]


def decide(tally: Tally, clock: Clock, config: VoteConfig, mixed: bool = False, rule: Rule | None = None) -> StepType:
    """The kind of step that follows from the first ballot. `mixed`: the policy knows no phases; `rule`: instead of the
    one that `config` names."""
    if not tally.any("unfinished") and not tally.any("scheduled"):
        return StepType.IDLE
    if mixed:
        return StepType.MIXED
    granted = (rule or RULES[config.decision])(tally, clock, config)
    return StepType.PREFILL if granted else StepType.DECODE


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
    """Ours: a wish is granted at once while prefill steps have been rare, else after some decode steps. How many
    depends on who asks.

    A prefill step makes everybody's token interval longer, whoever asked for it. So each that interrupts others costs
    `decode_steps_per_prefill` decode steps, and the price of `saved_prefills` may be owed at a time. When none is left,
    an ordinary wish waits as it does with `cadence`: one prefill step in so many decode steps. It waits less if every
    rank has one, because then no rank computes a placeholder, and least if it is `urgent`. While nobody decodes there
    is no interval to protect.

    Nobody waits for more than `decode_steps_per_prefill` decode steps from its wish to a prefill step of the gang, and
    while any rank decodes no two prefill steps follow each other.
    """
    if not tally.any("wants_prefill"):
        return False
    if not tally.any("has_decode"):
        return True
    if clock.owed + config.decode_steps_per_prefill <= config.decode_steps_per_prefill * config.saved_prefills:
        return clock.decode_step > 0
    enough = config.decode_steps_per_prefill
    if tally.all("wants_prefill"):
        enough = min(enough, config.decode_steps_per_shared_prefill)
    if urgent(tally):
        enough = min(enough, config.decode_steps_per_urgent_prefill)
    return clock.decode_step >= enough


def urgent(tally: Tally) -> bool:
    """A rank that asks has a backlog, or is lonely: it runs less than an eighth of what the busiest rank runs, whose
    pace all ranks keep anyway."""
    emptiest_asker, _ = tally.range("asker")
    _, busiest = tally.range("running")
    return tally.any("backlog") or emptiest_asker * LONELY < busiest


def price(tally: Tally, clock: Clock, config: VoteConfig) -> int:
    """Decode steps that a prefill step now adds to those owed. Never more are owed than for `saved_prefills`."""
    if config.decision != "adaptive" or not tally.any("has_decode"):
        return 0
    most = config.decode_steps_per_prefill * config.saved_prefills
    return min(config.decode_steps_per_prefill, most - clock.owed)


RULES: dict[str, Rule] = {"cadence": cadence, "adaptive": adaptive}
