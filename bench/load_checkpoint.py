"""A Mixtral of any size with random weights, written in one go, and forgotten by the page cache."""

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INNER, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 7168, 8, 16, 4, 128, 32000
SHARD_BYTES = 2_000_000_000
_PIECE = 8 << 20
STORED = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}  # name and bytes of a number


def config(layers: int, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All tensors, in the order of the files."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for expert in range(EXPERTS):
            for part, shape in (("w1", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER)), ("w3", (INNER, HIDDEN))):
                yield f"{prefix}.block_sparse_moe.experts.{expert}.{part}.weight", shape
        yield f"{prefix}.block_sparse_moe.gate.weight", (EXPERTS, HIDDEN)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        for part, width in (("k", KV_HEADS), ("q", HEADS), ("v", KV_HEADS)):
            yield f"{prefix}.self_attn.{part}_proj.weight", (width * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def num_layers(gb: float, dtype: str) -> int:
    """So that the checkpoint comes close to this size; at least one."""
    itemsize = STORED[dtype][1]
    size = [sum(itemsize * math.prod(shape) for _, shape in shapes(layers)) for layers in (0, 1)]
    return max(1, round((gb * 1e9 - size[0]) / (size[1] - size[0])))


def write_checkpoint(directory: Path, gb: float, dtype: str = "bfloat16") -> None:
    """config.json, shards, index. The values repeat themselves after 8 MB: the disk does not care."""
    directory.mkdir(parents=True, exist_ok=True)
    layers, (_, itemsize) = num_layers(gb, dtype), STORED[dtype]
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in shapes(layers):
        if size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += itemsize * math.prod(shape)
    values = np.random.default_rng(0).normal(0, 0.02, _PIECE // itemsize).astype(np.float32)
    piece = values.tobytes() if itemsize == 4 else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys((name for name, _ in shard), file))
        _write_shard(directory / file, shard, dtype, piece)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config(layers, dtype)))  # last: it says that all is there


def _write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], dtype: str, piece: bytes) -> None:
    header, at = {}, 0
    stored, itemsize = STORED[dtype]
    for name, shape in tensors:
        end = at + itemsize * math.prod(shape)
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        for start in range(0, at, len(piece)):
            out.write(piece[: at - start])
        out.flush()
        os.fsync(out.fileno())  # pages that are not on the disk cannot be dropped


def drop_pages(directory: Path) -> None:
    """So that the next read comes from the disk."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
