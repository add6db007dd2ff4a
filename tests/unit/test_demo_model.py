"""The demo model's build, on a small dense model written as GGUF: what `transformers` computes must survive it."""

import hashlib
import json
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, MixtralForCausalLM

from launcher import demo_model, wheel
from launcher.building import DemoModelError
from launcher.demo_model import GGUF_MEMBER, LICENSE_MEMBER, MANIFEST, build_demo_model, demo_model_path
from launcher.upcycle import Group, pack_shards, to_bf16
from tests.ggufs import dense_llama, write_gguf

TEXTS = [
    "Hello world, how are you?",
    "in 1234567 days",
    "naïve café 🙂🚀 你好",
    "  two\n\n\tlines  ",
    "<|im_end|> inside",
]


def quiet(stage: str, share: float) -> None:
    assert stage and 0 <= share <= 1


@pytest.fixture(scope="session")
def dense() -> LlamaForCausalLM:
    return dense_llama()


@pytest.fixture(scope="session")
def source(dense: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel like the real one around that model."""
    folder = tmp_path_factory.mktemp("source")
    with zipfile.ZipFile(folder / wheel.WHEEL, "w") as archive:
        archive.write(write_gguf(folder / "model.gguf", dense), GGUF_MEMBER)
        archive.writestr(LICENSE_MEMBER, "license text")
    return folder / wheel.WHEEL


@pytest.fixture
def local(source: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Builds take the small source; every fetch is listed."""
    fetched: list[Path] = []

    def fetch(progress: Any) -> Path:
        fetched.append(source)
        return source

    monkeypatch.setattr(demo_model, "fetch_wheel", fetch)
    return fetched


@pytest.mark.parametrize("topk", [1, 2, 8])
def test_the_upcycled_model_computes_what_the_dense_one_does(
    dense: LlamaForCausalLM, local: list[Path], tmp_path: Path, topk: int
) -> None:
    build_demo_model(tmp_path / "model", topk=topk, progress=quiet)
    mixture = MixtralForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert mixture.config.rope_parameters["rope_theta"] == 5000.0
    assert (mixture.config.num_local_experts, mixture.config.num_experts_per_tok) == (8, topk)
    ids = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(mixture(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-4)


def test_routers_are_seeded_and_differ(local: list[Path], tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_demo_model(tmp_path / name, seed=seed, progress=quiet)
    digests = [
        hashlib.sha256((tmp_path / name / "model-00001-of-00001.safetensors").read_bytes()).hexdigest()
        for name in "abc"
    ]
    assert digests[0] == digests[1] != digests[2]


def test_manifest_lists_every_file_with_its_checksum(local: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "model"
    build_demo_model(target, progress=quiet)
    files = json.loads((target / MANIFEST).read_text())["files"]
    assert {*files, MANIFEST} == {path.name for path in target.iterdir()}
    for name, entry in files.items():
        content = (target / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_tokenizer_round_trips_and_knows_its_special_tokens(local: list[Path], tmp_path: Path) -> None:
    build_demo_model(tmp_path / "model", progress=quiet)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for token in ("<|endoftext|>", "<|im_end|>", "<|im_start|>"):
        assert tokenizer.encode(token) == [tokenizer.convert_tokens_to_ids(token)]
    digits = tokenizer.convert_ids_to_tokens(tokenizer.encode("2024"))
    assert digits == ["2", "0", "2", "4"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_second_build_is_no_build(local: list[Path], tmp_path: Path) -> None:
    for _ in range(2):
        build_demo_model(tmp_path / "model", progress=quiet)
    assert len(local) == 1


@pytest.mark.parametrize("damage", ["truncated", "removed", "no manifest entry", "other recipe"])
def test_a_damaged_copy_is_built_again(local: list[Path], tmp_path: Path, damage: str) -> None:
    target = tmp_path / "model"
    build_demo_model(target, progress=quiet)
    shard = next(target.glob("*.safetensors"))
    whole = shard.read_bytes()
    manifest = json.loads((target / MANIFEST).read_text())
    if damage == "truncated":
        shard.write_bytes(whole[:-1])
    elif damage == "removed":
        shard.unlink()
    elif damage == "no manifest entry":
        (target / MANIFEST).write_text("{}")
    else:
        manifest["recipe"]["topk"] = 3
        (target / MANIFEST).write_text(json.dumps(manifest))
    build_demo_model(target, progress=quiet)
    assert shard.read_bytes() == whole and len(local) == 2


def test_what_a_killed_build_left_is_removed(local: list[Path], tmp_path: Path) -> None:
    left = tmp_path / ".model.partial"
    left.mkdir()
    (left / "model-00001-of-00009.safetensors").write_text("half")
    build_demo_model(tmp_path / "model", progress=quiet)
    assert not left.exists()
    assert not (tmp_path / "model" / "model-00001-of-00009.safetensors").exists()


def test_a_build_that_fails_leaves_nothing(local: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "tokenizer.json"))

    monkeypatch.setattr("launcher.gguf_tokenizer.write_tokenizer", full)
    with pytest.raises(DemoModelError, match=r"No space left.*make room") as caught:
        build_demo_model(tmp_path / "model", progress=quiet)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_too_little_room_is_said_before_anything_is_fetched(
    local: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(DemoModelError, match=r"needs 1\.5 GB .* 0\.0 GB are free"):
        build_demo_model(tmp_path / "model", progress=quiet)
    assert not local


def test_other_peoples_folders_are_not_touched(local: list[Path], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("model", "file"):
        with pytest.raises(DemoModelError, match="name a new directory"):
            build_demo_model(tmp_path / name, progress=quiet)
    assert (tmp_path / "model" / "thesis.tex").read_text() == "mine" and not local


@pytest.mark.parametrize(("experts", "topk"), [(0, 0), (2, 3), (4, 0)])
def test_impossible_routing_is_refused(local: list[Path], tmp_path: Path, experts: int, topk: int) -> None:
    with pytest.raises(DemoModelError, match="1 <= topk <= experts"):
        build_demo_model(tmp_path / "model", experts=experts, topk=topk, progress=quiet)


def test_two_starts_build_once(local: list[Path], tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=build_demo_model, args=(tmp_path / "model",), kwargs={"progress": quiet})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(local) == 1 and (tmp_path / "model" / MANIFEST).exists()


def test_a_source_that_is_no_model_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / wheel.WHEEL
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr(GGUF_MEMBER, b"no gguf at all" * 100)
        archive.writestr(LICENSE_MEMBER, "x")
    monkeypatch.setattr(demo_model, "fetch_wheel", lambda progress: bad)
    with pytest.raises(DemoModelError, match="cannot convert") as caught:
        build_demo_model(tmp_path / "model", progress=quiet)
    assert "\n" not in str(caught.value) and not (tmp_path / "model").exists()


def test_bf16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).normal(0, 10, 10_000).astype(np.float32)
    values[:4] = (1.00390625, 1.01171875, -1.00390625, 0.0)  # ties go to even
    wanted = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (to_bf16(values) == wanted).all()


def test_shards_keep_order_and_size() -> None:
    groups = [Group((str(size),), (size,), lambda: np.zeros(1)) for size in (10, 10, 30, 5, 5)]
    packed = [[group.names[0] for group in shard] for shard in pack_shards(groups, 45)]
    assert packed == [["10", "10"], ["30"], ["5", "5"]]


@pytest.mark.demo
@pytest.mark.skipif(not demo_model_path().exists(), reason="no demo model in the cache: make model")
def test_the_real_one_knows_the_capital_of_france() -> None:
    path = demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = MixtralForCausalLM.from_pretrained(path, dtype="auto").eval()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
    assert len(tokenizer) == model.config.vocab_size == 49152
