"""The checkout as an archive that travels to a cluster: what goes in, what never does, and how large it may be."""

import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.config import ConfigError

LIMIT_BYTES = 100 << 20  # Ray refuses 500 MiB; the head keeps the archive in memory and every node downloads it
NAMED = 3  # of the largest files, when it is too large
CARRIED = "submitted.yaml"  # name in the archive of a configuration from outside the checkout
_FOLDERS = frozenset({"__pycache__", "build", "dist", "node_modules", "venv"})
_PATHS = frozenset({"docs/images", "bench/out"})
_SUFFIXES = (".safetensors", ".gguf", ".pyc", ".egg-info")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".gguf")
_OURS = re.compile(r'^name = "phalanx-serve"$', re.MULTILINE)
_WHEN = (1980, 1, 1, 0, 0, 0)  # equal files make an equal archive, which Ray uploads once


@dataclass(frozen=True)
class Package:
    """A working directory. `files`: (name in the archive, file), sorted; `config`: the configuration's name there."""

    files: tuple[tuple[str, Path], ...]
    config: str | None
    size: int

    def write(self, archive: Path) -> None:
        """Write the archive, the same bytes for the same files."""
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
            for name, path in self.files:
                entry = zipfile.ZipInfo(name, _WHEN)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = (path.stat().st_mode & 0o777) << 16
                target.writestr(entry, path.read_bytes())


def collect(root: Path, config: Path | None, limit: int = LIMIT_BYTES) -> Package:
    """The files of the checkout `root` that a job needs, with its configuration. Raises ConfigError."""
    _require_checkout(root)
    files = dict(_travelling(root))
    name = None
    if config is not None:
        inside = config.resolve()
        name = inside.relative_to(root).as_posix() if inside.is_relative_to(root) else CARRIED
        name = name if name in files else CARRIED
        files[name] = inside
    sizes = {arcname: path.stat().st_size for arcname, path in files.items()}
    size = sum(sizes.values())
    if size > limit:
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:NAMED]
        named = ", ".join(f"{arcname} ({mib(count)})" for arcname, count in largest)
        raise ConfigError(
            f"the checkout has {mib(size)} in {len(files)} files, at most {mib(limit)} travel; largest: {named}; "
            "move what the ranks do not need out of it"
        )
    return Package(tuple(sorted(files.items())), name, size)


def mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def _require_checkout(root: Path) -> None:
    """An installed phalanx lies beside every other package: that must not travel."""
    project = root / "pyproject.toml"
    if not project.is_file() or not _OURS.search(project.read_text(errors="replace")):
        raise ConfigError(f"{root} is no checkout of phalanx: run `python -m launcher submit` inside one")


def _travelling(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, names in os.walk(root):
        here = Path(folder)
        if here != root and is_checkpoint(names):
            subfolders.clear()
            continue
        subfolders[:] = [name for name in subfolders if not excluded(here.relative_to(root) / name)]
        for name in names:
            path = here / name
            if not excluded(path.relative_to(root)) and _is_ours(path, root):
                yield path.relative_to(root).as_posix(), path


def excluded(relative: Path) -> bool:
    """Never travels: dotfiles, caches, what was built, pictures of the docs, weights."""
    name = relative.name
    return (
        name.startswith(".") or name in _FOLDERS or name.endswith(_SUFFIXES) or relative.as_posix() in _PATHS
    )  # fmt: skip


def is_checkpoint(names: list[str]) -> bool:
    """A folder with these files holds a model."""
    return "config.json" in names and any(name.endswith(_WEIGHTS) for name in names)


def _is_ours(path: Path, root: Path) -> bool:
    """A regular file; a link only if it stays inside the checkout."""
    return path.is_file() and (not path.is_symlink() or path.resolve().is_relative_to(root))
