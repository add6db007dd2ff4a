"""Weights in fp8 with scales per block: values against torch's own arithmetic, and all that may be missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dp_engine.checkpoint import SINGLE, Checkpoint, CheckpointError
from dp_engine.fp8 import dequantize, to_float

BLOCK = (4, 8)
CONFIG: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)}}


def quantized(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights in fp8, their scales, and what they stand for in fp32."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    *stack, rows, columns = shape
    scale = torch.rand(*stack, -(-rows // BLOCK[0]), -(-columns // BLOCK[1]), generator=generator) + 0.01
    wide = scale.repeat_interleave(BLOCK[0], -2)[..., :rows, :].repeat_interleave(BLOCK[1], -1)[..., :columns]
    return weight, scale, weight.float() * wide


def test_every_code_is_what_torch_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    assert torch.equal(to_float(finite), finite.float())
    assert to_float(codes.view(torch.float8_e4m3fn)).isnan().sum() == 2


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.integers(1, 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_blocks_may_be_cut_off(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight, scale, expected = quantized(rows, columns)
    assert torch.equal(dequantize(weight, scale, BLOCK, dtype), expected.to(dtype))


def test_strips_of_a_large_matrix_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_engine.fp8._STRIP_ELEMENTS", 100)
    weight, scale, expected = quantized(41, 9)
    assert torch.equal(dequantize(weight, scale, BLOCK, torch.float32), expected)


def test_it_is_what_transformers_makes_of_it() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scale, _ = quantized(16, 24)
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.bfloat16)
    assert torch.equal(dequantize(weight, scale, BLOCK, torch.bfloat16), theirs)


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file(tensors, folder / SINGLE)
    return Checkpoint(folder)


def test_scales_go_with_their_weights(tmp_path: Path) -> None:
    names = [f"model.layers.0.mlp.{part}.weight" for part in ("own", "foreign", "skipped")]
    made = {name: quantized(10, 12, seed=seed) for seed, name in enumerate(names)}
    stack = quantized(3, 10, 12)
    tensors = {"experts.up_proj": stack[0], "experts.up_proj_scale_inv": stack[1]}
    for name, (weight, scale, _) in made.items():
        tensors |= {name: weight, f"{name}_scale_inv": scale}
    checkpoint = write(tmp_path, tensors)
    own, foreign, skipped = names
    checkpoint.require([foreign])
    assert torch.equal(checkpoint.take(own, (10, 12), torch.float32), made[own][2])
    for part in (2, 0):
        taken = checkpoint.take_part("experts.up_proj", part, (3, 10, 12), torch.bfloat16)
        assert torch.equal(taken, stack[2][part].bfloat16())
    assert sorted(checkpoint.unused()) == [foreign, skipped, f"{skipped}_scale_inv"]
    whole = Checkpoint(tmp_path).take("experts.up_proj", (3, 10, 12), torch.float32)
    assert torch.equal(whole, stack[2])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, r"config\.json: weights are stored in fp8, but quantization_config is missing"),
        ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, "quant_method 'fbgemm_fp8' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "no weight_block_size: one scale per tensor is not supp"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "two positive integers"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}}, "two positive integers"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}},
            r"a_scale_inv has shape \[3, 2\], expected \[3, 3\] for blocks of 4 x 4",
        ),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    """Also where the tensor is foreign: on every rank."""
    weight, scale, _ = quantized(10, 12)
    checkpoint = write(tmp_path, {"a": weight, "a_scale_inv": scale}, config)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.require(["a"])
    with pytest.raises(CheckpointError, match=words):
        checkpoint.take("a", (10, 12), torch.float32)


def test_missing_and_wrong_scales_are_named(tmp_path: Path) -> None:
    weight, scale, _ = quantized(10, 12)
    with pytest.raises(CheckpointError, match=f"{SINGLE}: tensor a is stored in fp8, but its scales a_scale_inv are m"):
        write(tmp_path, {"a": weight}).require(["a"])
    with pytest.raises(CheckpointError, match="tensor a_scale_inv is stored as F8_E4M3"):
        write(tmp_path, {"a": weight, "a_scale_inv": scale.to(torch.float8_e4m3fn)}).require(["a"])
    with pytest.raises(CheckpointError, match="tensor a is stored in fp8, but is no matrix"):
        write(tmp_path, {"a": weight.flatten(), "a_scale_inv": scale}).require(["a"])
