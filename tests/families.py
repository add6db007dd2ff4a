"""Small random checkpoints of every family, written by `transformers` itself, one per variant of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

VOCAB, EXPERTS = 160, 6
LENGTH = 64  # max_position_embeddings; longer texts are those of stretched ropes


@dataclass(frozen=True)
class Kind:
    """A checkpoint: its config beyond what all have, and whether tensors are named as in memory (`fused`). `longest`:
    prompts beyond it are not computed as by transformers."""

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    fused: bool = False
    longest: int = LENGTH


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK_YARN = YARN | {"mscale": 0.8, "mscale_all_dim": 0.9, "beta_fast": 16.0, "beta_slow": 1.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_routed_experts": EXPERTS, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
}  # fmt: skip
QWEN = {"num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GLM = {
    "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
    "head_dim": 12, "partial_rotary_factor": 0.5,
}  # fmt: skip

KINDS: dict[str, Kind] = {
    "mixtral": Kind("mixtral", {"num_local_experts": EXPERTS}),
    "mixtral-window": Kind("mixtral", {"num_local_experts": EXPERTS, "sliding_window": 9}, fused=True),
    "qwen2-moe": Kind(
        "qwen2_moe",
        QWEN | {"shared_expert_intermediate_size": 28, "num_hidden_layers": 3, "mlp_only_layers": [1]},
        {"rope_type": "linear", "factor": 2.0},
    ),
    "qwen2-moe-window": Kind(
        "qwen2_moe",
        QWEN | {
            "shared_expert_intermediate_size": 28, "norm_topk_prob": True, "use_sliding_window": True,
            "sliding_window": 5, "max_window_layers": 2, "num_hidden_layers": 3, "decoder_sparse_step": 2,
        },
        fused=True,
    ),
    "qwen3-moe": Kind("qwen3_moe", QWEN | {"head_dim": 12, "norm_topk_prob": True, "tie_word_embeddings": True}, YARN),
    "qwen3-moe-window": Kind(
        "qwen3_moe",
        QWEN | {"head_dim": 12, "attention_bias": True, "use_sliding_window": True, "sliding_window": 7},
        fused=True,
    ),
    "olmoe": Kind("olmoe", {"num_experts": EXPERTS, "num_experts_per_tok": 3, "clip_qkv": 1.5}),
    "olmoe-normed": Kind(
        "olmoe", {"num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True}
    ),
    "deepseek-v2": Kind("deepseek_v2", MLA | {"n_shared_experts": 2, "routed_scaling_factor": 1.7}, DEEPSEEK_YARN),
    "deepseek-v2-groups": Kind(
        "deepseek_v2",
        MLA | {
            "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "n_shared_experts": 1,
            "q_lora_rank": None, "attention_bias": True, "mlp_bias": True,
        },
        fused=True,
    ),
    "deepseek-v3": Kind(
        "deepseek_v3", MLA | {"n_group": 2, "topk_group": 1, "attention_bias": True}, DEEPSEEK_YARN
    ),
    "deepseek-v3-plain": Kind(
        "deepseek_v3",
        MLA | {
            "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False, "q_lora_rank": None,
            "first_k_dense_replace": 0, "n_shared_experts": 2,
        },
        fused=True,
    ),
    "gpt-oss": Kind(
        "gpt_oss",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 3, "head_dim": 12, "sliding_window": 6},
        YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    ),
    "glm4-moe": Kind(
        "glm4_moe", GLM | {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5}
    ),
    "glm4-moe-groups": Kind("glm4_moe", GLM | {"n_group": 3, "topk_group": 2, "norm_topk_prob": False}, fused=True),
    "llama": Kind("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, LLAMA3),
    "llama-dynamic": Kind(
        "llama", {"max_position_embeddings": 20}, {"rope_type": "dynamic", "factor": 4.0}, longest=20
    ),
    "qwen3": Kind("qwen3", {"head_dim": 12, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
}  # fmt: skip


def write_family(directory: Path, kind: Kind, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Write the checkpoint and return the model as transformers runs it. The same arguments give the same weights."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "bos_token_id": 0,
        "eos_token_id": 1, "tie_word_embeddings": False, "attn_implementation": "eager",
    }  # fmt: skip
    config = AutoConfig.for_model(
        kind.model_type, **common | dict(kind.config), rope_parameters={"rope_theta": 1000.0, **kind.rope}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            _initialize(name, weight)
    model.to(dtype).eval()
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=None)
    model.save_pretrained(directory)
    if kind.fused:
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return model


def _initialize(name: str, weight: torch.Tensor) -> None:
    """Strong enough that every part of the model shows in the logits, and the best token far from the second."""
    if "inv_freq" in name:
        return
    if "norm" in name:
        weight.uniform_(0.5, 1.5)
    elif name.endswith("e_score_correction_bias"):
        weight.normal_(std=0.1)
    elif name.endswith(("bias", "sinks")):
        weight.normal_(std=0.5)
    else:
        gain = {"gate.weight": 2.0, "router.weight": 2.0, "embed_tokens.weight": 6.0, "lm_head.weight": 3.0}
        scale = next((value for part, value in gain.items() if name.endswith(part)), 1.2)
        weight.normal_(std=scale * weight.shape[-1] ** -0.5)
