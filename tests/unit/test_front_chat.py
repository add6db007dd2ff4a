"""`chat` in a real terminal."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dp_engine.messages import Add
from launcher.chat import run_chat
from tests.fake_rank import count_up
from tests.front_server import FrontServer, small_text

ROOT = Path(__file__).resolve().parents[2]


def heed_interrupts() -> None:
    """Who runs these tests in the background of a shell has Ctrl-C ignored, and so have its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Terminal:
    """A chat process on a pseudo terminal."""

    def __init__(self, url: str, *arguments: str) -> None:
        code = f"import sys; from launcher.chat import run_chat; sys.exit(run_chat({url!r}, {', '.join(arguments)}))"
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self.seen = ""

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self._master, text.encode())

    def expect(self, text: str) -> None:
        end = time.monotonic() + 20
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} is not in {self.seen!r}"
            try:
                self.seen += os.read(self._master, 65536).decode()
            except BlockingIOError:
                time.sleep(0.01)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def answer(add: Add) -> Iterator[int]:
    """Says how many turns there were; counts for ever when asked to."""
    prompt = small_text()._tokenizer.decode(add.prompt)
    if prompt.rstrip().endswith("count<|im_end|>\n<|im_start|>assistant"):
        yield from count_up(add)
    yield from small_text().encode(f"turns: {prompt.count('<|im_start|>user')} [bold]🙂", 99)
    yield 1


def test_conversation() -> None:
    with FrontServer(1, reply=answer, tick_s=0.02) as server:
        terminal = Terminal(server.url + "/v1", "temperature=0.5", "max_tokens=400")
        try:
            terminal.expect("> ")
            terminal.type("hello\n")
            terminal.expect("turns: 1 [bold]🙂")  # shown as it is, not as markup
            assert server.ranks[0].adds[0].sampling.temperature == 0.5
            terminal.expect("> ")
            terminal.type("count\n")
            terminal.expect("&'()*+")
            os.kill(terminal.process.pid, signal.SIGINT)
            terminal.expect("(stopped)")
            terminal.expect("> ")
            assert server.ranks[0].was_aborted.wait(5)
            terminal.type("again\n")
            terminal.expect("turns: 3")  # the answer that was stopped is remembered as far as it went
            terminal.type("/reset\n")
            terminal.expect("forgotten")
            terminal.type("new\n")
            terminal.expect("turns: 1")
            terminal.expect("> ")
            terminal.type("\x04")
            assert terminal.process.wait(10) == 0
        finally:
            terminal.close()


def test_error_ends_the_answer_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    questions = iter(["too long " * 500, "short"])
    with FrontServer(1, reply=answer) as server:
        monkeypatch.setattr("builtins.input", lambda prompt="": next_or_eof(questions))
        assert run_chat(server.url) == 0
    shown = capsys.readouterr()
    assert "maximum context length" in shown.err
    assert "turns: 1" in shown.out


def next_or_eof(questions: Iterator[str]) -> str:
    try:
        return next(questions)
    except StopIteration:
        raise EOFError from None


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "not a url"])
def test_no_server_is_one_line_and_exit_code_2(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_chat(url) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
