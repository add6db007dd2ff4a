"""config.json of every family: what it means, and what is refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dp_engine.config import EngineConfig
from dp_engine.families import FAMILIES
from dp_engine.json_file import JsonFile, ModelConfigError
from dp_engine.layer_config import load_layers
from dp_engine.model_config import ModelConfig
from dp_engine.rope_config import RopeConfig, load_rope
from kernels.rotary import Rope, RotaryTable, inverse_frequencies

BASE = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "rope_theta": 1e4,
    "dtype": "float32",
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "num_experts": 8, "moe_intermediate_size": 16}
MLA = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
SHARED = {"shared_expert_intermediate_size": 24}


def json_file(values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> JsonFile:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(dict(values)))
        return JsonFile(path, defaults)


def rope_of(model_type: str, features: int, **values: Any) -> RopeConfig:
    family = FAMILIES[model_type]
    return load_rope(json_file(BASE | values, family.defaults), features, family)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SECTIONS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 3.0},
    YARN,
    YARN | {"attention_factor": 1.25},
    YARN | {"beta_fast": 24.0, "beta_slow": 2.0, "truncate": False},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    YARN | {"mscale": 0.7},
    YARN | {"factor": None},
    {"rope_type": "yarn", "factor": 2.0},
    LLAMA3,
    LLAMA3 | {"original_max_position_embeddings": 8192, "factor": 32.0},
]


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: "-".join(map(str, section.values())))
def test_frequencies_are_those_of_transformers(section: dict[str, Any], partial: float) -> None:
    kind = section["rope_type"]
    full = section | {"rope_theta": 1e4, "partial_rotary_factor": partial}
    config = AutoConfig.for_model("llama", hidden_size=128, num_attention_heads=2, max_position_embeddings=256)
    config.rope_parameters = dict(full)
    ours = rope_of("glm4_moe", 64, rope_parameters=full).by_type["full_attention"]
    for length in (None, 256, 257, 700) if kind == "dynamic" else (None,):
        seen = None if length is None else torch.tensor(length)
        expected, amplitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seen)
        inverse = inverse_frequencies(ours, 700)
        inverse = inverse[(length or 1) - 1] if kind == "dynamic" else inverse
        torch.testing.assert_close(inverse, expected, rtol=2e-6, atol=0)
        assert ours.amplitude == pytest.approx(amplitude)
    table = RotaryTable(ours, 300, torch.float32, torch.device("cpu"))
    cos, _ = table.at(torch.tensor([0, 255]))
    assert cos.shape == (2, 1, 64 * partial)
    torch.testing.assert_close(cos[0, 0], torch.full_like(cos[0, 0], ours.amplitude))


def test_spellings_of_rope_mean_the_same() -> None:
    newer = rope_of("llama", 64, rope_theta=None, rope_parameters=YARN | {"rope_theta": 5e5})
    older_section = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert rope_of("llama", 64, rope_theta=5e5, rope_scaling=older_section) == newer
    assert rope_of("llama", 64, rope_theta=5e5, rope_parameters=YARN, rope_scaling=older_section) == newer
    outside = {"rope_type": "yarn", "factor": 4.0}
    assert rope_of("llama", 64, rope_theta=5e5, rope_scaling=outside, original_max_position_embeddings=64) == newer


def test_how_long_a_stretched_rope_is_good_for() -> None:
    lengths = {
        "default": rope_of("llama", 8).longest,
        "linear": rope_of("llama", 8, rope_scaling={"type": "linear", "factor": 2}).longest,
        "dynamic": rope_of("llama", 8, rope_scaling={"type": "dynamic", "factor": 3}).longest,
        "yarn": rope_of("llama", 8, rope_scaling=YARN | {"factor": 8}).longest,
        "llama3": rope_of("llama", 8, rope_scaling=LLAMA3).longest,
    }
    assert lengths == {"default": 256, "linear": 512, "dynamic": 768, "yarn": 512, "llama3": 256}


def test_ropes_by_type_of_layer() -> None:
    sections = {"full_attention": YARN | {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e3}}
    config = json_file(BASE | {"rope_theta": None, "rope_parameters": sections, "sliding_window": 9})
    rope = load_rope(config, 8, FAMILIES["gpt_oss"])
    layers = load_layers(config, FAMILIES["gpt_oss"], rope, 256)
    assert [layer.rope for layer in layers[:2]] == [Rope(8, 1e3), rope.by_type["full_attention"]]
    assert layers[1].rope.kind == "yarn"


@pytest.mark.parametrize(
    ("model_type", "values", "windows"),
    [
        ("mixtral", {"sliding_window": None}, [None] * 4),
        ("mixtral", {"sliding_window": 9}, [9] * 4),
        ("qwen2_moe", {"sliding_window": 9}, [None] * 4),
        ("qwen2_moe", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, [9, None, 9, None]),
        ("qwen2_moe", {"sliding_window": 0, "layer_types": ["full_attention"] * 4}, [None] * 4),
        ("qwen3_moe", {"sliding_window": 9, "use_sliding_window": True}, [9] * 4),
        ("qwen3", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [9]),
        ("gpt_oss", {"sliding_window": 9}, [9, None, 9, None]),
        ("gpt_oss", {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"] * 2}, [None, 9] * 2),
        ("gpt_oss", {"sliding_window": 128}, [None] * 4),
        ("llama", {"layer_types": ["full_attention"] * 4}, [None] * 4),
    ],
)
def test_windows(model_type: str, values: dict[str, Any], windows: list[int | None]) -> None:
    family = FAMILIES[model_type]
    config = json_file(BASE | values, family.defaults)
    layers = load_layers(config, family, load_rope(config, 8, family), max_model_len=100)
    assert [layer.window for layer in layers] == windows


@pytest.mark.parametrize(
    ("model_type", "values", "sparse"),
    [
        ("mixtral", {}, "####"),
        ("qwen2_moe", {"mlp_only_layers": [0, 2]}, ".#.#"),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": None}, ".#.#"),
        ("olmoe", {}, "####"),
        ("deepseek_v2", {}, "####"),
        ("deepseek_v3", {}, "...#"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "..##"),
        ("llama", {}, "...."),
    ],
)
def test_which_layers_have_experts(model_type: str, values: dict[str, Any], sparse: str) -> None:
    family = FAMILIES[model_type]
    config = json_file(BASE | values, family.defaults)
    layers = load_layers(config, family, load_rope(config, 8, family), max_model_len=100)
    assert "".join(".#"[layer.sparse] for layer in layers) == sparse


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # ---- attention
    ("mixtral", {"attention_bias": True}, "attention_bias is not supported for mixtral"),
    ("llama", {"use_qk_norm": True}, "use_qk_norm is not supported for llama"),
    ("qwen3", {"clip_qkv": 8.0}, "clip_qkv is not supported for qwen3"),
    ("olmoe", MOE | {"clip_qkv": "x"}, "clip_qkv must be a positive number, not 'x'"),
    ("olmoe", MOE | {"sliding_window": 4}, "sliding_window is not supported for olmoe"),
    ("llama", {"layer_types": ["sliding_attention"] * 4}, "names sliding_attention, which is not supported for llama"),
    ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must be 4 of full_attention, sliding_attention"),
    ("gpt_oss", {"layer_types": ["linear_attention"] * 4}, "layer_types must be 4 of"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window is missing"),
    ("qwen2_moe", {"use_sliding_window": 1}, "use_sliding_window must be true or false, not 1"),
    ("deepseek_v3", MLA | MOE | {"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads, 4"),
    ("deepseek_v3", MOE | {"qk_rope_head_dim": 8}, "qk_nope_head_dim is missing"),
    ("llama", {"vision_config": {"depth": 2}}, "vision_config is not supported for llama"),
    # ---- feed-forward
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias is not supported for qwen3"),
    ("gpt_oss", {"swiglu_limit": 5.0}, r"swiglu_limit 5.0 is not supported for gpt_oss \(supported: 7.0\)"),
    ("qwen3_moe", MOE | {"n_shared_experts": 1}, "n_shared_experts is not supported for qwen3_moe"),
    ("qwen3_moe", MOE | {"mlp_only_layers": [0, "x"]}, r"mlp_only_layers must be a list of integers"),
    # ---- routing
    ("deepseek_v2", MLA | MOE | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported for deepseek_v2"),
    ("deepseek_v2", MLA | MOE | {"norm_topk_prob": True}, "norm_topk_prob True is not supported for deepseek_v2"),
    ("deepseek_v3", MLA | MOE | {"topk_method": "greedy"}, r"topk_method 'greedy' .* \(supported: noaux_tc\)"),
    ("deepseek_v3", MLA | MOE | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    ("deepseek_v2", MLA | MOE | {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
    ("glm4_moe", MOE | {"n_group": 3}, "n_group 3 does not divide the 8 experts"),
    ("glm4_moe", MOE | {"n_group": 2, "topk_group": 3}, "topk_group 3 exceeds the 2 groups"),
    ("glm4_moe", MOE | {"n_group": 8, "topk_group": 2}, "n_group 8 leaves groups of one"),
    ("glm4_moe", MOE | {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok 3 exceeds the 2"),
    ("qwen3_moe", MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8 experts"),
    ("qwen3_moe", MOE | {"num_experts": None}, "num_local_experts is missing"),
    # ---- rope
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 4}}, "rope_scaling has rope type 'longrope'"),
    ("llama", {"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_parameters has rope type \['yarn'\]"),
    ("llama", {"rope_scaling": {"type": "yarn"} | {"short_factor": [1]}}, "has short_factor, which rope type yarn"),
    ("llama", {"rope_scaling": {"mrope_section": [1]}}, "has mrope_section, which rope type default"),
    ("llama", {"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    ("llama", {"rope_scaling": {"type": "dynamic"}}, "rope_scaling of rope type dynamic has no factor"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": -1}}, r"rope_scaling.factor must be a positive number"),
    ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "llama3 has no low_freq_factor"),
    ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor 4.0, which must be below"),
    ("llama", {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "rope_parameters differ in factor"),
    ("llama", {"rope_theta": None}, "rope_theta is missing"),
    ("llama", {"rope_theta": 1e5, "rope_parameters": {"rope_theta": 1e6}}, "names rope_theta 1000000.0 but rope_theta"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ("glm4_moe", MOE | {"partial_rotary_factor": 0.4}, "head_dim 3 rotated features are odd"),
    ("gpt_oss", {"rope_parameters": {"full_attention": {}, "rope_type": "yarn"}}, "mixes layer types with"),
    ("gpt_oss", {"sliding_window": 4, "rope_parameters": {"full_attention": {}}}, "nothing of layers of type"),
    # ---- quantisation
    ("mixtral", {"quantization_config": {"quant_method": "awq"}}, r"quant_method 'awq', which .*\(supported: fp8\)"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, r"'fp8', which .* gpt_oss \(supported: mxfp4\)"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "has no weight_block_size"),
    ("llama", {"quantization_config": "int4"}, "has quant_method 'int4'"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "values", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, model_type: str, values: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"model_type": model_type} | SHARED | values))
    with pytest.raises(ModelConfigError, match=words) as caught:
        ModelConfig.load(tmp_path, EngineConfig())
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in str(caught.value)
