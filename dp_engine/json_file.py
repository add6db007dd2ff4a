"""JSON objects of a model directory, read with the care that files from elsewhere need."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ModelConfigError(ValueError):
    """A model that cannot be run; the message is one line and names the file and the key."""


class JsonFile:
    """A JSON object from a file. Every complaint is a ModelConfigError that names the file and the key.

    A key that is missing or null has the value it has in `defaults`; without one there it is an error to ask for it.
    """

    def __init__(self, path: Path, defaults: Mapping[str, Any] | None = None):
        self.path = path
        self.defaults = defaults or {}
        try:
            loaded = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelConfigError(f"cannot read {path}: {error.strerror or error}") from None
        except ValueError as error:
            raise ModelConfigError(f"{path} is not JSON: {error}") from None
        if not isinstance(loaded, dict):
            raise ModelConfigError(f"{path} must hold a JSON object, not {type(loaded).__name__}")
        self.values: dict[str, Any] = loaded

    def error(self, key: str, problem: str) -> ModelConfigError:
        return ModelConfigError(f"{self.path}: {key} {problem}")

    def get(self, key: str) -> Any:
        """The value, None when neither file nor defaults have one."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            wanted = "positive integer" if least == 1 else f"integer of at least {least}"
            raise self.error(key, f"must be a {wanted}, not {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if value is None:
            raise self.error(key, "is missing")
        return self.positive(key, value)

    def positive(self, key: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(key, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str | bool) -> bool:
        """False when nobody says anything. True and False in place of a key stand for themselves."""
        if isinstance(key, bool):
            return key
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return bool(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of them; empty when missing."""
        value = self.get(key)
        listed = [] if value is None else value
        if not isinstance(listed, list) or not all(isinstance(item, int) for item in listed):
            raise self.error(key, f"must be a list of integers, not {value!r}")
        return tuple(listed)

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise self.error(key, f"must be a token id or a list of them, not {value!r}")
        return tuple(ids)
