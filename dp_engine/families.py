"""The model families, as data: what config.json leaves unsaid, and what tensors are called.

One decoder runs them all. A family names the config's keys that it understands; a key of another family that would
change the result is refused by name (`model_config.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dp_engine.json_file import JsonFile
from ep.routing import Routing

Rule = Callable[[JsonFile, int], bool]


@dataclass(frozen=True)
class Family:
    """Everything that sets one `model_type` apart.

    defaults: values of keys that config.json may leave out, as transformers has them.
    only: keys with the values that are understood; another value means another model.
    keys: keys, besides those that the fields below name, whose meaning the family has of its own.
    latent: attention over compressed keys and values (MLA), else grouped queries.
    qkv_bias, out_bias, mlp_bias, qk_norm: True, or the key that says whether there are such tensors.
    norm_per_head: q and k are normalised head by head, else whole.
    sliding: which layers attend to `sliding_window` tokens only, unless `layer_types` says.
    sparse: which layers are mixtures of experts.
    experts_prefix, expert_parts: an expert's tensors are `{experts_prefix}.experts.3.{part}.weight`, parts in the order
        gate, up, down. Fused ones are `mlp.experts.gate_up_proj` and `down_proj`.
    transposed: fused experts have inputs first, gate and up in turns, and biases.
    quantization: the quant_method that can be dequantised.
    """

    sparse: Rule | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    # ---- attention
    latent: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    qk_norm: bool | str = False
    norm_per_head: bool = True
    sinks: bool = False
    sliding: Rule | None = None
    partial_rotary: bool = False
    # ---- feed-forward
    mlp_bias: bool | str = False
    activation: Literal["silu", "swiglu_oai"] = "silu"
    expert_size: str = "moe_intermediate_size"
    routing: Callable[[JsonFile], Routing] | None = None
    router: str = "gate"
    router_bias: bool = False
    score_correction: bool = False
    experts_prefix: str = "mlp"
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False
    quantization: Literal["fp8", "mxfp4"] = "fp8"
    shared: str | None = None
    shared_size: Callable[[JsonFile], int] = lambda config: 0
    shared_gate: str | None = None

    def understood(self) -> frozenset[str]:
        """The keys that mean something in this family."""
        named = (self.qkv_bias, self.out_bias, self.qk_norm, self.mlp_bias)
        window = {"sliding_window"} if self.sliding else set()
        return self.keys | {key for key in named if isinstance(key, str)} | window


def _everywhere(config: JsonFile, layer: int) -> bool:
    return True


def _after_first(config: JsonFile, layer: int) -> bool:
    return layer >= config.integer("first_k_dense_replace", least=0)


def _by_step(config: JsonFile, layer: int) -> bool:
    return layer not in config.integers("mlp_only_layers") and (layer + 1) % config.integer("decoder_sparse_step") == 0


def _qwen2_window(config: JsonFile, layer: int) -> bool:
    return config.flag("use_sliding_window") and layer % 2 == 0 and layer < config.integer("max_window_layers")


def _qwen3_window(config: JsonFile, layer: int) -> bool:
    return config.flag("use_sliding_window") and layer >= config.integer("max_window_layers", least=0)


def _softmax(config: JsonFile) -> Routing:
    return Routing(config.integer("num_experts_per_tok"), normalize=config.flag("norm_topk_prob"))


def _grouped(config: JsonFile) -> dict[str, Any]:
    num_groups, topk_groups = config.integer("n_group", default=1), config.integer("topk_group", default=1)
    if topk_groups > num_groups:
        raise config.error("topk_group", f"{topk_groups} exceeds the {num_groups} groups of n_group")
    scale = config.number("routed_scaling_factor")
    return {
        "top_k": config.integer("num_experts_per_tok"),
        "scale": scale,
        "num_groups": num_groups,
        "topk_groups": topk_groups,
    }


def _deepseek_v2(config: JsonFile) -> Routing:
    rule = _grouped(config)
    if config.get("topk_method") == "greedy":
        rule |= {"num_groups": 1, "topk_groups": 1}
    return Routing(**rule)


def _sigmoid(config: JsonFile) -> Routing:
    return Routing(**_grouped(config), scoring="sigmoid", normalize=config.flag("norm_topk_prob"))


def _shared_times(config: JsonFile) -> int:
    return config.integer("n_shared_experts", default=0, least=0) * config.integer("moe_intermediate_size")


_DEEPSEEK_V2 = Family(
    sparse=_after_first,
    defaults={
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_shared_experts": 2,
        "rope_interleave": True,
    },
    only={
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": (None, "softmax"),
        "norm_topk_prob": (None, False),  # implementations do not agree what scales the weights then
        "moe_layer_freq": (None, 1),
    },
    keys=frozenset({"n_shared_experts"}),
    latent=True,
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    routing=_deepseek_v2,
    shared="shared_experts",
    shared_size=_shared_times,
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "mixtral": Family(
        sparse=_everywhere,
        sliding=lambda config, layer: config.get("sliding_window") is not None,
        expert_size="intermediate_size",
        routing=lambda config: Routing(config.integer("num_experts_per_tok"), normalize=True),
        experts_prefix="block_sparse_moe",
        expert_parts=("w1", "w3", "w2"),
    ),
    "qwen2_moe": Family(
        sparse=_by_step,
        routing=_softmax,
        defaults={"qkv_bias": True, "decoder_sparse_step": 1, "max_window_layers": 28},
        qkv_bias="qkv_bias",
        sliding=_qwen2_window,
        shared="shared_expert",
        shared_size=lambda config: config.integer("shared_expert_intermediate_size"),
        shared_gate="shared_expert_gate",
    ),
    "qwen3_moe": Family(
        sparse=_by_step,
        routing=_softmax,
        defaults={"decoder_sparse_step": 1},
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        sliding=lambda config, layer: config.flag("use_sliding_window"),
    ),
    "olmoe": Family(
        sparse=_everywhere,
        routing=_softmax,
        keys=frozenset({"clip_qkv"}),
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        norm_per_head=False,
        expert_size="intermediate_size",
    ),
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": Family(
        sparse=_after_first,
        defaults={
            "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 8,
            "topk_group": 4, "n_shared_experts": 1, "rope_interleave": True,
        },
        only={
            "topk_method": (None, "noaux_tc"),
            "scoring_func": (None, "sigmoid"),
            "moe_layer_freq": (None, 1),
        },
        keys=frozenset({"n_shared_experts"}),
        latent=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        routing=_sigmoid,
        score_correction=True,
        shared="shared_experts",
        shared_size=_shared_times,
    ),
    "gpt_oss": Family(
        sparse=_everywhere,
        defaults={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        only={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        sinks=True,
        sliding=lambda config, layer: layer % 2 == 0,
        activation="swiglu_oai",
        expert_size="intermediate_size",
        routing=lambda config: Routing(config.integer("num_experts_per_tok"), "topk_softmax"),
        router="router",
        router_bias=True,
        transposed=True,
        quantization="mxfp4",
    ),
    "glm4_moe": Family(
        sparse=_after_first,
        defaults={
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
            "partial_rotary_factor": 0.5, "n_shared_experts": 1,
        },
        only={"topk_method": (None, "noaux_tc"), "scoring_func": (None, "sigmoid")},
        keys=frozenset({"n_shared_experts"}),
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        partial_rotary=True,
        routing=_sigmoid,
        score_correction=True,
        shared="shared_experts",
        shared_size=_shared_times,
    ),
    "llama": Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "qwen3": Family(
        defaults={"max_window_layers": 28},
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        sliding=_qwen3_window,
    ),
}  # fmt: skip

# Keys that change the result where they are not null, false or zero. A family that does not understand one refuses it.
TELLING = (
    "attention_bias", "qkv_bias", "mlp_bias", "use_qk_norm", "clip_qkv", "sliding_window", "n_shared_experts",
    "vision_config", "audio_config", "text_config", "attn_logit_softcapping", "final_logit_softcapping",
    "logit_scale", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
    "attention_chunk_size", "no_rope_layers", "index_topk",
)  # fmt: skip
