"""config.json as published with well-known checkpoints: every key of theirs is understood or of no consequence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dp_engine.attention_config import GroupedQueries, LatentAttention
from dp_engine.config import EngineConfig
from dp_engine.model_config import ModelConfig
from ep.routing import Routing

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "use_cache": True, "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "tie_word_embeddings": False, "transformers_version": "4.40.0",
}  # fmt: skip
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}

MIXTRAL_8X7B = COMMON | {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32000,
}  # fmt: skip
QWEN15_MOE = COMMON | {
    "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632,
    "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 16, "rope_theta": 1000000.0, "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B_FP8 = COMMON | {
    "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
}  # fmt: skip
OLMOE_1B_7B = COMMON | {
    "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 1024,
    "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rope_scaling": None,
    "rope_theta": 10000.0, "vocab_size": 50304,
}  # fmt: skip
DEEPSEEK_V2_LITE = COMMON | {
    "model_type": "deepseek_v2", "attention_bias": False, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1,
    "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "topk_group": 1,
    "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V3 = COMMON | {
    "model_type": "deepseek_v3", "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
GPT_OSS_20B = COMMON | {
    "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
}  # fmt: skip
GLM45_AIR = COMMON | {
    "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
    "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552, "eos_token_id": [151329, 151336, 151338],
}  # fmt: skip
LLAMA31_8B = COMMON | {
    "model_type": "llama", "attention_bias": False, "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rope_theta": 500000.0, "vocab_size": 128256,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
QWEN3_0B6 = COMMON | {
    "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def load(directory: Path, values: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    save_file({"anything": torch.zeros(1)}, directory / "model.safetensors")
    return ModelConfig.load(directory, EngineConfig())


@pytest.mark.parametrize(
    ("values", "moe_layers", "experts", "routing", "kv_shape"),
    [
        (MIXTRAL_8X7B, 32, 8, Routing(2, normalize=True), (2, 8, 128)),
        (QWEN15_MOE, 24, 60, Routing(4), (2, 16, 128)),
        (QWEN3_30B_FP8, 48, 128, Routing(8, normalize=True), (2, 4, 128)),
        (OLMOE_1B_7B, 16, 64, Routing(8), (2, 16, 128)),
        (DEEPSEEK_V2_LITE, 26, 64, Routing(6), (576,)),
        (DEEPSEEK_V3, 58, 256, Routing(8, "sigmoid", True, 2.5, 8, 4), (576,)),
        (GPT_OSS_20B, 24, 32, Routing(4, "topk_softmax"), (2, 8, 64)),
        (GLM45_AIR, 45, 128, Routing(8, "sigmoid", True), (2, 8, 128)),
        (LLAMA31_8B, 0, 0, None, (2, 8, 128)),
        (QWEN3_0B6, 0, 0, None, (2, 8, 128)),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_published_configs(
    tmp_path: Path,
    values: dict[str, Any],
    moe_layers: int,
    experts: int,
    routing: Routing | None,
    kv_shape: tuple[int, ...],
) -> None:
    config = load(tmp_path, values)
    assert (config.num_moe_layers, config.num_experts, config.kv_shape) == (moe_layers, experts, kv_shape)
    assert (config.mixture.routing if config.mixture else None) == routing
    assert config.num_layers == values["num_hidden_layers"]
    assert config.max_model_len == values["max_position_embeddings"]


def test_what_published_configs_say_of_attention(tmp_path: Path) -> None:
    qwen = load(tmp_path, QWEN15_MOE).attention
    assert isinstance(qwen, GroupedQueries) and qwen.qkv_bias and not qwen.out_bias
    glm = load(tmp_path, GLM45_AIR)
    assert isinstance(glm.attention, GroupedQueries) and glm.attention.qkv_bias and not glm.attention.qk_norm
    assert (glm.layers[0].rope.dim, glm.num_extra_layers, len(glm.eos_token_ids)) == (64, 1, 3)
    oss = load(tmp_path, GPT_OSS_20B)
    assert oss.windows == (128, None)
    assert oss.layers[0].rope.amplitude == pytest.approx(1.3465735902799727)
    deepseek = load(tmp_path, DEEPSEEK_V3).attention
    assert isinstance(deepseek, LatentAttention) and deepseek.interleaved
    assert deepseek.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
