"""Weights of a Hugging Face checkpoint: safetensors files, read lazily, every tensor accounted for."""

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SAMPLE_BYTES = 64  # of each tensor, for the digest
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message is one line and names the file and the tensor."""


@dataclass(frozen=True)
class _Shard:
    """A file's header: the raw bytes (for the digest), the shapes it promises, and where the data begin and end."""

    raw: bytes
    shapes: dict[str, tuple[int, ...]]
    places: dict[str, tuple[int, int]]


class Checkpoint:
    """An open checkpoint. The index (or the single file) says what there is; files it does not name are ignored.

    Opening reads all headers and checks that every shard is there, is whole, and holds what the index says. The caller
    then takes each tensor of its model once and finally calls `unused`. Raises CheckpointError.
    """

    def __init__(self, model_dir: Path):
        self.model_dir = model_dir
        self._files = _tensor_files(model_dir)
        self._shards = {name: _read_header(model_dir / name) for name in sorted(set(self._files.values()))}
        self._open: dict[str, Any] = {}
        self._taken: set[str] = set()
        for name, file in self._files.items():
            if name not in self._shards[file].shapes:
                raise CheckpointError(f"{model_dir / file}: tensor {name} is missing, although {INDEX} places it there")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def require(self, names: Iterable[str]) -> None:
        """Check that all these tensors exist, whether this rank reads them or not."""
        for name in names:
            if name not in self._files:
                where = SINGLE if set(self._files.values()) == {SINGLE} else INDEX
                raise CheckpointError(f"{self.model_dir / where}: tensor {name} is missing")

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor `name`, which must have this shape, as `dtype`. Each may be taken once."""
        if name in self._taken:
            raise CheckpointError(f"{self._path(name)}: tensor {name} would be loaded twice")
        tensor = self._slice(name, shape)[:]
        self._taken.add(name)
        return tensor.to(dtype)

    def take_part(self, name: str, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """`tensor[index]` of a tensor whose whole shape is `shape`. Each part may be taken once."""
        part = f"{name}[{index}]"
        if part in self._taken:
            raise CheckpointError(f"{self._path(name)}: tensor {part} would be loaded twice")
        tensor = self._slice(name, shape)[index]
        self._taken.update((part, name))
        return tensor.to(dtype)

    def unused(self) -> list[str]:
        """Tensors that nobody took, in the index' order."""
        return [name for name in self._files if name not in self._taken]

    def digest(self) -> str:
        """Stable name of the checkpoint: of its config.json, of which tensor lies where, of their types and shapes, and
        of a few values of each. Equal on all ranks that see the same files; other weights of the same model differ.
        """
        digest = hashlib.sha256((self.model_dir / "config.json").read_bytes())
        digest.update(json.dumps(sorted(self._files.items())).encode())
        for name, shard in sorted(self._shards.items()):
            digest.update(name.encode() + shard.raw + self._samples(name, shard))
        return digest.hexdigest()

    def _samples(self, file: str, shard: _Shard) -> bytes:
        """Some bytes from the middle of every tensor in a file."""
        start = 8 + len(shard.raw)
        spans = [
            (max(begin, (begin + end - SAMPLE_BYTES) // 2), min(SAMPLE_BYTES, end - begin))
            for begin, end in sorted(shard.places.values())
        ]
        try:
            with (self.model_dir / file).open("rb", buffering=0) as data:
                read = [os.pread(data.fileno(), length, start + at) for at, length in spans]
        except OSError as error:
            raise CheckpointError(f"cannot read {self.model_dir / file}: {error.strerror or error}") from None
        return b"".join(read)

    def _path(self, name: str) -> Path:
        return self.model_dir / self._files[name]

    def _slice(self, name: str, shape: tuple[int, ...]) -> Any:
        self.require([name])
        file = self._files[name]
        actual = self._shards[file].shapes[name]
        if actual != shape:
            raise CheckpointError(f"{self._path(name)}: tensor {name} has shape {list(actual)}, expected {list(shape)}")
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.model_dir / file, framework="pt")
            return self._open[file].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path(name)}: tensor {name} cannot be read: {error}") from None


def _tensor_files(model_dir: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index, or from the single file when there is no index."""
    index = model_dir / INDEX
    if not index.is_file():
        if not (model_dir / SINGLE).is_file():
            raise CheckpointError(f"model directory {model_dir} has neither {INDEX} nor {SINGLE}")
        return dict.fromkeys(_read_header(model_dir / SINGLE).shapes, SINGLE)
    try:
        files = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is no safetensors index: {type(error).__name__}: {error}") from None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{index}: weight_map must map tensors to files")
    for name, file in files.items():
        if Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name} is placed in {file!r}, outside the model directory")
    return files


def _read_header(path: Path) -> _Shard:
    """Read and check one file's header: 8 bytes of length, then JSON, then the data it describes."""
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
        entries = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        places = {
            name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} has a broken safetensors header: {type(error).__name__}: {error}") from None
    for name, (_, end) in places.items():
        if 8 + length + end > size:
            raise CheckpointError(f"{path} is truncated: tensor {name} ends at byte {8 + length + end} of {size}")
    return _Shard(raw, shapes, places)
