"""What a checkpoint's config.json says, read without transformers (whose import takes longer than our start)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dp_engine.attention_config import (
    GroupedQueries,
    LatentAttention,
    head_dim,
    load_grouped_queries,
    load_latent_attention,
)
from dp_engine.checkpoint import Checkpoint
from dp_engine.config import EngineConfig
from dp_engine.families import FAMILIES, TELLING, Family
from dp_engine.json_file import JsonFile, ModelConfigError
from dp_engine.layer_config import LayerConfig, Mixture, load_layers, load_mixture
from dp_engine.rope_config import RopeConfig, load_rope

__all__ = ["ModelConfig", "ModelConfigError"]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


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
        rope = load_rope(config, config.integer("qk_rope_head_dim") if latent else head_dim(config), family)
        max_model_len = _max_model_len(config, rope, engine)
        layers = load_layers(config, family, rope, max_model_len)
        return cls(
            model_type=config.values["model_type"],
            family=family,
            vocab_size=config.integer("vocab_size"),
            hidden_size=config.integer("hidden_size"),
            dense_size=0 if all(layer.sparse for layer in layers) else config.integer("intermediate_size"),
            layers=layers,
            attention=load_latent_attention(config, family, rope) if latent else load_grouped_queries(config, family),
            mixture=load_mixture(config, family) if any(layer.sparse for layer in layers) else None,
            mlp_bias=config.flag(family.mlp_bias),
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
    _check_quantization(config, family)
    return config, family


def _check_quantization(config: JsonFile, family: Family) -> None:
    """What can be dequantised while loading passes."""
    section = config.get("quantization_config")
    if section is None:
        return
    method = section.get("quant_method") if isinstance(section, dict) else section
    if method != family.quantization:
        supported = f"which is not supported for {config.get('model_type')} (supported: {family.quantization})"
        raise config.error("quantization_config", f"has quant_method {method!r}, {supported}")
    if method == "fp8" and not section.get("weight_block_size"):
        raise config.error("quantization_config", "has no weight_block_size; fp8 is supported in blocks only")


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
