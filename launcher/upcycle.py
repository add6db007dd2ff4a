"""Sparse upcycling: a dense llama-family GGUF becomes a Mixtral-format checkpoint in bf16.

Every expert starts as a copy of the dense FFN and the router weights are random. A top-k routing whose weights sum
to 1 therefore gives the dense model's output, whichever experts it picks (Komatsuzaki et al., arXiv:2212.05055).
Tensors stream from the mapped GGUF into the shards, one at a time: memory stays at the largest single tensor.
"""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dp_engine.gguf_llama import LlamaGguf

SHARD_BYTES = 500_000_000
ROUTER_STD = 0.1
Progress = Callable[[float], None]
"""Called with the share of the work that is done, 0 to 1."""


class UpcycleError(ValueError):
    """A mixture that makes no sense; the message is one line."""


@dataclass(frozen=True)
class Group:
    """Tensors of the checkpoint that share one content (the copies of an expert's matrix)."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]

    @property
    def tensor_bytes(self) -> int:
        return 2 * math.prod(self.shape)

    @property
    def total_bytes(self) -> int:
        return self.tensor_bytes * len(self.names)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round finite float32 to bfloat16, half to even; the result holds the upper halves as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def plan(dense: LlamaGguf, experts: int, seed: int) -> list[Group]:
    """All tensors of the Mixtral checkpoint, in file order, under the names Mixtral checkpoints use on disk."""
    hidden = dense.hidden_size
    rng = np.random.default_rng(seed)

    def copied(name: str, *targets: str) -> Group:
        return Group(targets, dense.shape(name), lambda: dense.load_for_hf(name))

    def router(target: str) -> Group:
        weight = rng.normal(0.0, ROUTER_STD, (experts, hidden)).astype(np.float32)
        return Group((target,), weight.shape, lambda: weight)

    groups = [copied("token_embd.weight", "model.embed_tokens.weight")]
    for layer in range(dense.num_layers):
        block, prefix = f"blk.{layer}", f"model.layers.{layer}"
        moe = f"{prefix}.block_sparse_moe"
        groups += [
            copied(f"{block}.attn_norm.weight", f"{prefix}.input_layernorm.weight"),
            copied(f"{block}.attn_q.weight", f"{prefix}.self_attn.q_proj.weight"),
            copied(f"{block}.attn_k.weight", f"{prefix}.self_attn.k_proj.weight"),
            copied(f"{block}.attn_v.weight", f"{prefix}.self_attn.v_proj.weight"),
            copied(f"{block}.attn_output.weight", f"{prefix}.self_attn.o_proj.weight"),
            copied(f"{block}.ffn_norm.weight", f"{prefix}.post_attention_layernorm.weight"),
            router(f"{moe}.gate.weight"),
        ]
        for source, target in (("ffn_gate", "w1"), ("ffn_down", "w2"), ("ffn_up", "w3")):
            names = (f"{moe}.experts.{expert}.{target}.weight" for expert in range(experts))
            groups.append(copied(f"{block}.{source}.weight", *names))
    groups.append(copied("output_norm.weight", "model.norm.weight"))
    if not dense.tied:
        groups.append(copied("output.weight", "lm_head.weight"))
    return groups


def pack_shards(groups: list[Group], shard_bytes: int) -> list[list[Group]]:
    """Cut the groups, in order, into shards of at most `shard_bytes` (more only if a single group is bigger)."""
    shards: list[list[Group]] = [[]]
    size = 0
    for group in groups:
        if shards[-1] and size + group.total_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += group.total_bytes
    return shards


def mixtral_config(dense: LlamaGguf, experts: int, topk: int) -> dict[str, Any]:
    """config.json; rope in both spellings, `rope_theta` (older readers) and `rope_parameters` (transformers 5)."""
    theta = float(dense["llama.rope.freq_base"])
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": dense.hidden_size,
        "intermediate_size": dense["llama.feed_forward_length"],
        "num_hidden_layers": dense.num_layers,
        "num_attention_heads": dense["llama.attention.head_count"],
        "num_key_value_heads": dense["llama.attention.head_count_kv"],
        "head_dim": dense["llama.rope.dimension_count"],
        "num_local_experts": experts,
        "num_experts_per_tok": topk,
        "max_position_embeddings": dense["llama.context_length"],
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rms_norm_eps": round(float(dense["llama.attention.layer_norm_rms_epsilon"]), 12),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": dense.tied,
        "vocab_size": dense.shape("token_embd.weight")[0],
        "bos_token_id": dense["tokenizer.ggml.bos_token_id"],
        "eos_token_id": dense["tokenizer.ggml.eos_token_id"],
        "pad_token_id": dense["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def upcycle(dense: LlamaGguf, target: Path, experts: int, topk: int, seed: int, progress: Progress) -> dict[str, str]:
    """Write config.json, the shards and their index into `target`; returns the sha256 of every shard by file name."""
    if not 1 <= topk <= experts:
        raise UpcycleError(f"wanted 1 <= topk <= experts, got topk {topk} and {experts} experts")
    groups = plan(dense, experts, seed)
    total = sum(group.total_bytes for group in groups)
    shards = pack_shards(groups, SHARD_BYTES)
    weight_map: dict[str, str] = {}
    digests: dict[str, str] = {}
    written = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update((name, file) for group in shard for name in group.names)
        digest = hashlib.sha256()
        with (target / file).open("wb") as out:
            for chunk in shard_bytes(shard):
                out.write(chunk)
                digest.update(chunk)
                written += len(chunk)
                progress(min(1.0, written / total))
        digests[file] = digest.hexdigest()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    config = json.dumps(mixtral_config(dense, experts, topk), indent=2)
    (target / "config.json").write_text(config + "\n")
    return digests


def shard_bytes(shard: list[Group]) -> Iterator[bytes]:
    """A safetensors file in pieces: length of the header, header, then the tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for group in shard:
        for name in group.names:
            end = offset + group.tensor_bytes
            header[name] = {"dtype": "BF16", "shape": list(group.shape), "data_offsets": [offset, end]}
            offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for group in shard:
        content = to_bf16(group.load()).tobytes()
        for _ in group.names:
            yield content
