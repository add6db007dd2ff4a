"""Tensors of every family: layouts, experts by placement, what is missing and what is skipped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dp_engine.checkpoint import SINGLE, Checkpoint, CheckpointError
from dp_engine.config import EngineConfig
from dp_engine.model_config import ModelConfig
from dp_engine.models.decoder import Decoder
from dp_engine.mxfp4 import dequantize
from ep.dispatch import CPU
from ep.placement import ExpertPlacement, Placements
from tests.families import EXPERTS, KINDS, write_family
from tests.unit.test_checkpoint import NoDispatcher, edit, rewrite

# Two ranks; layers differ, and in the second one a copy of expert 0 is on either rank.
PLACED = (
    ExpertPlacement(EXPERTS, (2, 4), (5, 0, 1, 2, 3, 4)),
    ExpertPlacement(EXPERTS, (3, 4), (0, 2, 4, 1, 3, 5, 0)),
    ExpertPlacement(EXPERTS, (6, 0), (0, 1, 2, 3, 4, 5)),
)


def load(directory: Path, rank: int = 0, world_size: int = 1) -> tuple[Decoder, list[str]]:
    config = ModelConfig.load(directory, EngineConfig())
    count = config.num_moe_layers
    placements = Placements.contiguous(count, EXPERTS, 1) if world_size == 1 else Placements(PLACED[:count])
    lines: list[str] = []
    return Decoder(config, Checkpoint(directory), NoDispatcher(placements, rank, CPU), lines.append), lines


def sums(weights: list[Tensor | None]) -> list[float]:
    return [0.0 if tensor is None else tensor.double().sum().item() for tensor in weights]


FAMILIES_OF_EXPERTS = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v2", "deepseek-v3", "glm4-moe")


@pytest.mark.parametrize("name", [*FAMILIES_OF_EXPERTS, "gpt-oss"])
@pytest.mark.parametrize("fused", [False, True])
def test_every_rank_has_the_experts_of_its_placement(tmp_path: Path, name: str, fused: bool) -> None:
    """By checksum, slot by slot, against the model that wrote the checkpoint."""
    theirs = write_family(tmp_path, replace(KINDS[name], fused=fused)).state_dict()
    prefixes = [key.removesuffix("gate_up_proj") for key in theirs if key.endswith("experts.gate_up_proj")]
    assert (f"{prefixes[0]}gate_up_proj" in Checkpoint(tmp_path)) == (fused or name == "gpt-oss")
    for rank in range(2):
        model, _ = load(tmp_path, rank, 2)
        assert len(model.moe_layers) == len(prefixes)
        for layer, prefix in zip(model.moe_layers, prefixes, strict=True):
            owned = PLACED[layer.layer].local_experts(rank)
            for slot, expert in enumerate(owned):
                gate_up, down = (theirs[f"{prefix}{part}"][expert] for part in ("gate_up_proj", "down_proj"))
                gate, up = (gate_up.T[::2], gate_up.T[1::2]) if name == "gpt-oss" else gate_up.chunk(2)
                ours = layer.experts.weights(slot)
                assert sums([ours.gate, ours.up, ours.down]) == sums([gate, up, down])
            assert len(layer.experts.experts) == len(owned)


def packed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A GPT-OSS checkpoint with random experts in MXFP4."""
    generator = torch.Generator().manual_seed(0)
    result = {}
    for name, tensor in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            result[name] = tensor
            continue
        count, inputs, outputs = tensor.shape
        shape = count, outputs, inputs // 32
        result[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        result[f"{name}_scales"] = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
    return result


def test_mxfp4_is_dequantised_as_in_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    kind = KINDS["gpt-oss"]
    write_family(tmp_path, replace(kind, config={**kind.config, "intermediate_size": 64}))
    tensors = packed(load_file(tmp_path / SINGLE))
    save_file(tensors, tmp_path / SINGLE)
    edit(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4"})
    model, lines = load(tmp_path, 1, 2)
    assert "skipped" not in lines[-1]
    for layer in model.moe_layers:
        prefix = f"model.layers.{layer.layer}.mlp.experts."
        gate_up, down = (
            convert_moe_packed_tensors(
                tensors[f"{prefix}{part}_blocks"], tensors[f"{prefix}{part}_scales"], dtype=torch.float32
            )
            for part in ("gate_up_proj", "down_proj")
        )
        for slot, expert in enumerate(PLACED[layer.layer].local_experts(1)):
            ours = layer.experts.weights(slot)
            assert torch.equal(ours.gate, gate_up[expert].T[::2])
            assert torch.equal(ours.up, gate_up[expert].T[1::2])
            assert torch.equal(ours.down, down[expert].T)
    rewrite(tmp_path / SINGLE, drop="model.layers.1.mlp.experts.down_proj_scales")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj_scales is missing"):
        load(tmp_path, 0, 2)


def test_mxfp4_by_hand() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, :2] = torch.tensor([0x72, 0x9F])  # 1.0, 6.0, -6.0, -0.5
    assert dequantize(blocks, torch.tensor([[128]], dtype=torch.uint8))[0, :5].tolist() == [2.0, 12.0, -12.0, -1.0, 0.0]


MISSING = [
    ("qwen2-moe", "model.layers.0.self_attn.q_proj.bias"),
    ("qwen2-moe", "model.layers.1.mlp.gate_proj.weight"),
    ("qwen2-moe", "model.layers.2.mlp.shared_expert_gate.weight"),
    ("qwen3-moe", "model.layers.1.self_attn.k_norm.weight"),
    ("qwen3-moe", "model.layers.1.mlp.experts.4.up_proj.weight"),
    ("deepseek-v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("deepseek-v3", "model.layers.1.mlp.shared_experts.up_proj.weight"),
    ("deepseek-v3", "model.layers.0.self_attn.kv_a_layernorm.weight"),
    ("deepseek-v3", "model.layers.0.self_attn.q_a_proj.bias"),
    ("gpt-oss", "model.layers.1.self_attn.sinks"),
    ("gpt-oss", "model.layers.0.mlp.router.bias"),
    ("gpt-oss", "model.layers.0.mlp.experts.gate_up_proj_bias"),
    ("llama", "model.layers.1.mlp.down_proj.bias"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    names = {name for name, _ in MISSING}
    for name in names:
        write_family(base / name, KINDS[name])
    return {name: base / name for name in names}


@pytest.mark.parametrize(("name", "tensor"), MISSING)
def test_a_missing_tensor_is_named(written: dict[str, Path], tmp_path: Path, name: str, tensor: str) -> None:
    tensors = load_file(written[name] / SINGLE)
    del tensors[tensor]
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_bytes((written[name] / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=f"{SINGLE}: tensor {tensor} is missing"):
        load(tmp_path)


def test_layers_that_guess_further_tokens_are_skipped(written: dict[str, Path], tmp_path: Path) -> None:
    source = written["deepseek-v3"]
    extra = {f"model.layers.2.{name}.weight": torch.zeros(3) for name in ("eh_proj", "mlp.experts.0.up_proj")}
    save_file(load_file(source / SINGLE) | extra, tmp_path / SINGLE)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    for key in ("num_mtp_layers", "num_nextn_predict_layers"):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert (
        "skipped 2 tensors that the model does not use: 2 of layer 2, which guesses further tokens"
        in load(tmp_path)[1][-1]
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is of layer 2, but config\.json names 2 layers"):
        load(tmp_path)


def test_dense_models_have_no_layer_of_experts(written: dict[str, Path]) -> None:
    model, lines = load(written["llama"])
    assert model.moe_layers == []
    assert model.config.num_experts == 0
    assert lines[-1] == "loaded layer 2 of 2"
