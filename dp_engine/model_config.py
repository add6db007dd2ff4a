"""What a checkpoint's config.json says, read without transformers (whose import takes longer than our start)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dp_engine.checkpoint import Checkpoint
from dp_engine.config import EngineConfig
from dp_engine.families import FAMILIES, TELLING, Family
from dp_engine.json_file import JsonFile, ModelConfigError
from dp_engine.rope_config import LAYER_TYPES, RopeConfig, load_rope
from ep.routing import Routing
from kernels.rotary import Rope

__all__ = ["ModelConfig", "ModelConfigError"]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class GroupedQueries:
    """Attention in which groups of query heads share a key and value head. qk_norm: of q and k before the rotation,
    over a head or over all of them. clip: q, k and v stay within +-clip."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    clip: float | None

    @property
    def kv_shape(self) -> tuple[int, ...]:
        return 2, self.num_kv_heads, self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Attention over keys and values that are kept as one latent vector of kv_rank, and a rotated key of rope_dim that
    all heads share. q_rank: None when queries are not compressed. interleaved: the checkpoint has the two features of a
    rotated pair side by side. scale: of the scores."""

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool
    interleaved: bool
    scale: float

    @property
    def kv_shape(self) -> tuple[int, ...]:
        return (self.kv_rank + self.rope_dim,)


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer. shared_size: of the network that every token goes through besides, 0 if there is none."""

    num_experts: int
    size: int
    routing: Routing
    shared_size: int


@dataclass(frozen=True)
class LayerConfig:
    """What may differ between layers. window: tokens that are attended to, None for all; sparse: it has experts."""

    window: int | None
    rope: Rope
    sparse: bool


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder as it is run here: the checkpoint's, with the engine's settings applied.

    dense_size: intermediate size of layers without experts. num_extra_layers: layers behind the last that guess further
    tokens, which are not loaded. max_model_len: longest sequence in tokens. digest: of the checkpoint, equal on all
    ranks that see the same files.
    """

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    dense_size: int
    layers: tuple[LayerConfig, ...]
    attention: GroupedQueries | LatentAttention
    mixture: Mixture | None
    mlp_bias: bool
    rms_norm_eps: float
    tie_word_embeddings: bool
    num_extra_layers: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    max_model_len: int
    batch_invariant: bool
    digest: str

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_moe_layers(self) -> int:
        return sum(layer.sparse for layer in self.layers)

    @property
    def num_experts(self) -> int:
        """Of every MoE layer; 0 in a dense model."""
        return self.mixture.num_experts if self.mixture else 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows that layers have."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """What the cache of a layer holds of a token."""
        return self.attention.kv_shape

    @classmethod
    def load(cls, model_dir: Path, engine: EngineConfig) -> "ModelConfig":
        """Read config.json, for the end-of-sequence ids generation_config.json, and for the digest the headers of the
        weights. Raises ModelConfigError, and CheckpointError for weights that are not whole."""
        config, family = _open(model_dir)
        latent = family.latent
        rope = load_rope(config, config.integer("qk_rope_head_dim") if latent else _head_dim(config), family)
        max_model_len = _max_model_len(config, rope, engine)
        layers = _layers(config, family, rope, max_model_len)
        return cls(
            model_type=config.values["model_type"],
            family=family,
            vocab_size=config.integer("vocab_size"),
            hidden_size=config.integer("hidden_size"),
            dense_size=0 if all(layer.sparse for layer in layers) else config.integer("intermediate_size"),
            layers=layers,
            attention=_latent_attention(config, family, rope) if latent else _grouped_queries(config, family),
            mixture=_mixture(config, family) if any(layer.sparse for layer in layers) else None,
            mlp_bias=_has(config, family.mlp_bias),
            rms_norm_eps=config.number("rms_norm_eps"),
            tie_word_embeddings=config.flag("tie_word_embeddings"),
            num_extra_layers=max(
                config.integer(key, default=0, least=0) for key in ("num_nextn_predict_layers", "num_mtp_layers")
            ),
            eos_token_ids=_eos_token_ids(config, model_dir / "generation_config.json"),
            dtype=_dtype(config, engine),
            max_model_len=max_model_len,
            batch_invariant=engine.batch_invariant,
            digest=Checkpoint(model_dir).digest(),
        )


def _open(model_dir: Path) -> tuple[JsonFile, Family]:
    """config.json and its family; everything in it that we would get wrong is refused here."""
    if not model_dir.is_dir():
        raise ModelConfigError(f"model directory {model_dir} does not exist")
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelConfigError(f"model directory {model_dir} has no config.json")
    config = JsonFile(path)
    model_type = config.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise config.error("model_type", f"{model_type!r} is not supported (supported: {', '.join(FAMILIES)})")
    family = FAMILIES[model_type]
    config.defaults = family.defaults
    activation = config.values.get("hidden_act", "silu")
    if activation != "silu":
        raise config.error("hidden_act", f"{activation!r} is not supported, only silu")
    for key in TELLING:
        if config.values.get(key) and key not in family.understood():
            raise config.error(key, f"is not supported for {model_type}")
    for key, values in family.only.items():
        if (value := config.get(key)) not in values:
            supported = ", ".join(str(value) for value in values if value is not None)
            raise config.error(key, f"{value!r} is not supported for {model_type} (supported: {supported})")
    _check_quantization(config)
    return config, family


def _check_quantization(config: JsonFile) -> None:
    """Blocks of fp8 with a scale each are dequantised while loading; nothing else is."""
    section = config.get("quantization_config")
    if section is None:
        return
    method = section.get("quant_method") if isinstance(section, dict) else section
    if method != "fp8":
        raise config.error("quantization_config", f"has quant_method {method!r}, which is not supported (only fp8)")
    if not section.get("weight_block_size"):
        raise config.error("quantization_config", "has no weight_block_size; fp8 is supported in blocks only")


def _has(config: JsonFile, tensors: bool | str) -> bool:
    return config.flag(tensors) if isinstance(tensors, str) else tensors


def _head_dim(config: JsonFile) -> int:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if config.values.get("head_dim") is None and hidden % heads:
        raise config.error("head_dim", f"is missing and hidden_size {hidden} is no multiple of {heads} attention heads")
    return config.integer("head_dim", default=hidden // heads)


def _grouped_queries(config: JsonFile, family: Family) -> GroupedQueries:
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.error("num_attention_heads", f"{heads} is no multiple of num_key_value_heads {kv_heads}")
    return GroupedQueries(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config),
        qkv_bias=_has(config, family.qkv_bias),
        out_bias=_has(config, family.out_bias),
        qk_norm=_has(config, family.qk_norm),
        clip=None if config.get("clip_qkv") is None else config.number("clip_qkv"),
    )


def _latent_attention(config: JsonFile, family: Family, rope: RopeConfig) -> LatentAttention:
    heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", default=heads) != heads:
        raise config.error("num_key_value_heads", f"must be num_attention_heads, {heads}, with latent attention")
    nope, rotated = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    return LatentAttention(
        num_heads=heads,
        q_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=config.integer("v_head_dim"),
        bias=_has(config, family.qkv_bias),
        interleaved=config.flag("rope_interleave"),
        scale=(nope + rotated) ** -0.5 * rope.mscale**2,
    )


def _mixture(config: JsonFile, family: Family) -> Mixture:
    assert family.routing is not None
    named = next((key for key in EXPERT_COUNTS if config.values.get(key) is not None), EXPERT_COUNTS[0])
    experts, routing = config.integer(named), family.routing(config)
    if routing.top_k > experts:
        raise config.error("num_experts_per_tok", f"{routing.top_k} exceeds the {experts} experts")
    if experts % routing.num_groups:
        raise config.error("n_group", f"{routing.num_groups} does not divide the {experts} experts")
    reachable = experts // routing.num_groups * routing.topk_groups
    if routing.top_k > reachable:
        raise config.error("num_experts_per_tok", f"{routing.top_k} exceeds the {reachable} of topk_group groups")
    if routing.num_groups > 1 and routing.scoring == "sigmoid" and experts // routing.num_groups < 2:
        raise config.error("n_group", f"{routing.num_groups} leaves groups of one of the {experts} experts")
    return Mixture(experts, config.integer(family.expert_size), routing, family.shared_size(config))


def _layers(config: JsonFile, family: Family, rope: RopeConfig, max_model_len: int) -> tuple[LayerConfig, ...]:
    count = config.integer("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        sliding = [family.sliding is not None and family.sliding(config, layer) for layer in range(count)]
        kinds = [LAYER_TYPES[slides] for slides in sliding]
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in LAYER_TYPES for kind in kinds):
        raise config.error("layer_types", f"must be {count} of {', '.join(LAYER_TYPES)}, not {kinds!r}")
    if LAYER_TYPES[1] in kinds and family.sliding is None:
        raise config.error(
            "layer_types", f"names {LAYER_TYPES[1]}, which is not supported for {config.get('model_type')}"
        )
    if missing := set(kinds) - set(rope.by_type):
        raise config.error("rope_parameters", f"says nothing of layers of type {', '.join(sorted(missing))}")
    layers = []
    for layer, kind in enumerate(kinds):
        window = config.integer("sliding_window") if kind == LAYER_TYPES[1] else max_model_len
        sparse = family.sparse is not None and family.sparse(config, layer)
        layers.append(LayerConfig(window if window < max_model_len else None, rope.by_type[kind], sparse))
    return tuple(layers)


def _dtype(config: JsonFile, engine: EngineConfig) -> torch.dtype:
    named: Any = config.get("dtype") or config.get("torch_dtype") or "float32"
    if engine.dtype == "auto" and named not in DTYPES:
        raise config.error("dtype", f"{named} is not supported; set engine.dtype to bfloat16 or float32")
    return DTYPES[named if engine.dtype == "auto" else engine.dtype]


def _max_model_len(config: JsonFile, rope: RopeConfig, engine: EngineConfig) -> int:
    trained = config.integer("max_position_embeddings")
    length = engine.max_model_len or trained
    if length > rope.longest:
        raise config.error("max_position_embeddings", f"{rope.longest} is less than engine.max_model_len {length}")
    return length


def _eos_token_ids(config: JsonFile, generation: Path) -> tuple[int, ...]:
    """generation_config.json decides if it names any, as in transformers."""
    named = JsonFile(generation).token_ids("eos_token_id") if generation.is_file() else ()
    return named or config.token_ids("eos_token_id")
