"""Checkpoints that must load, and all the ways in which one must not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dp_engine.checkpoint import INDEX, SINGLE, Checkpoint, CheckpointError
from dp_engine.config import EngineConfig
from dp_engine.kv_cache import block_bytes, num_blocks_for
from dp_engine.model_config import ModelConfig, ModelConfigError
from dp_engine.models.decoder import Decoder
from ep.dispatch import CPU, Dispatched, Dispatcher
from ep.placement import Placements
from kernels.rotary import Rope
from tests.checkpoints import write_mixtral

NORM = "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.3.w1.weight"


class NoDispatcher(Dispatcher):
    """Knows the placement, carries nothing: for loading alone."""

    def begin_step(self, num_tokens: int) -> None:
        raise AssertionError

    def dispatch(self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        raise AssertionError

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        raise AssertionError


def load(directory: Path, rank: int = 0, world_size: int = 1, **engine: Any) -> tuple[Decoder, list[str]]:
    config = ModelConfig.load(directory, EngineConfig(**engine))
    placements = Placements.contiguous(config.num_layers, config.num_experts, world_size)
    lines: list[str] = []
    model = Decoder(config, Checkpoint(directory), NoDispatcher(placements, rank, CPU), lines.append)
    return model, lines


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("checkpoints")
    return {
        "single": write_mixtral(base / "single"),
        "sharded": write_mixtral(base / "sharded", max_shard_size="200KB"),
        "fused": write_mixtral(base / "fused", layout="fused"),
        "tied": write_mixtral(base / "tied", tie=True),
    }


@pytest.fixture
def single(written: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written["single"], tmp_path / "model"))


@pytest.fixture
def sharded(written: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written["sharded"], tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of ... removes the key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def rewrite(path: Path, drop: str | None = None, add: dict[str, torch.Tensor] | None = None) -> None:
    tensors = load_file(path) | (add or {})
    tensors.pop(drop or "", None)
    save_file(tensors, path)


def weights_of(model: Decoder) -> list[torch.Tensor]:
    tensors = [model.embedding, model.norm, model.lm_head.weight]
    for layer in model.layers:
        attention, mixture = layer.attention, layer.ffn
        tensors += [layer.input_norm, attention.qkv.weight, attention.out.weight, layer.ffn_norm]
        tensors.append(mixture.router.scores.weight)
        for expert in mixture.experts.experts:
            tensors += [expert.gate.weight, expert.up.weight, expert.down.weight]
    return tensors


def test_layouts_of_one_model_load_the_same(written: dict[str, Path]) -> None:
    expected = weights_of(load(written["single"])[0])
    for name in ("sharded", "fused"):
        loaded = weights_of(load(written[name])[0])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(loaded, expected, strict=True))


def test_tied_head_is_the_embedding(written: dict[str, Path]) -> None:
    model, _ = load(written["tied"])
    assert torch.equal(model.lm_head.weight, model.embedding)


@pytest.mark.parametrize("layout", ["single", "fused"])
@pytest.mark.parametrize("world_size", [2, 3, 9])
def test_ranks_together_load_every_expert_once(written: dict[str, Path], layout: str, world_size: int) -> None:
    """By checksum, against the file."""
    tensors = load_file(written["single"] / SINGLE)
    sums: list[torch.Tensor] = []
    for rank in range(world_size):
        model, _ = load(written[layout], rank, world_size)
        for layer in model.moe_layers:
            sums += [part.weight.double().sum() for e in layer.experts.experts for part in (e.gate, e.up, e.down)]
    expected = [
        tensors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"].double().sum()
        for layer in range(2)
        for expert in range(8)
        for part in ("w1", "w3", "w2")
    ]
    assert torch.equal(torch.stack(sums).sort().values, torch.stack(expected).sort().values)


def test_foreign_experts_are_not_read(written: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    take = Checkpoint.take
    monkeypatch.setattr(Checkpoint, "take", lambda self, name, *rest: taken.append(name) or take(self, name, *rest))
    load(written["single"], rank=1, world_size=3)
    experts = {int(name.split(".")[5]) for name in taken if ".experts." in name}
    assert experts == {3, 4, 5}


def test_progress_and_unused_tensors_are_reported(single: Path) -> None:
    rewrite(single / SINGLE, add={"model.layers.0.extra.weight": torch.zeros(3)})
    _, lines = load(single)
    assert "loaded layer 2 of 2" in lines
    assert "model.layers.0.extra.weight" in lines[-1]
    assert "1 tensors" in lines[-1]


def test_stray_shard_is_ignored(sharded: Path) -> None:
    (sharded / "model-00099-of-00003.safetensors").write_bytes(b"rubbish")
    load(sharded)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", [NORM, EXPERT, "lm_head.weight", "model.norm.weight"])
def test_missing_tensor_fails_on_every_rank(single: Path, name: str, rank: int) -> None:
    rewrite(single / SINGLE, drop=name)
    with pytest.raises(CheckpointError, match=f"{SINGLE}: tensor {name} is missing"):
        load(single, rank, 3)


def test_renamed_tensor_fails(single: Path) -> None:
    moved = load_file(single / SINGLE)[NORM]
    rewrite(single / SINGLE, drop=NORM, add={NORM.replace("input", "inputs"): moved})
    with pytest.raises(CheckpointError, match=f"{NORM} is missing"):
        load(single)


def test_surplus_expert_or_layer_fails(single: Path, tmp_path: Path) -> None:
    edit(single / "config.json", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"is of layer 1, but config\.json names 1 layers"):
        load(single)
    edit(single / "config.json", num_hidden_layers=2)
    rewrite(single / SINGLE, add={EXPERT.replace("experts.3", "experts.8"): torch.zeros(96, 64)})
    with pytest.raises(CheckpointError, match=r"is of expert 8, but config\.json names 8 experts"):
        load(single, 1, 2)


def test_wrong_shape_fails(single: Path) -> None:
    rewrite(single / SINGLE, add={EXPERT: torch.zeros(96, 65)})
    with pytest.raises(CheckpointError, match=rf"{EXPERT} has shape \[96, 65\], expected \[96, 64\]"):
        load(single)


def shard_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


@pytest.mark.parametrize("rank", [0, 2])
def test_missing_and_truncated_shards_fail_on_every_rank(sharded: Path, rank: int) -> None:
    victim = shard_files(sharded)[1]
    whole = victim.read_bytes()
    broken = {whole[:-1]: "truncated: tensor", whole[:100]: "truncated or no", b"": "truncated or no"}
    for content, words in broken.items():
        victim.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{victim.name} is {words}"):
            load(sharded, rank, 3)
    victim.write_bytes(whole[:8] + b"x" + whole[9:])
    with pytest.raises(CheckpointError, match="broken safetensors header"):
        load(sharded, rank, 3)
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{victim.name}: No such file"):
        load(sharded, rank, 3)


def test_index_is_authoritative(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    files = index["weight_map"]
    place, other = files[NORM], next(file for file in files.values() if file != files[NORM])
    edit(sharded / INDEX, weight_map=files | {NORM: other})
    with pytest.raises(CheckpointError, match=f"{other}: tensor {NORM} is missing, although {INDEX} places it there"):
        load(sharded)
    edit(sharded / INDEX, weight_map={name: file for name, file in files.items() if name != NORM})
    with pytest.raises(CheckpointError, match=f"{INDEX}: tensor {NORM} is missing"):
        load(sharded)
    edit(sharded / INDEX, weight_map=files | {NORM: f"../{place}"})
    with pytest.raises(CheckpointError, match="outside the model directory"):
        load(sharded)
    for broken in ("[]", "{}", "{", '{"weight_map": {"a": 1}}'):
        (sharded / INDEX).write_text(broken)
        with pytest.raises(CheckpointError, match=INDEX):
            load(sharded)


def test_no_weights_at_all(single: Path) -> None:
    (single / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=f"neither {INDEX} nor {SINGLE}"):
        load(single)


def test_a_tensor_is_taken_once(written: dict[str, Path]) -> None:
    checkpoint = Checkpoint(written["single"])
    checkpoint.take(NORM, (64,), torch.float32)
    with pytest.raises(CheckpointError, match="loaded twice"):
        checkpoint.take(NORM, (64,), torch.float32)
    fused = Checkpoint(written["fused"])
    name, shape = "model.layers.0.mlp.experts.down_proj", (8, 64, 96)
    fused.take_part(name, 3, shape, torch.float32)
    fused.take_part(name, 4, shape, torch.float32)
    with pytest.raises(CheckpointError, match="loaded twice"):
        fused.take_part(name, 3, shape, torch.float32)


def test_digest_names_the_checkpoint(written: dict[str, Path], single: Path) -> None:
    digest = Checkpoint(single).digest()
    assert digest == Checkpoint(written["single"]).digest()
    assert digest != Checkpoint(written["tied"]).digest()
    edit(single / "config.json", rms_norm_eps=2e-5)
    assert digest != Checkpoint(single).digest()


def test_other_weights_of_the_same_shapes_have_another_digest(single: Path) -> None:
    digest = Checkpoint(single).digest()
    path = single / "model.safetensors"
    tensors = load_file(path)
    name = min(tensors, key=lambda name: tensors[name].numel())  # a norm
    save_file(tensors | {name: tensors[name] + 1}, path, metadata={"format": "pt"})
    assert digest != Checkpoint(single).digest()
    save_file(tensors, path, metadata={"format": "pt"})
    assert digest == Checkpoint(single).digest()


def test_config_says_what_the_checkpoint_says(written: dict[str, Path]) -> None:
    config = ModelConfig.load(written["single"], EngineConfig())
    attention, mixture = config.attention, config.mixture
    assert (config.num_experts, config.num_moe_layers, mixture.size, mixture.routing.top_k) == (8, 2, 96, 2)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 16)
    assert (config.layers[0].rope, config.max_model_len, config.dtype) == (Rope(16, 10000.0), 512, torch.float32)
    assert config.eos_token_ids == (1,)
    assert ModelConfig.load(written["single"], EngineConfig(dtype="bfloat16", max_model_len=99)).max_model_len == 99


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": ..., "rope_theta": 5e5},
        {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 500000}, "rope_theta": 5e5},
    ],
)
def test_both_spellings_of_rope(single: Path, changes: dict[str, Any]) -> None:
    edit(single / "config.json", **changes)
    assert ModelConfig.load(single, EngineConfig()).layers[0].rope.theta == 5e5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": ...}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope type 'longrope'"),
        ({"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "linear has no factor"),
        ({"rope_theta": 1e6}, "names rope_theta 10000.0 but rope_theta itself is 1000000.0"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported"),
        ({"model_type": ...}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a positive integer, not 'two'"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 is no multiple of num_key_value_heads 2"),
        ({"head_dim": ..., "num_attention_heads": 6}, "no multiple of 6 attention heads"),
        ({"head_dim": 15}, "odd"),
        ({"num_experts_per_tok": 9}, "exceeds the 8 experts"),
        ({"sliding_window": "wide"}, "sliding_window must be a positive integer, not 'wide'"),
        ({"dtype": "float16"}, "dtype float16 is not supported; set engine.dtype"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id"),
    ],
)
def test_models_that_cannot_be_run_are_refused_by_name(single: Path, changes: dict[str, Any], words: str) -> None:
    (single / "generation_config.json").unlink()
    edit(single / "config.json", **changes)
    with pytest.raises(ModelConfigError, match=words) as caught:
        ModelConfig.load(single, EngineConfig())
    assert str(single / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_engine_settings_decide(single: Path) -> None:
    edit(single / "config.json", sliding_window=100, dtype="float16")
    config = ModelConfig.load(single, EngineConfig(max_model_len=100, dtype="float32"))
    assert (config.max_model_len, config.dtype, config.windows) == (100, torch.float32, (None,))
    assert ModelConfig.load(single, EngineConfig(max_model_len=101, dtype="float32")).windows == (100,)
    with pytest.raises(ModelConfigError, match=r"512 is less than engine\.max_model_len 513"):
        ModelConfig.load(single, EngineConfig(max_model_len=513, dtype="float32"))


def test_directories_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="does not exist"):
        ModelConfig.load(tmp_path / "nowhere", EngineConfig())
    with pytest.raises(ModelConfigError, match=r"has no config\.json"):
        ModelConfig.load(tmp_path, EngineConfig())
    for content in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
        with pytest.raises(ModelConfigError, match=r"config\.json (is not|must hold a) JSON"):
            ModelConfig.load(tmp_path, EngineConfig())


@pytest.mark.parametrize(
    ("generation", "expected"), [(None, (1,)), ({}, (1,)), (7, (7,)), ([7, 8], (7, 8)), ([], (1,))]
)
def test_end_of_sequence_ids(single: Path, generation: Any, expected: tuple[int, ...]) -> None:
    (single / "generation_config.json").unlink()
    if generation is not None:
        content = {} if generation == {} else {"eos_token_id": generation}
        (single / "generation_config.json").write_text(json.dumps(content))
    assert ModelConfig.load(single, EngineConfig()).eos_token_ids == expected


def test_size_of_the_pool(written: dict[str, Path]) -> None:
    config = ModelConfig.load(written["single"], EngineConfig())
    assert block_bytes(config, EngineConfig()) == 2 * 16 * 2 * 2 * 16 * 4  # layers, tokens, K and V, heads, dim, bytes
    assert num_blocks_for(config, EngineConfig(num_blocks=7)) == 7
    one_mib = EngineConfig(kv_memory_gib=1 / 1024)
    assert num_blocks_for(config, one_mib) == 2**20 // block_bytes(config, one_mib)
    assert num_blocks_for(config, EngineConfig(kv_memory_gib=64)) == 64 * (512 // 16) + 1  # all at full length
    with pytest.raises(ModelConfigError, match="holds 0 KV blocks"):
        num_blocks_for(config, EngineConfig(kv_memory_gib=1e-9))
