"""The bar that fills while the ranks load: bytes of all of them together."""

from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from dp_engine.messages import Loading
from launcher.terminal import Terminal

_QUARTERS = (0, 25, 50, 75, 100)


class LoadingBar:
    """One bar on a terminal, which stays when it is full; elsewhere a line at every quarter.

    It begins when every rank has said how much it will load, and anew when gangs load again.
    """

    def __init__(self, voice: Terminal, num_ranks: int) -> None:
        """num_ranks: of all gangs; those that load together are shown together."""
        self._voice = voice
        self._num_ranks = num_ranks
        self._ranks: dict[tuple[int, int], tuple[int, Loading]] = {}  # (replica, rank): epoch, its last word
        self._bar: tuple[Progress, TaskID] | None = None
        self._shown = -1  # quarter

    def on_loading(self, replica: int, epoch: int, loading: Loading) -> None:
        """A rank's word, in this life of its gang."""
        before = self._ranks.get((replica, loading.rank))
        if before is not None and before[0] != epoch:
            self._ranks = {key: value for key, value in self._ranks.items() if key[0] != replica}
            self._begin_anew()
        self._ranks[replica, loading.rank] = (epoch, loading)
        if len(self._ranks) == self._num_ranks:
            self._show()

    def _show(self) -> None:
        done = sum(loading.done_bytes for _, loading in self._ranks.values())
        total = sum(loading.total_bytes for _, loading in self._ranks.values())
        percent = 100 * done // total if total else 100
        if self._voice.console.is_terminal:
            self._draw(done, total)
        for quarter in _QUARTERS:
            if self._shown < quarter <= percent:
                self._shown = quarter
                if not self._voice.console.is_terminal:
                    self._voice.stage(f"loading the model: {quarter} % of {decimal(total)}")

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            if self._shown == 100:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            progress = Progress(*columns, console=self._voice.console)
            self._bar = progress, progress.add_task("loading the model", total=total)
            progress.start()
        progress, task = self._bar
        progress.update(task, completed=done, total=total)
        if done >= total:
            self._end()

    def close(self) -> None:
        """Give the terminal back."""
        self._end()

    def _begin_anew(self) -> None:
        self._end()
        self._shown = -1

    def _end(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None
