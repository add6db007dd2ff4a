"""Faults of one rank on demand, for tests and drills. They act on this rank alone; what the others make of it is their
own affair: no ballot is touched.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from dp_engine.link import Link
from dp_engine.messages import Add, Fault
from dp_engine.scheduler import Scheduler

log = logging.getLogger(__name__)


class ChaosError(Exception):
    """An exception that was asked for."""


class Chaos:
    """Faults that were asked for and are not over. Owned by the step loop, which calls once in every step `in_forward`,
    or `in_step` if it has no forward.
    """

    def __init__(self, link: Link, scheduler: Scheduler) -> None:
        self._link = link
        self._scheduler = scheduler
        self._due: list[tuple[int, Fault]] = []  # steps to go, and what strikes then
        self._slow: list[tuple[int, float]] = []  # forwards to go, and seconds for each
        self._withheld_steps = 0
        self._poisons: list[Fault] = []
        self._poisoned: dict[int, Fault] = {}  # by request

    def arm(self, fault: Fault) -> None:
        log.warning("chaos: %s", _describe(fault))
        match fault.kind:
            case "slow":
                self._slow.append((fault.steps, fault.seconds))
            case "drop":
                self._link.lose(fault.direction, fault.messages)
            case "full":
                self._scheduler.resources.withhold()
                self._withheld_steps = max(self._withheld_steps, fault.steps)
            case "poison":
                self._poisons.append(fault)
            case _:
                self._due.append((fault.after_steps, fault))

    def taste(self, request: Add) -> None:
        """Is this request poison? What it was answered in an earlier life does not count."""
        prompt = request.prompt[: len(request.prompt) - request.num_emitted]
        for fault in self._poisons:
            if _contains(prompt, fault.tokens):
                self._poisoned[request.request_id] = fault

    def in_forward(self, request_ids: list[int]) -> None:
        """These requests are in the step that begins. Raises ChaosError, or does worse, if something is due."""
        for request_id in request_ids if self._poisoned else ():
            if (fault := self._poisoned.get(request_id)) is not None:
                _STRIKES[fault.how](f"chaos: request {request_id} is poison")
        self.in_step()
        if self._slow:
            time.sleep(sum(seconds for _, seconds in self._slow))
            self._slow = [(steps - 1, seconds) for steps, seconds in self._slow if steps > 1]

    def in_step(self) -> None:
        """Count a step. Raises ChaosError, or does worse, if something is due."""
        if self._withheld_steps:
            self._withheld_steps -= 1
            if not self._withheld_steps:
                self._scheduler.resources.hand_back()
        if self._due:
            due = [fault for steps, fault in self._due if steps == 0]
            self._due = [(steps - 1, fault) for steps, fault in self._due if steps > 0]
            for fault in due:
                _STRIKES[fault.kind](f"chaos: {_describe(fault)}")


def _contains(prompt: list[int], tokens: tuple[int, ...]) -> bool:
    """Are `tokens` in `prompt`, one after the other?"""
    count = len(tokens)
    return any(tuple(prompt[i : i + count]) == tokens for i in range(len(prompt) - count + 1))


def _describe(fault: Fault) -> str:
    """The kind, and what was asked for beside it."""
    given = {name: getattr(fault, name) for name in _DEFAULTS if name not in ("wake", "kind")}
    asked = [f"{name} {value}" for name, value in given.items() if value != _DEFAULTS[name]]
    return f"{fault.kind} on demand" + (f" ({', '.join(asked)})" if asked else "")


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Fault)}


def _kill(words: str) -> None:
    del words
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(words: str) -> None:
    del words
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(words: str) -> NoReturn:
    raise ChaosError(words)


def _hang(words: str) -> NoReturn:
    del words
    while True:
        time.sleep(3600)


_STRIKES: dict[str, Callable[[str], None]] = {"kill": _kill, "stop": _stop, "raise": _raise, "hang": _hang}
