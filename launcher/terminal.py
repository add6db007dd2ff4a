"""What the launcher's terminal shows: stages of the start, and the ranks' log lines under the rank's name."""

import logging
import time

from rich.console import Console
from rich.text import Text

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}


class Terminal:
    """Writes to stderr; stdout is for results. `verbose` shows the ranks' INFO lines too."""

    def __init__(self, verbose: bool) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._level = logging.INFO if verbose else logging.WARNING
        self._started = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def stage(self, text: str) -> None:
        self.console.print(Text(f"{self.seconds():6.1f}s  {text}", style="dim"))

    def warning(self, text: str) -> None:
        self.console.print(Text(f"phalanx: warning: {text}", style="yellow"))

    def error(self, text: str) -> None:
        self.console.print(Text(f"phalanx: error: {text}", style="bold red"))

    def report(self, text: str) -> None:
        self.console.print(Text(text))

    def text(self, text: str) -> None:
        """Whole lines as they are."""
        self.console.print(Text(text), end="")

    def rank_log(self, replica: int, rank: int, level: int, text: str) -> None:
        """Gangs beside the first one are named."""
        if level < self._level:
            return
        who = f"gang {replica} rank {rank}" if replica else f"rank {rank}"
        for line in text.splitlines():
            self.console.print(Text(f"{who} | {line}", style=_STYLES.get(level, "")))
