"""What is kept of a gang that ended unasked: one folder a death."""

import json
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launcher.death import Death
from launcher.gang_link import GangLink
from launcher.ticket import GangDown
from vote.recorder import MAX_ENTRIES
from vote.report import Sightings
from vote.trace import chrome_trace

log = logging.getLogger(__name__)

STDERR_BYTES = 1 << 16
TRACE_STEPS = 200
PREFIX = "gang-"


def last_sight(link: GangLink) -> Sightings:
    """The ranks as their observers see them, with all that their recorders hold. Blocks for a second or two when some
    do not answer."""
    try:
        return link.observers().look(MAX_ENTRIES, stderr=STDERR_BYTES)
    except GangDown:
        return {}  # it never came up


@dataclass(frozen=True)
class CrashReports:
    """Writes into `directory`, and removes the oldest beyond `keep`. Prompts and answers are not in it."""

    directory: Path
    keep: int

    def write(self, link: GangLink, death: Death, carried: int, seen: Sightings) -> Path | None:
        """Returns the folder, or None when nothing is kept or can be written.

        carried: requests that go on in another life; seen: of `last_sight`. Files: report.json; diagnosis.txt, as the
        ranks saw it; trace.json, the last steps, for ui.perfetto.dev; ranks.log, their log lines; rank-N.stderr.
        """
        if not self.keep:
            return None
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        folder = self.directory / f"{PREFIX}{stamp}-{link.replica}-epoch-{link.epoch}"
        try:
            folder.mkdir(parents=True)
            self._fill(folder, link, death, carried, seen)
            self._prune()
        except OSError as error:
            log.warning("cannot keep a crash report in %s: %s", folder, error.strerror or error)
            return None
        return folder

    def _fill(self, folder: Path, link: GangLink, death: Death, carried: int, seen: Sightings) -> None:
        report = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "replica": link.replica,
            "epoch": link.epoch,
            "reason": death.reason,
            "culprits": sorted(death.culprits) if death.culprits is not None else None,
            "requests_suspected": not death.innocent,
            "requests_carried_over": carried,
            "ranks": {
                rank: {"pid": one.pid, "host": one.host, "state": one.state} if one is not None else None
                for rank, one in seen.items()
            },
        }
        (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        if link.diagnosis is not None:
            (folder / "diagnosis.txt").write_text(link.diagnosis.text + "\n")
        if seen:
            (folder / "trace.json").write_bytes(msgspec.json.encode(chrome_trace(seen, TRACE_STEPS)))
        if link.lines:
            (folder / "ranks.log").write_text("\n".join(link.lines) + "\n")
        for rank, sighting in seen.items():
            if sighting is not None and sighting.stderr:
                (folder / f"rank-{rank}.stderr").write_text(sighting.stderr)

    def _prune(self) -> None:
        folders = sorted(path for path in self.directory.glob(f"{PREFIX}*") if path.is_dir())
        for folder in folders[: -self.keep]:
            shutil.rmtree(folder, ignore_errors=True)
