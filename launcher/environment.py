"""Checks of the Python environment a process runs in: two packages of other people could take our names' place."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dp_engine", "vote", "ep", "kernels")


class EnvironmentCheckError(RuntimeError):
    """phalanx cannot run in this environment; the message is one line: what is wrong and what to do."""


def check_environment() -> None:
    """Every package of phalanx is imported from beside this one. Raises EnvironmentCheckError.

    Hugging Face has a package named `kernels` too: installed beside an editable install of phalanx, it comes first.
    """
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        found = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
        if found == ROOT / package:
            continue
        if found is None:
            raise EnvironmentCheckError(
                f"the package {package!r} is missing in {ROOT}: the checkout is incomplete, clone it again"
            )
        raise EnvironmentCheckError(
            f"the package {package!r} would be imported from {found}, not from phalanx: start with "
            f"`python -m launcher` in {ROOT}, or remove the other one (`pip uninstall {package}`)"
        )


def shield_transformers() -> None:
    """Call before `transformers` is first used: it must not take our `kernels` for Hugging Face's.

    `transformers` asks the metadata of a distribution named kernels whether that package is usable and then imports
    names from whatever module `kernels` is. With theirs installed and ours first on the path that import fails. It
    asks only once and remembers; so it is asked here, while the module is out of its sight, and remembers "no":
    everything it does with that package is optional.
    """
    with _hidden("kernels"):
        from transformers.utils import is_kernels_available

        is_kernels_available()


@contextmanager
def _hidden(hidden: str) -> Iterator[None]:
    """`importlib.util.find_spec(hidden)` finds nothing meanwhile; imports themselves are not touched."""
    find_spec = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == hidden else find_spec(name, package)

    importlib.util.find_spec = without
    try:
        yield
    finally:
        importlib.util.find_spec = find_spec
