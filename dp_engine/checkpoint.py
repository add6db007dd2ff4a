"""Weights of a Hugging Face checkpoint or a GGUF: every tensor accounted for, and only what a rank owns is read."""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from dp_engine.fp8 import FP8, SCALE, block_size, dequantize, scale_shape
from dp_engine.index import INDEX, SINGLE, open_shards
from dp_engine.owned import Parts, num_bytes, owned_parts, taking_order
from dp_engine.shards import TORCH_DTYPES, CheckpointError, Shard, Stored
from ep.placement import Placements

__all__ = ["INDEX", "SINGLE", "Checkpoint", "CheckpointError", "OnBytes"]

SAMPLE_BYTES = 64  # of each tensor, for the digest
AHEAD_BYTES = 64 << 20  # are being read while what came before is converted
MOST_LENT = 3  # tensors: an expert
_FLOATS = ("F32", "F16", "BF16")

OnBytes = Callable[[int, int], None]
"""Called with the bytes that were taken, and all that this rank will take."""


class Checkpoint:
    """An open checkpoint. The index (or the single file) says what there is; files it does not name are ignored.

    Opening reads all headers and checks that every shard is there, is whole, and holds what the index says. The caller
    then takes each tensor of its model once and finally calls `unused`. What it takes is its own memory: the files are
    mapped, and a tensor is converted straight from the mapping. Raises CheckpointError.
    """

    def __init__(self, model_dir: Path, on_bytes: OnBytes | None = None):
        self.model_dir = model_dir
        self._shards, self._files = open_shards(model_dir)
        self._stored = {name: self._shards[file].tensors[name] for name, file in self._files.items()}
        self._block: tuple[int, int] | None = None  # that shares an fp8 scale
        self._taken: set[str] = set()
        self._required: set[str] = set()
        self._on_bytes = on_bytes
        self._bytes_taken = 0
        self._bytes_owned = 0
        self._ahead: deque[tuple[str, int | None]] = deque()  # owned and not asked for yet
        self._bytes_asked = 0
        self._lent: deque[str] = deque()  # and perhaps still in use

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def stored(self, name: str) -> Stored:
        """Type, shape and place in its file of a tensor that exists."""
        return self._stored[name]

    def path(self, name: str) -> Path:
        """The file that holds this tensor."""
        return self.model_dir / self._files[name]

    def owned(self, placements: Placements, rank: int) -> dict[str, Parts]:
        """What this rank takes of which tensors."""
        return owned_parts(self._stored, placements, rank)

    def expect(self, placements: Placements, rank: int) -> None:
        """Say who is going to load, so that what it owns is read ahead and `on_bytes` knows the total."""
        parts = self.owned(placements, rank)
        self._bytes_owned = num_bytes(self._stored, parts)
        in_order = sorted(parts, key=lambda name: (taking_order(name), self._files[name], self._stored[name].begin))
        self._ahead = deque((name, index) for name in in_order for index in parts[name])
        self._report()

    def require(self, names: Iterable[str]) -> None:
        """Check that all these tensors exist, whether this rank reads them or not."""
        for name in names:
            if name not in self._files:
                file = INDEX if (self.model_dir / INDEX).is_file() else next(iter(self._shards))
                raise CheckpointError(f"{self.model_dir / file}: tensor {name} is missing")
            if self._stored[name].dtype == FP8:
                self._check_scales(name)
            self._required.add(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor `name`, which must have this shape, as `dtype`. Each may be taken once."""
        return self._load(name, None, name, shape, dtype)

    def borrow(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `take`, for one who copies the tensor into a form of his own and drops it: it may be a view of the file,
        which must not be written to."""
        stored = self._stored.get(name)
        if name in self._taken or stored is None or stored.shape != shape or TORCH_DTYPES.get(stored.dtype) != dtype:
            return self.take(name, shape, dtype)
        self._read_ahead()
        tensor = self._shards[self._files[name]].lend(name)
        self._taken.add(name)
        self._lent.append(name)
        if len(self._lent) > MOST_LENT:
            returned = self._lent.popleft()
            self._shards[self._files[returned]].take_back(returned)
        self._count(name, None)
        return tensor

    def take_part(self, name: str, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """`tensor[index]` of a tensor whose whole shape is `shape`. Each part may be taken once."""
        return self._load(name, index, f"{name}[{index}]", shape, dtype)

    def unused(self) -> list[str]:
        """Tensors that nobody took, in the index' order. Scales go with their weights."""
        used = self._taken | {name + SCALE for name in self._taken}
        return [
            name
            for name in self._files
            if name not in used and not (name.endswith(SCALE) and name.removesuffix(SCALE) in self._required)
        ]

    def digest(self) -> str:
        """Stable name of the checkpoint: of its config.json, of which tensor lies where, of their types and shapes, and
        of a few values of each. Equal on all ranks that see the same files; other weights of the same model differ.
        """
        digest = hashlib.sha256((self.model_dir / "config.json").read_bytes())
        digest.update(json.dumps(sorted(self._files.items())).encode())
        for name, shard in sorted(self._shards.items()):
            digest.update(name.encode() + shard.header + _samples(shard))
        return digest.hexdigest()

    def _check_scales(self, name: str) -> None:
        """Of a tensor stored in fp8."""
        if self._block is None:
            self._block = block_size(self.model_dir / "config.json")
        if name + SCALE not in self._files:
            raise CheckpointError(
                f"{self.path(name)}: tensor {name} is stored in fp8, but its scales {name + SCALE} are missing"
            )
        stored, scale = self._stored[name], self._stored[name + SCALE]
        if len(stored.shape) < 2:
            raise CheckpointError(f"{self.path(name)}: tensor {name} is stored in fp8, but is no matrix")
        if scale.dtype not in _FLOATS:
            raise CheckpointError(f"{self.path(name + SCALE)}: tensor {name + SCALE} is stored as {scale.dtype}")
        if scale.shape != (wanted := scale_shape(stored.shape, self._block)):
            raise CheckpointError(
                f"{self.path(name + SCALE)}: tensor {name + SCALE} has shape {list(scale.shape)}, expected "
                f"{list(wanted)} for blocks of {self._block[0]} x {self._block[1]}"
            )

    def _load(self, name: str, index: int | None, part: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if part in self._taken:
            raise CheckpointError(f"{self.path(name)}: tensor {part} would be loaded twice")
        self.require([name])
        stored = self._stored[name]
        if stored.shape != shape:
            raise CheckpointError(
                f"{self.path(name)}: tensor {name} has shape {list(stored.shape)}, expected {list(shape)}"
            )
        if index is not None and not 0 <= index < shape[0]:
            raise CheckpointError(f"{self.path(name)}: tensor {name} has {shape[0]} parts, wanted part {index}")
        exact = TORCH_DTYPES.get(stored.dtype) == dtype
        if stored.dtype not in (*_FLOATS, FP8) and not exact and not stored.dtype.startswith("GGUF"):
            raise CheckpointError(
                f"{self.path(name)}: tensor {name} is stored as {stored.dtype}, which cannot be loaded as {dtype}"
            )
        tensor = self._copy(name, index, dtype) if stored.dtype != FP8 else self._dequantized(name, index, dtype)
        self._taken.update((part, name))
        return tensor

    def _copy(self, name: str, index: int | None, dtype: torch.dtype) -> Tensor:
        self._read_ahead()
        shard = self._shards[self._files[name]]
        copy = shard.lend(name, index).to(dtype, copy=True)
        shard.take_back(name, index)
        self._count(name, index)
        return copy

    def _dequantized(self, name: str, index: int | None, dtype: torch.dtype) -> Tensor:
        assert self._block is not None  # since `require`
        factors = self._copy(name + SCALE, index, torch.float32)
        self._read_ahead()
        shard = self._shards[self._files[name]]
        weight = dequantize(shard.lend(name, index), factors, self._block, dtype)
        shard.take_back(name, index)
        self._count(name, index)
        return weight

    def _read_ahead(self) -> None:
        """Keep the disk busy with what will probably be taken next."""
        while self._ahead and self._bytes_asked < self._bytes_taken + AHEAD_BYTES:
            name, index = self._ahead.popleft()
            begin, end = self._stored[name].span(index)
            self._shards[self._files[name]].will_need(name, index)
            self._bytes_asked += end - begin

    def _count(self, name: str, index: int | None) -> None:
        begin, end = self._stored[name].span(index)
        self._bytes_taken += end - begin
        self._report()

    def _report(self) -> None:
        if self._on_bytes is not None:
            self._on_bytes(self._bytes_taken, max(self._bytes_owned, self._bytes_taken))


def _samples(shard: Shard) -> bytes:
    """Some bytes from the middle of every tensor of a file."""
    spans = [
        (max(begin, (begin + end - SAMPLE_BYTES) // 2), min(SAMPLE_BYTES, end - begin))
        for begin, end in sorted(stored.span() for stored in shard.tensors.values())
    ]
    try:
        with shard.path.open("rb", buffering=0) as data:
            return b"".join(os.pread(data.fileno(), length, at) for at, length in spans)
    except OSError as error:
        raise CheckpointError(f"cannot read {shard.path}: {error.strerror or error}") from None
