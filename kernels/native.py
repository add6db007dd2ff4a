"""The C kernels: compiled once per machine with its own compiler, kept in the user's cache, loaded by ctypes.

Nothing depends on them: without a compiler or a fitting CPU the torch paths do the work.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("amx.c")
CPU_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16")
_FEATURES = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
COMPILER_FLAGS = ("-O3", "-shared", "-fPIC", *_FEATURES)


def cache_dir() -> Path:
    """The user's cache folder of phalanx (`$PHALANX_CACHE`, else `$XDG_CACHE_HOME/phalanx`, else ~/.cache/phalanx)."""
    if explicit := os.environ.get("PHALANX_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"


@cache
def amx() -> ctypes.CDLL | None:
    """The library of amx.c, or None if this machine cannot have it; the log says why."""
    if reason := _unfit():
        log.info("no AMX kernels: %s", reason)
        return None
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no AMX kernels, oneDNN's are used: %s", _words(error))
        return None
    _declare(library)
    if library.phalanx_amx_init() != 0:
        log.info("no AMX kernels: the system does not grant AMX tiles to this process")
        return None
    return library


def _unfit() -> str | None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"{platform.system()} on {platform.machine()}"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    missing = [flag for flag in CPU_FLAGS if flag not in flags]
    return f"the CPU lacks {', '.join(missing)}" if missing else None


def _compiled() -> Path:
    """Path of the shared library. Ranks that start together may both compile it; the last one's file stays, whole."""
    text = SOURCE.read_bytes()
    name = hashlib.sha256(text + " ".join(COMPILER_FLAGS).encode()).hexdigest()[:16]
    target = cache_dir() / "kernels" / f"amx-{name}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("there is no C compiler (cc, gcc or clang)")
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *COMPILER_FLAGS, "-o", str(made), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        made.replace(target)
    return target


def _declare(library: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_long
    library.phalanx_amx_init.restype = ctypes.c_int
    signatures = {
        "linear": [pointer, number, number, pointer, number, number, pointer, pointer, pointer],
        "experts": [pointer, pointer, number, *[pointer] * 4, number, number, ctypes.c_int, pointer, pointer],
    }
    for name, types in signatures.items():
        function = getattr(library, f"phalanx_amx_{name}")
        function.argtypes, function.restype = types, None


def _words(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{error.cmd[0]}: {lines[0] if lines else f'exit code {error.returncode}'}"
    return str(error)
