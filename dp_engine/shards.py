"""One safetensors file: its header, checked, and its data, mapped into memory and lent tensor by tensor."""

import json
import math
import mmap
import os
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_OTHER_BITS = {"U16": 16, "U32": 32, "U64": 64, "C64": 64, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
BITS = {name: 8 * dtype.itemsize for name, dtype in TORCH_DTYPES.items()} | _OTHER_BITS
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ASK_BYTES = 128 << 10  # the kernel may cut one request for pages to its read-ahead window, by default this


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message is one line and names the file and the tensor."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How a tensor lies in its file: the file format's name of its type, its shape, and its bytes [begin, end)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def span(self, index: int | None = None) -> tuple[int, int]:
        """Bytes of the file that hold the tensor, or its part `[index]`."""
        if index is None:
            return self.begin, self.end
        part = (self.end - self.begin) // self.shape[0]
        return self.begin + index * part, self.begin + (index + 1) * part


class Shard(Protocol):
    """A file of tensors. `header`: the bytes that describe them, for the digest."""

    path: Path
    header: bytes
    tensors: Mapping[str, Stored]

    def lend(self, name: str, index: int | None = None) -> Tensor:
        """The tensor, or its part `[index]`: to be read, not to be written or kept."""

    def take_back(self, name: str, index: int | None = None) -> None:
        """Its pages may leave this process; who reads it nevertheless gets them back."""

    def will_need(self, name: str, index: int | None = None) -> None:
        """Begin to read a tensor that will be lent soon."""


class SafetensorsShard:
    """Reads the header at once and maps the file when the first tensor is asked for.

    Only pages of tensors that are lent are read, and they leave this process when the tensor is given back (the page
    cache keeps them for the other ranks of the host).
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError unless the file is whole and its header describes all of it."""
        self.path = path
        self.header, found = _read_header(path)
        self.tensors: Mapping[str, Stored] = found
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._file = -1

    def lend(self, name: str, index: int | None = None) -> Tensor:
        """A view of the mapping in the stored type."""
        stored = self.tensors[name]
        begin, end = stored.span(index)
        data = self._mapped()
        self.will_need(name, index)
        dtype = TORCH_DTYPES[stored.dtype]
        piece = data[begin:end]
        if begin % dtype.itemsize:
            piece = piece.clone()  # the format does not promise alignment
        return piece.view(dtype).view(stored.shape if index is None else stored.shape[1:])

    def take_back(self, name: str, index: int | None = None) -> None:
        """The page cache keeps them."""
        begin, end = self.tensors[name].span(index)
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def will_need(self, name: str, index: int | None = None) -> None:
        """Reading begins and is not waited for."""
        begin, end = self.tensors[name].span(index)
        self._mapped()
        if hasattr(os, "posix_fadvise"):
            for at in range(begin, end, _ASK_BYTES):
                os.posix_fadvise(self._file, at, min(_ASK_BYTES, end - at), os.POSIX_FADV_WILLNEED)

    def _mapped(self) -> Tensor:
        """All bytes of the file, uint8. Advised as random, so that no neighbour's page is read beside the wanted."""
        if self._map is None:
            try:
                self._file = os.open(self.path, os.O_RDONLY)
                self._map = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot map {self.path}: {getattr(error, 'strerror', None) or error}") from None
            if hasattr(os, "posix_fadvise"):
                self._map.madvise(mmap.MADV_RANDOM)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch has no read-only tensors; ours is copied from, never written
                self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._bytes

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)


def _read_header(path: Path) -> tuple[bytes, dict[str, Stored]]:
    """8 bytes of length, then JSON, then the data it describes, without gaps. Offsets become those of the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is truncated or no safetensors file ({size} bytes)")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        tensors = {
            name: _stored(entry, 8 + length) for name, entry in json.loads(raw).items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} has a broken safetensors header: {type(error).__name__}: {error}") from None
    _check_layout(path, tensors, 8 + length, size)
    return raw, tensors


def _stored(entry: Any, start: int) -> Stored:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"offsets and shapes must be natural numbers, not {entry}")
    return Stored(str(entry["dtype"]), shape, start + begin, start + end)


def _check_layout(path: Path, tensors: Mapping[str, Stored], start: int, size: int) -> None:
    """Types, shapes and bytes agree, and the tensors fill the file, one after the other."""
    at, last = start, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.dtype not in BITS:
            raise CheckpointError(f"{path}: tensor {name} has the unknown type {stored.dtype}")
        wanted, given = math.prod(stored.shape) * BITS[stored.dtype], 8 * (stored.end - stored.begin)
        if wanted != given:
            raise CheckpointError(
                f"{path}: tensor {name} has {given // 8} bytes, but {stored.dtype} {list(stored.shape)} takes "
                f"{-(-wanted // 8)}"
            )
        if stored.end > size:
            raise CheckpointError(f"{path} is truncated: tensor {name} ends at byte {stored.end} of {size}")
        if stored.begin != at:
            relation = "overlaps" if stored.begin < at else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {name} begins at byte {stored.begin} and {relation} {last}")
        at, last = stored.end, name
    if at != size:
        raise CheckpointError(f"{path} has {size - at} bytes more than its header describes")
