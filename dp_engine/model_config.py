"""What a checkpoint's config.json says, read without transformers (whose import takes longer than our start)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dp_engine.checkpoint import Checkpoint
from dp_engine.config import EngineConfig

SUPPORTED = ("mixtral",)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class ModelConfigError(ValueError):
    """A model that cannot be run; the message is one line and names the file and the key."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder as it is run here: the checkpoint's, with the engine's settings applied.

    max_model_len: longest sequence in tokens. digest: of the checkpoint, equal on all ranks that see the same files.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    max_model_len: int
    digest: str

    @classmethod
    def load(cls, model_dir: Path, engine: EngineConfig) -> "ModelConfig":
        """Read config.json, for the end-of-sequence ids generation_config.json, and for the digest the headers of the
        weights. Raises ModelConfigError, and CheckpointError for weights that are not whole."""
        if not model_dir.is_dir():
            raise ModelConfigError(f"model directory {model_dir} does not exist")
        path = model_dir / "config.json"
        if not path.is_file():
            raise ModelConfigError(f"model directory {model_dir} has no config.json")
        config = _Json(path)
        model_type = config.values.get("model_type")
        if model_type not in SUPPORTED:
            raise config.error("model_type", f"{model_type!r} is not supported (supported: {', '.join(SUPPORTED)})")
        activation = config.values.get("hidden_act", "silu")
        if activation != "silu":
            raise config.error("hidden_act", f"{activation!r} is not supported, only silu")
        return cls(
            model_type=model_type,
            vocab_size=config.integer("vocab_size"),
            intermediate_size=config.integer("intermediate_size"),
            num_layers=config.integer("num_hidden_layers"),
            **_heads(config),
            **_experts(config),
            rms_norm_eps=config.number("rms_norm_eps"),
            rope_theta=_rope_theta(config),
            tie_word_embeddings=bool(config.values.get("tie_word_embeddings", False)),
            eos_token_ids=_eos_token_ids(config, model_dir / "generation_config.json"),
            dtype=_dtype(config, engine),
            max_model_len=_max_model_len(config, engine),
            digest=Checkpoint(model_dir).digest(),
        )


class _Json:
    """A JSON object from a file; every complaint names the file and the key."""

    def __init__(self, path: Path):
        self.path = path
        try:
            loaded = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelConfigError(f"cannot read {path}: {error.strerror or error}") from None
        except ValueError as error:
            raise ModelConfigError(f"{path} is not JSON: {error}") from None
        if not isinstance(loaded, dict):
            raise ModelConfigError(f"{path} must hold a JSON object, not {type(loaded).__name__}")
        self.values: dict[str, Any] = loaded

    def error(self, key: str, problem: str) -> ModelConfigError:
        return ModelConfigError(f"{self.path}: {key} {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"must be a positive integer, not {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if value is None:
            raise self.error(key, "is missing")
        return self.positive(key, value)

    def positive(self, key: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(key, f"must be a positive number, not {value!r}")
        return float(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise self.error(key, f"must be a token id or a list of them, not {value!r}")
        return tuple(ids)


def _heads(config: _Json) -> dict[str, int]:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.error("num_attention_heads", f"{heads} is no multiple of num_key_value_heads {kv_heads}")
    if config.values.get("head_dim") is None and hidden % heads:
        raise config.error("head_dim", f"is missing and hidden_size {hidden} is no multiple of {heads} attention heads")
    head_dim = config.integer("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise config.error("head_dim", f"{head_dim} is odd, so positions cannot be rotated into it")
    return {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _experts(config: _Json) -> dict[str, int]:
    experts = config.integer("num_experts" if "num_experts" in config.values else "num_local_experts")
    top_k = config.integer("num_experts_per_tok")
    if top_k > experts:
        raise config.error("num_experts_per_tok", f"{top_k} exceeds the {experts} experts")
    return {"num_experts": experts, "top_k": top_k}


def _dtype(config: _Json, engine: EngineConfig) -> torch.dtype:
    named = config.values.get("dtype") or config.values.get("torch_dtype") or "float32"
    if engine.dtype == "auto" and named not in DTYPES:
        raise config.error("dtype", f"{named} is not supported; set engine.dtype to bfloat16 or float32")
    return DTYPES[named if engine.dtype == "auto" else engine.dtype]


def _max_model_len(config: _Json, engine: EngineConfig) -> int:
    longest = config.integer("max_position_embeddings")
    length = engine.max_model_len or longest
    if length > longest:
        raise config.error("max_position_embeddings", f"{longest} is less than engine.max_model_len {length}")
    if config.values.get("sliding_window") is not None:
        window = config.integer("sliding_window")
        if window < length:
            problem = f"{window} is shorter than sequences may be, which is not supported"
            raise config.error("sliding_window", f"{problem}; set engine.max_model_len to at most {window}")
    return length


def _rope_theta(config: _Json) -> float:
    """theta from `rope_parameters` (transformers 5) or `rope_theta` (older). Never guessed; other types are refused."""
    older = config.values.get("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        section = config.values.get(key)
        if section is None:
            continue
        if not isinstance(section, dict):
            raise config.error(key, f"must be an object, not {section!r}")
        kind = section.get("rope_type", section.get("type", "default"))
        if kind != "default":
            raise config.error(key, f"has rope type {kind!r}, which is not supported (supported: default)")
        if section.get("partial_rotary_factor", 1) != 1:
            raise config.error(key, "has a partial_rotary_factor, which is not supported")
        newer = section.get("rope_theta")
        if newer is not None and older is not None and newer != older:
            raise config.error(key, f"names rope_theta {newer} but rope_theta itself is {older}")
        older = older if newer is None else newer
    if older is None:
        raise config.error("rope_theta", "is missing (neither rope_parameters nor rope_theta names it)")
    return config.positive("rope_theta", older)


def _eos_token_ids(config: _Json, generation: Path) -> tuple[int, ...]:
    """generation_config.json decides if it names any, as in transformers."""
    named = _Json(generation).token_ids("eos_token_id") if generation.is_file() else ()
    return named or config.token_ids("eos_token_id")
