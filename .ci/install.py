"""Install the pinned requirements into the environment of the Python that runs this; called by the Makefile.

pip's own output goes to a log; the terminal gets one line that counts packages, and pip's errors if it fails.
Needs nothing but the standard library. Running it again resumes: what pip has fetched stays in its cache.
"""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = Path(sys.prefix) / "install.log"
shown_at = time.monotonic()
NAMING = ("Collecting ", "Processing /", "Requirement already satisfied: ")


def main() -> int:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--progress-bar", "off"]
    pip += ["-c", str(ROOT / "constraints.txt"), "-e", ".[dev]"]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    began = time.monotonic()
    seen: set[str] = set()
    errors: list[str] = []
    with (
        LOG.open("w") as log,
        subprocess.Popen(
            pip, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            text = line.strip()
            if text.startswith("ERROR:"):
                errors.append(text)
            elif text.startswith("Installing collected packages:"):
                show(f"unpacking {text.count(',') + 1} packages, {time.monotonic() - began:.0f} s so far")
            elif name := package(text):
                seen.add(name)
                show(f"{min(len(seen), len(pins))}/{len(pins)} packages, now {name}")
    show(f"done in {time.monotonic() - began:.0f} s" if process.returncode == 0 else "failed", last=True)
    if process.returncode != 0:
        print("\n".join(errors[:5] or ["pip ended with an error"]), file=sys.stderr)
        print(f"pip's log is {LOG}. When the cause is gone, run make again: it resumes.", file=sys.stderr)
    return process.returncode


def package(line: str) -> str | None:
    """The distribution that a line of pip's output is about, if it names one."""
    if not line.startswith(NAMING):
        return None
    word = line.split("already satisfied: ")[-1].split()[0 if line.startswith("Requirement") else 1]
    word = word.rsplit("/", 1)[-1]
    for mark in "<>=!~;[(":
        word = word.split(mark)[0]
    name = word.split("-")[0] if word.endswith(".whl") else word
    return name.lower().replace("_", "-")


def show(state: str, last: bool = False) -> None:
    """One line that is written over on a terminal; elsewhere a line every 20 seconds and the last one."""
    global shown_at
    if sys.stdout.isatty():
        print(f"\r\033[K  requirements: {state}", end="\n" if last else "", flush=True)
    elif last or time.monotonic() - shown_at >= 20:
        print(f"  requirements: {state}", flush=True)
        shown_at = time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
