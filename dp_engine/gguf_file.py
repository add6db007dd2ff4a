"""A GGUF file: its metadata and where its tensors lie. Free of torch.

The `gguf` package knows the quantised types and undoes them. Its reader is not used: it takes seconds for the
vocabulary alone, on every rank.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


class GgufError(ValueError):
    """The GGUF cannot be read, or is not one we can use; the message is one line."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Row-major shape, and bytes [begin, end) of the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    end: int


class GgufFile:
    """An open GGUF (version 2 or 3, little-endian). `header`: all bytes before the tensors' data."""

    def __init__(self, path: Path) -> None:
        """Raises GgufError unless the file is whole and all its tensors have types that can be read."""
        self.path = path
        try:
            self._data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise GgufError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        cursor = _Cursor(self._data.data)
        try:
            self.fields, self.tensors, start = _read(cursor)
        except (struct.error, IndexError, KeyError, ValueError, OverflowError, MemoryError) as error:
            reason = str(error) if isinstance(error, GgufError) else f"{type(error).__name__}: {error}"
            raise GgufError(f"{path} is not a readable GGUF file: {reason}") from None
        self.header = bytes(self._data[:start])
        for name, tensor in self.tensors.items():
            if tensor.end > len(self._data):
                raise GgufError(f"{path} is truncated: tensor {name} ends at byte {tensor.end} of {len(self._data)}")

    def __getitem__(self, key: str) -> Any:
        if key not in self.fields:
            raise GgufError(f"{self.path} has no metadata field {key}")
        return self.fields[key]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def load(self, name: str) -> np.ndarray:
        """The tensor as float32, dequantised, in row-major shape."""
        tensor = self._tensor(name)
        block, size = GGML_QUANT_SIZES[tensor.kind]
        rows = self._data[tensor.begin : tensor.end].reshape(*tensor.shape[:-1], tensor.shape[-1] // block * size)
        if tensor.kind == GGMLQuantizationType.F32:
            return np.array(rows).view(np.float32).reshape(tensor.shape)
        if tensor.kind == GGMLQuantizationType.F16:
            return np.array(rows).view(np.float16).astype(np.float32).reshape(tensor.shape)
        return dequantize(rows, tensor.kind).astype(np.float32, copy=False).reshape(tensor.shape)

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            raise GgufError(f"{self.path} has no tensor {name}")
        return self.tensors[name]


class _Cursor:
    """Reads numbers and texts from the front of a file."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))
        return value

    def text(self) -> str:
        return self._bytes(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        values = struct.iter_unpack(f"<{_SCALARS[kind]}", self._bytes(count * struct.calcsize(f"<{_SCALARS[kind]}")))
        return [value for (value,) in values]

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise GgufError("it ends in the middle of its metadata")
        self.at += count
        return bytes(self._data[self.at - count : self.at])


def _read(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
    """Metadata, tensors, and where their data begin."""
    magic, version = cursor.number("I"), cursor.number("I")
    if magic != int.from_bytes(b"GGUF", "little"):
        raise GgufError("it does not begin with GGUF")
    if version not in _VERSIONS:
        raise GgufError(f"its version is {version}, wanted {' or '.join(map(str, _VERSIONS))}")
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    fields = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(num_fields)}
    found = [_read_tensor(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: GgufTensor(kind, shape, start + offset, start + offset + _num_bytes(name, kind, shape))
        for name, kind, shape, offset in found
    }
    return fields, tensors, start


def _read_tensor(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.text()
    shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]  # the file has the fastest axis first
    number, offset = cursor.number("I"), cursor.number("Q")
    known = {kind.value: kind for kind in GGMLQuantizationType}
    kind = known.get(number)
    if kind is None or kind.name not in READABLE:
        raise GgufError(
            f"tensor {name} has type {number if kind is None else kind.name}, wanted one of {', '.join(READABLE)}"
        )
    return name, kind, shape, offset


def _num_bytes(name: str, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise GgufError(f"tensor {name} of shape {list(shape)} cannot be {kind.name} in blocks of {block}")
    return math.prod(shape) // block * size
