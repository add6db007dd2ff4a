"""What the decisions of `vote.decision` lead to in the long run: pure functions of the settings."""

from dataclasses import replace
from math import lcm

from vote.config import VoteConfig
from vote.decision import Clock


def longest_wait(config: VoteConfig) -> int:
    """Most steps of the gang in which a rank wants a prefill on end without taking part in one, whatever the others
    vote."""
    return config.any_interval if config.decision == "cadence" else config.decode_steps_per_prefill


def earliest_like(clock: Clock, config: VoteConfig) -> Clock:
    """A clock from which all decisions will be those from this one. `decode_step` is as small as it can be: decisions
    repeat with the intervals (cadence), or are the same from the greatest of them on (adaptive). `step`, which decides
    nothing, is 0."""
    now = clock.decode_step
    if config.decision == "cadence":
        period = lcm(config.all_interval, config.any_interval)
        return replace(clock, step=0, decode_step=(now - 1) % period + 1 if now else 0)
    intervals = (
        config.decode_steps_per_prefill,
        config.decode_steps_per_shared_prefill,
        config.decode_steps_per_urgent_prefill,
    )
    return replace(clock, step=0, decode_step=min(now, max(intervals)))
