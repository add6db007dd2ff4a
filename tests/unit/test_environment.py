"""Hugging Face's `kernels` beside ours: we notice when theirs is first, `transformers` is not misled when ours is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

import launcher.environment
from launcher.environment import EnvironmentCheckError, check_environment

ROOT = Path(__file__).resolve().parents[2]

CHECK = "from launcher.environment import check_environment; check_environment(); print('fine')"
USE = """
import torch, transformers, kernels
from transformers.utils import is_kernels_available
from transformers import MixtralConfig, MixtralForCausalLM
sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=1, num_local_experts=2, **sizes))
print(model(torch.tensor([[1, 2]])).logits.shape[-1], is_kernels_available(), kernels.__file__)
"""
SHIELD = "from launcher.environment import shield_transformers; shield_transformers()\n"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with a package `kernels` and the metadata by which `transformers` recognises Hugging Face's."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('never imported by phalanx')\n")
    metadata = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    return tmp_path


def python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` with exactly these folders in front of the installed packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


def test_ours_alone_and_ours_first_pass(theirs: Path) -> None:
    check_environment()
    assert python(CHECK, ROOT, theirs).stdout == "fine\n"


def test_theirs_first_is_refused_with_what_to_do(theirs: Path) -> None:
    done = python(CHECK, theirs, ROOT)
    message = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert "EnvironmentCheckError" in message
    for part in (str(theirs / "kernels"), "pip uninstall kernels", str(ROOT)):
        assert part in message


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.environment, "PACKAGES", ("vote", "no_such_package"))
    with pytest.raises(EnvironmentCheckError, match="'no_such_package' is missing"):
        check_environment()


def test_transformers_works_without_theirs() -> None:
    done = python(SHIELD + USE, ROOT)
    assert done.stdout.split() == ["16", "False", str(ROOT / "kernels" / "__init__.py")], done.stderr


def test_transformers_works_with_theirs_installed(theirs: Path) -> None:
    done = python(SHIELD + USE, ROOT, theirs)
    assert done.stdout.split() == ["16", "False", str(ROOT / "kernels" / "__init__.py")], done.stderr


def test_the_shield_is_needed(theirs: Path) -> None:
    done = python("import transformers.integrations.hub_kernels", ROOT, theirs)
    assert "cannot import name" in done.stderr and "from 'kernels'" in done.stderr
