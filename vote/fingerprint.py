"""Fingerprints: what two objects have to have in common to behave alike from now on, as 16 bytes."""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from types import MethodType
from typing import Any

import numpy as np

Portraits = Mapping[type, Callable[[Any], Any]]

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))


def fingerprint(thing: Any, portraits: Portraits) -> bytes:
    """Equal for object graphs of the same shape and content.

    Everything reachable counts, attributes and slots of any class, and which of them are the same object. Where that is
    too much, `portraits` gives by type what stands for an object: whoever writes one vouches that the rest has no
    influence on what the object does later.
    """
    return hashlib.blake2b(repr(_Walk(portraits).walk(thing)).encode(), digest_size=16).digest()


class _Walk:
    """Turns an object graph into nested tuples of plain values."""

    def __init__(self, portraits: Portraits) -> None:
        self._portraits = portraits
        self._seen: dict[int, int] = {}

    def walk(self, thing: Any) -> Any:
        kind = type(thing)
        if kind in _PLAIN:
            return thing
        if kind is np.ndarray:
            return thing.dtype.str, thing.shape, thing.tobytes()
        if kind in (list, tuple, deque):
            return kind.__name__, *[item if type(item) in _PLAIN else self.walk(item) for item in thing]
        if isinstance(thing, dict):
            return kind.__name__, *[
                (self.walk(key), value if type(value) in _PLAIN else self.walk(value)) for key, value in thing.items()
            ]
        if kind in (set, frozenset):
            return kind.__name__, *sorted(self.walk(item) for item in thing)
        if isinstance(thing, Enum):
            return kind.__name__, thing.name
        if isinstance(thing, np.generic):
            return thing.dtype.str, thing.item()
        return self._object(thing, kind)

    def _object(self, thing: Any, kind: type) -> Any:
        if (number := self._seen.get(id(thing))) is not None:
            return "seen", number
        self._seen[id(thing)] = len(self._seen)
        if kind is MethodType:
            return "method", thing.__name__, self.walk(thing.__self__)
        portrait = next((self._portraits[base] for base in kind.__mro__ if base in self._portraits), _attributes)
        return kind.__qualname__, self.walk(portrait(thing))


def _attributes(thing: Any) -> dict[str, Any]:
    """By name, whether they live in a dictionary or in slots."""
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    if not slots and not hasattr(thing, "__dict__"):
        raise TypeError(f"a {type(thing).__name__} needs a portrait")
    return {name: getattr(thing, name) for name in slots if hasattr(thing, name)} | getattr(thing, "__dict__", {})
