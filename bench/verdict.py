"""How a benchmark ends: its table, its file, and what did not hold."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def conclude(report: Any, drawn: Table, target: Path | None, failures: Sequence[str]) -> int:
    """Print the table, write the report as JSON to `target`, say what failed. Returns the exit code."""
    Console().print(drawn)
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(report, indent=2) + "\n")
    for line in failures:
        print(f"bench: {line}", file=sys.stderr)
    return int(bool(failures))
