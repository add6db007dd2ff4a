"""A small dense llama, and GGUF files of it as llama.cpp's converter would write them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tokenizers import CHAT_TEMPLATE, write_tokenizer

HEADS, KV_HEADS, HIDDEN = 4, 2, 32
F32 = GGMLQuantizationType.F32
TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def dense_llama(tied: bool = True) -> LlamaForCausalLM:
    """A random dense model whose weights are exact in bf16, so that a conversion may lose nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter + 0.3 * torch.randn_like(parameter)).bfloat16().float())
    return model


def permute_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path, model: LlamaForCausalLM, kind: GGMLQuantizationType = F32, extra: dict[str, Any] | None = None
) -> Path:
    """`model` with its tokenizer; matrices as `kind`, norms as F32. extra: arrays become tensors, texts metadata."""
    write_tokenizer(path.parent, 320)
    vocabulary = json.loads((path.parent / "tokenizer.json").read_text())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
    for add, token in (
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 1),
        (writer.add_unk_token_id, 0),
        (writer.add_pad_token_id, 1),
    ):
        add(token)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, value in (extra or {}).items():
        if isinstance(value, str):
            writer.add_string(name, value)
    for name, weight in {**_named(model), **(extra or {})}.items():
        if isinstance(weight, np.ndarray):
            raw = weight if weight.ndim == 1 or kind == F32 else quantize(weight, kind)
            writer.add_tensor(name, raw, raw_dtype=F32 if raw is weight else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _named(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """llama.cpp's names and orders of rows."""
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    if not model.config.tie_word_embeddings:
        tensors["output.weight"] = weights["lm_head.weight"]
    for layer in range(model.config.num_hidden_layers):
        for name, target in TENSORS.items():
            weight = weights[f"model.layers.{layer}.{name}.weight"]
            if target in ("attn_q", "attn_k"):
                weight = permute_rotary(weight, HEADS if target == "attn_q" else KV_HEADS)
            tensors[f"blk.{layer}.{target}.weight"] = np.ascontiguousarray(weight)
    return tensors
