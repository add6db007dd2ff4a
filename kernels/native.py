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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch  # noqa: F401  its threads' library has to be there before the kernels ask for one

log = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("rows.c", "strips.c", "walk.c"))
_HEADER = Path(__file__).with_name("vectors.h")
# Products are fused only where the source says so. The threads are torch's: its libgomp is loaded first.
COMPILER_FLAGS = ("-O3", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to compile the sources, and what the CPU must have for it, in /proc/cpuinfo's words."""

    name: str
    cpu_flags: tuple[str, ...]

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """The compiler's words are -mavx512bf16, -mamx-tile."""
        words = (flag.replace("avx512_", "avx512").replace("_", "-") for flag in self.cpu_flags)
        return (*COMPILER_FLAGS, *(f"-m{word}" for word in words))


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512_bf16")
AVX512 = Variant("avx512", _AVX512)
AMX = Variant("amx", (*_AVX512, "amx_tile", "amx_bf16"))
VARIANTS = (AMX, AVX512)  # the best first


def cache_dir() -> Path:
    """The user's cache folder of phalanx (`$PHALANX_CACHE`, else `$XDG_CACHE_HOME/phalanx`, else ~/.cache/phalanx)."""
    if explicit := os.environ.get("PHALANX_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"


@cache
def kernels() -> ctypes.CDLL | None:
    """The library of all C kernels in the best variant, or None if this machine cannot have it; the log says why."""
    for variant in VARIANTS:
        if reason := _unfit(variant):
            log.info("no %s kernels: %s", variant.name, reason)
            continue
        try:
            library = load(_compiled(variant))
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("no %s kernels: %s", variant.name, _words(error))
            continue
        if library.phalanx_init() == 0:
            return library
        log.info("no %s kernels: the system does not grant them to this process", variant.name)
    return None


def loaded() -> ctypes.CDLL:
    """The library, where `kernels` was seen to give it."""
    library = kernels()
    assert library is not None
    return library


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    library.phalanx_init.restype = ctypes.c_int
    signatures = {
        "pack": [pointer, pointer, *[number] * 4, pointer],
        "linear": [pointer, number, number, pointer, number, number, pointer, pointer, pointer],
        "rms_norm": [flag, pointer, number, number, number, pointer, ctypes.c_float, pointer],
        "rotate": [flag, pointer, *[number] * 5, pointer, pointer],
        "weighted_sum": [flag, pointer, pointer, number, number, number, pointer],
        "scores": [flag, pointer, number, number, pointer, pointer, number, number, pointer],
        "route": [pointer, number, number, number, flag, pointer, flag, ctypes.c_float, pointer, pointer],
        "put_rows": [pointer, pointer, pointer, number, number, number],
        "attend_bf16": [pointer],
        "attend_fp32": [pointer],
        "experts": [pointer, pointer, number, *[pointer] * 4, number, number, flag, pointer, pointer],
    }
    for name, types in signatures.items():
        function = getattr(library, f"phalanx_{name}")
        function.argtypes, function.restype = types, None
    return library


def missing_flags(variant: Variant) -> list[str]:
    """What this machine's CPU lacks for it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return [flag for flag in variant.cpu_flags if flag not in flags]


def compile_to(target: Path, variant: Variant, *options: str) -> None:
    """Raises OSError without a compiler, subprocess.SubprocessError for one that fails."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("there is no C compiler (cc, gcc or clang)")
    command = [compiler, *variant.compiler_flags, *options, "-o", str(target), *map(str, SOURCES)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def _unfit(variant: Variant) -> str | None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"{platform.system()} on {platform.machine()}"
    missing = missing_flags(variant)
    return f"the CPU lacks {', '.join(missing)}" if missing else None


def _compiled(variant: Variant) -> Path:
    """Path of the shared library. Ranks that start together may both compile it; the last one's file stays, whole."""
    text = b"".join(path.read_bytes() for path in (_HEADER, *SOURCES))
    name = hashlib.sha256(text + " ".join(variant.compiler_flags).encode()).hexdigest()[:16]
    target = cache_dir() / "kernels" / f"{variant.name}-{name}.so"
    if target.exists():
        return target
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        compile_to(made, variant)
        made.replace(target)
    return target


def _words(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{error.cmd[0]}: {lines[0] if lines else f'exit code {error.returncode}'}"
    return str(error)
