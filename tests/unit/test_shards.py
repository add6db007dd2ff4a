"""Files that lie about themselves, and what reading them touches."""

import ctypes
import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dp_engine.checkpoint import SINGLE, Checkpoint, CheckpointError
from dp_engine.shards import SafetensorsShard
from ep.placement import Placements

EXPERTS, ROWS, COLUMNS = 8, 1024, 768  # 3 MB an expert


def write_raw(path: Path, header: Mapping[str, Any] | bytes, data: bytes, pad: int = 0) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * pad
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: str = "F32", shape: list[Any] | None = None, offsets: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": offsets or [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry(shape=[3])}, 8, r"tensor a has 8 bytes, but F32 \[3\] takes 12"),
        ({"a": entry("F16")}, 8, r"tensor a has 8 bytes, but F16 \[2\] takes 4"),
        ({"a": entry("F9")}, 8, "tensor a has the unknown type F9"),
        ({"a": entry()}, 7, "is truncated: tensor a ends at byte"),
        ({"a": entry()}, 9, "1 bytes more than its header describes"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, 12, "tensor b begins at byte .* and overlaps a"),
        ({"a": entry(), "b": entry()}, 8, "tensor b begins at byte .* and overlaps a"),
        ({"a": entry(), "b": entry(offsets=[12, 20])}, 20, "tensor b begins at byte .* and leaves a gap after a"),
        ({"a": entry(offsets=[8, 0])}, 8, "tensor a has -8 bytes"),
        ({"a": entry(offsets=[-8, 0])}, 8, "broken safetensors header: ValueError: offsets and shapes"),
        ({"a": entry(shape=[-2, -1])}, 8, "broken safetensors header: ValueError: offsets and shapes"),
        ({"a": entry(shape=[2.0])}, 8, "broken safetensors header: ValueError: offsets and shapes"),
        ({"a": entry(offsets=[0, 4, 8])}, 8, "broken safetensors header: ValueError"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "broken safetensors header: KeyError: 'data_offsets'"),
        ({"a": []}, 8, "broken safetensors header: TypeError"),
        (b"[]", 8, "broken safetensors header: AttributeError"),
        (b"{", 8, "broken safetensors header: JSONDecodeError"),
    ],
)
def test_headers_that_lie(tmp_path: Path, header: Any, data: int, words: str) -> None:
    path = write_raw(tmp_path / SINGLE, header, bytes(data))
    with pytest.raises(CheckpointError, match=words) as caught:
        SafetensorsShard(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_alignment_of_the_data_is_read(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.25])
    for pad in range(8):
        header = {"a": entry("BF16", offsets=[0, 4]), "none": entry(shape=[0, 3], offsets=[4, 4])}
        write_raw(tmp_path / SINGLE, header, values.bfloat16().view(torch.uint8).numpy().tobytes(), pad)
        checkpoint = Checkpoint(tmp_path)
        assert torch.equal(checkpoint.take("a", (2,), torch.float32), values)
        assert checkpoint.take("none", (0, 3), torch.bfloat16).shape == (0, 3)


STORED = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("wanted", STORED)
def test_floats_are_converted_and_owned(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = torch.randn(3, 5, 7).to(stored)
    save_file({"a": whole, "b": whole.clone()}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    taken = checkpoint.take("a", (3, 5, 7), wanted)
    part = checkpoint.take_part("b", 1, (3, 5, 7), wanted)
    (tmp_path / SINGLE).write_bytes(b"")
    assert taken.dtype == part.dtype == wanted
    assert torch.equal(taken, whole.to(wanted))
    assert torch.equal(part, whole[1].to(wanted))


def test_what_is_no_weight_is_only_taken_as_what_it_is(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1, 2], dtype=torch.int32)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"tensor a is stored as I32, which cannot be loaded as torch\.float32"):
        Checkpoint(tmp_path).take("a", (2,), torch.float32)
    assert Checkpoint(tmp_path).take("a", (2,), torch.int32).tolist() == [1, 2]
    with pytest.raises(CheckpointError, match="tensor a has 2 parts, wanted part 2"):
        Checkpoint(tmp_path).take_part("a", 2, (2,), torch.int32)


def resident(path: Path) -> list[bool]:
    """Which pages of a file are in the page cache."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    with path.open("rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return [bool(page & 1) for page in pages]


def mapped_kb(path: Path) -> int:
    """Of this file, in this process' memory."""
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags")
    return sum(int(block.split("Rss:")[1].split()[0]) for block in blocks if str(path) in block)


@pytest.mark.parametrize("fused", [False, True])
def test_foreign_experts_are_never_read_and_what_was_read_is_let_go(tmp_path: Path, fused: bool) -> None:
    base, weights = "model.layers.0.mlp.experts", torch.rand(EXPERTS, ROWS, COLUMNS)
    single = {f"{base}.{index}.up_proj.weight": weights[index].clone() for index in range(EXPERTS)}
    path = tmp_path / SINGLE
    save_file({f"{base}.up_proj": weights} if fused else single, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if sum(resident(path)) > 8:
        pytest.skip("this file system keeps its pages")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.expect(Placements.contiguous(1, EXPERTS, 4), 1)
    owned = checkpoint.owned(Placements.contiguous(1, EXPERTS, 4), 1)
    for name, parts in owned.items():
        for part in parts:
            taken = (
                checkpoint.take(name, (ROWS, COLUMNS), torch.float32)
                if part is None
                else checkpoint.take_part(name, part, tuple(weights.shape), torch.float32)
            )
            index = int(name.split(".")[5]) if part is None else part
            assert torch.equal(taken, weights[index])
    spans = [checkpoint.stored(name).span(part) for name, parts in owned.items() for part in parts]
    wanted = {page for begin, end in spans for page in range(begin // mmap.PAGESIZE, -(-end // mmap.PAGESIZE))}
    assert len(wanted) > EXPERTS // 4 * ROWS * COLUMNS * 4 // mmap.PAGESIZE - 1
    read = {page for page, there in enumerate(resident(path)) if there}
    assert wanted <= read
    assert len(read - wanted) <= 64  # the header, and what was read with it
    assert mapped_kb(path) <= 64


def test_what_is_borrowed_is_the_file_and_counts_as_taken(tmp_path: Path) -> None:
    values = {name: torch.full((3, 2), at, dtype=torch.bfloat16) for at, name in enumerate("abcde")}
    save_file(values, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    lent = {name: checkpoint.borrow(name, (3, 2), torch.bfloat16) for name in "abcd"}
    own = checkpoint.borrow("e", (3, 2), torch.float32)
    assert all(torch.equal(tensor, values[name]) for name, tensor in lent.items())  # those given back as well
    assert torch.equal(own, values["e"].float())
    assert checkpoint.unused() == []
    with pytest.raises(CheckpointError, match="tensor a would be loaded twice"):
        checkpoint.borrow("a", (3, 2), torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"tensor a has shape \[3, 2\], expected \[2, 3\]"):
        Checkpoint(tmp_path).borrow("a", (2, 3), torch.bfloat16)
    with pytest.raises(CheckpointError, match="tensor f is missing"):
        Checkpoint(tmp_path).borrow("f", (3, 2), torch.bfloat16)
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).open("r+b").write(data[:-60] + bytes(60))
    assert not any(tensor.any() for tensor in lent.values())  # no copies
    assert own.any()
