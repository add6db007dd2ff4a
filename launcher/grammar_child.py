"""The child of `launcher.grammar_check`: a line of JSON in, a line of JSON out, until its parent is gone."""

import os
import resource
import sys
from queue import SimpleQueue
from threading import Thread

import msgspec

from dp_engine.grammar import GrammarError, Vocabulary
from dp_engine.messages import Grammar
from launcher.grammar_check import Task

MEMORY_BYTES = 4 << 30  # of address space


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    lines: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_read, args=(lines,), daemon=True).start()
    task = msgspec.json.decode(lines.get(), type=Task)
    wrong, vocabulary = "", None
    try:
        # Which token ends an output makes no difference to what can be compiled.
        vocabulary = Vocabulary(task.tokenizer, task.vocab_size, [0])
    except GrammarError as error:
        wrong = str(error)
    _say("")
    while True:
        grammar = msgspec.json.decode(lines.get(), type=Grammar)
        _say(wrong if vocabulary is None else _check(vocabulary, grammar))


def _check(vocabulary: Vocabulary, grammar: Grammar) -> str:
    try:
        vocabulary.check(grammar)
    except GrammarError as error:
        return str(error)
    return ""


def _read(lines: "SimpleQueue[bytes]") -> None:
    """Beside the compiling, so that the parent's end is seen at once."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


def _say(answer: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
