"""Looks at a gang from outside, now and then, whether it votes or sleeps: what the ranks themselves cannot tell.

A rank that ends, or is missing in a vote, is told by the others within the control time-out. Nobody would notice a rank
that is stopped while all sleep, a gang of one that hangs, or messages that never came.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from math import ceil

from launcher.death import Death
from launcher.gang_link import GangLink
from vote.report import Sighting, Sightings, culprits, culprits_by_state

LOOKS_PER_TIMEOUT = 4
TELL_S = 3.0  # more, for ranks that are awake: after the time-out they tell it themselves, and more of it


@dataclass(frozen=True)
class Look:
    """at: time.monotonic(); seen: the ranks; owed: requests in flight that the ranks are free to compute."""

    at: float
    seen: Sightings
    owed: int


def alarm(before: Look, now: Look) -> Death | None:
    """What two looks say, one control time-out apart or more: whoever is as badly off as he was ends the gang."""
    was, blamed = culprits_by_state(before.seen), culprits_by_state(now.seen)
    if gone := {rank: blamed[rank] for rank in blamed if rank in was}:
        outward = all((sighting := now.seen[rank]) is None or sighting.state == "stopped" for rank in gone)
        return Death(_words(gone), frozenset(gone), innocent=outward)
    if blamed:
        return None  # not for long enough, and it explains why others wait
    stuck = {rank for rank, sighting in now.seen.items() if _stuck(before.seen.get(rank), sighting)}
    if stuck:
        hung = culprits(now.seen) or dict.fromkeys(stuck, f"hangs: it has done nothing for {now.at - before.at:.0f} s")
        return Death(_words(hung), frozenset(hung))
    if before.owed and now.owed and _same_sleep(before.seen, now.seen):
        reason = f"all ranks sleep although they have {now.owed} requests to compute: messages were lost"
        return Death(reason, innocent=True)
    return None


def patience(timeout_s: float, seen: Sightings) -> float:
    """How long something must have been wrong."""
    awake = any(sighting and sighting.state == "running" and sighting.asleep is None for sighting in seen.values())
    return timeout_s + TELL_S if awake else timeout_s


def _words(blamed: dict[int, str]) -> str:
    return "; ".join(f"rank {rank} {words}" for rank, words in sorted(blamed.items()))


def _stuck(before: Sighting | None, now: Sighting | None) -> bool:
    """Has the rank begun and ended nothing meanwhile, although it does not sleep?"""
    if before is None or now is None or now.asleep is not None:
        return False
    return now.last is not None and now.last == before.last


def _same_sleep(before: Sightings, now: Sightings) -> bool:
    """Have all ranks slept all the time?"""
    naps = [
        sighting.asleep is not None and (was := before.get(rank)) is not None and was.asleep == sighting.asleep
        for rank, sighting in now.items()
        if sighting is not None
    ]
    return bool(naps) and all(naps)


class Watch:
    """Over one life, from the moment that all ranks are there."""

    def __init__(self, link: GangLink, timeout_s: float) -> None:
        """timeout_s: the ranks' control time-out."""
        self._link = link
        self._timeout_s = timeout_s
        self._every_s = timeout_s / LOOKS_PER_TIMEOUT
        self._looks: deque[Look] = deque(maxlen=ceil((timeout_s + TELL_S) / self._every_s) + 2)

    async def wait(self) -> Death:
        """Returns when something is wrong that goes on for a control time-out, or what `patience` adds to it."""
        while True:
            await asyncio.sleep(self._every_s)
            seen = await asyncio.to_thread(self._link.observers().look, 4)
            now = Look(time.monotonic(), seen, 0 if self._link.roster.paused != "none" else len(self._link.books))
            self._looks.append(now)
            patience_s = patience(self._timeout_s, seen)
            earlier = [look for look in self._looks if now.at - look.at >= patience_s]
            if earlier and (death := alarm(earlier[-1], now)) is not None:
                return death
