"""docs/configuration.md, written from the schema: `python -m launcher.config_reference > docs/configuration.md`."""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from launcher.config import DeploymentConfig

INTRODUCTION = """# Configuration

One schema (`launcher/config.py`) stands behind YAML files, `--set key=value` and the flags of `phalanx serve` and
`phalanx generate`. Precedence rises from defaults over the YAML file and `--set` to flags. Unknown keys and values of a
wrong type are refused with exit code 2. `phalanx config [FILE] [--set ...]` prints the configuration that results.

This page is written from the schema (`python -m launcher.config_reference`); a test keeps it current.
"""


def reference() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for title, model in _sections(DeploymentConfig, ""):
        parts.append(f"## {title or 'The deployment'}\n\n{(model.__doc__ or '').strip().splitlines()[0]}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        prefix = f"{title}." if title else ""
        rows = [_row(prefix + name, field) for name, field in model.model_fields.items() if not _is_section(field)]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        if _is_section(field):
            yield from _sections(field.annotation, f"{path}.{name}" if path else name)  # type: ignore[arg-type]


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _row(key: str, field: FieldInfo) -> str:
    default = "" if field.default in (None, {}, PydanticUndefined) else f"`{_plain(field.default)}`"
    return f"| `{key}` | {_type(field.annotation)} | {default} | {field.description} |"


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type(annotation: Any) -> str:
    if get_origin(annotation) is dict:
        return f"mapping of {' to '.join(_type(part) for part in get_args(annotation))}"
    names = [get_args(part) if get_origin(part) is not None else part for part in get_args(annotation)]
    if all(isinstance(part, str) for part in get_args(annotation)) and names:
        return ", ".join(f"`{name}`" for name in names)  # a Literal
    if names:
        return ", ".join(_type(part) for part in get_args(annotation) if part is not type(None))
    return str(annotation.__name__)


if __name__ == "__main__":
    print(reference(), end="")
