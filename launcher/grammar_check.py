"""Grammars are tried before they go to a rank: in a process of their own, which is ended when one takes too long."""

import asyncio
import os
import select
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from dp_engine.grammar import GrammarError
from dp_engine.messages import Grammar
from launcher.ticket import QueueFull

COMPILE_S = 2.0  # a rank, which compiles beside its step loop, is spared what takes longer
START_S = 60.0
MAX_WAITING = 64
MAX_KNOWN = 256

_encode = msgspec.json.encode


class Task(msgspec.Struct):
    """What the child is for; its first line."""

    tokenizer: str
    vocab_size: int


class GrammarChecker:
    """Owns the child, which starts with the first grammar and ends with this process. One grammar at a time."""

    def __init__(self, tokenizer: str, vocab_size: int) -> None:
        """`tokenizer`: a tokenizer.json."""
        self._task = Task(tokenizer, vocab_size)
        self._known: OrderedDict[Grammar, str] = OrderedDict()  # what is wrong, "" if nothing
        self._thread = ThreadPoolExecutor(1, "grammars")  # the only one that talks with the child
        self._waiting = 0
        self._child: subprocess.Popen[bytes] | None = None

    async def check(self, grammar: Grammar) -> None:
        """Raises GrammarError, QueueFull."""
        if (wrong := self._known.get(grammar)) is None:
            if self._waiting >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} grammars are being checked already")
            self._waiting += 1
            try:
                wrong = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, grammar)
            finally:
                self._waiting -= 1
        self._known[grammar] = wrong
        self._known.move_to_end(grammar)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if wrong:
            raise GrammarError(wrong)

    def _ask(self, grammar: Grammar) -> str:
        """Raises GrammarError for what may go better another time."""
        child = self._child or self._start()
        try:
            return _exchange(child, _encode(grammar), COMPILE_S)
        except TimeoutError:
            self._end(child)
            raise GrammarError(f"it takes more than {COMPILE_S:g} s to compile") from None
        except EOFError:
            self._end(child)
            raise GrammarError("the process that compiles it has ended; it may be too large") from None

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[1])
        child = subprocess.Popen(
            [sys.executable, "-m", "launcher.grammar_child"],
            env=os.environ | {"PYTHONPATH": root},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )
        try:
            _exchange(child, _encode(self._task), START_S)
        except BaseException:
            self._end(child)
            raise
        self._child = child
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        self._child = None
        child.kill()
        child.communicate()


def _exchange(child: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> str:
    """A line there and a line back. Raises TimeoutError, and EOFError when the child has ended."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(line + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        raise EOFError from None
    if not select.select([child.stdout], [], [], timeout_s)[0]:
        raise TimeoutError
    answer = child.stdout.readline()
    if not answer:
        raise EOFError
    return msgspec.json.decode(answer, type=str)
