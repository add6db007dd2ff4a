"""A GGUF as a model directory: config, tokenizer and a link to the file, in the user's cache."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from dp_engine.gguf_file import GgufError
from dp_engine.gguf_llama import LlamaGguf
from dp_engine.index import GGUF
from kernels.native import cache_dir
from launcher.building import Report, exclusive
from launcher.gguf_tokenizer import write_tokenizer

FORMAT = 1  # rises when what is written changes, so that older directories are made anew
_KEPT_LENGTH = 16  # of the digest in the directory's name


def model_directory(gguf: Path, progress: Report) -> Path:
    """The directory of this file as it is now, made first if it is not there. Raises GgufError.

    Its name has the file's path, size and time of change in it, so that another file at the same path gets another one.
    The weights stay where they are.
    """
    gguf = gguf.resolve()
    try:
        stat = gguf.stat()
        stamp = json.dumps([FORMAT, str(gguf), stat.st_size, stat.st_mtime_ns]).encode()
        digest = hashlib.sha256(stamp).hexdigest()[:_KEPT_LENGTH]
        target = cache_dir() / "gguf" / digest / gguf.stem
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target.parent / ".lock", progress):
            if not target.is_dir():
                _make(gguf, target)
    except OSError as error:
        raise GgufError(f"cannot make a model directory of {gguf}: {error.strerror or error}") from None
    return target


def _make(gguf: Path, target: Path) -> None:
    model = LlamaGguf(gguf)
    work = target.parent / ".partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        (work / "config.json").write_text(json.dumps(llama_config(model), indent=2) + "\n")
        (work / "generation_config.json").write_text(json.dumps(generation_config(model.fields), indent=2) + "\n")
        write_tokenizer(model.fields, work)
        (work / GGUF).symlink_to(gguf)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def llama_config(model: LlamaGguf) -> dict[str, Any]:
    """config.json. Raises GgufError for rope variants whose parameters the metadata does not have."""
    heads = int(model["llama.attention.head_count"])
    head_dim = int(model.fields.get("llama.attention.key_length", model.hidden_size // heads))
    if (rotated := int(model.fields.get("llama.rope.dimension_count", head_dim))) != head_dim:
        raise GgufError(f"{model.path}: llama.rope.dimension_count {rotated} is not the heads' size {head_dim}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model["llama.feed_forward_length"],
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": model.fields.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": model["llama.context_length"],
        "rope_parameters": _rope(model),
        "rms_norm_eps": round(float(model["llama.attention.layer_norm_rms_epsilon"]), 12),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.tied,
        "vocab_size": model.shape("token_embd.weight")[0],
        "torch_dtype": "float32" if model.tensors["blk.0.ffn_down.weight"].kind.name == "F32" else "bfloat16",
        **generation_config(model.fields),
    }


def _rope(model: LlamaGguf) -> dict[str, Any]:
    theta = float(model.fields.get("llama.rope.freq_base", 10000.0))  # llama.cpp's default
    kind = model.fields.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(model["llama.rope.scaling.factor"])}
    raise GgufError(f"{model.path}: llama.rope.scaling.type {kind!r} is not supported, only none and linear")


def generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The special tokens that the metadata names."""
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = [token for token in dict.fromkeys((ids["eos"], ids["eot"])) if token is not None]
    named = {"bos_token_id": ids["bos"], "eos_token_id": ends or None, "pad_token_id": ids["padding"]}
    return {name: token for name, token in named.items() if token is not None}
