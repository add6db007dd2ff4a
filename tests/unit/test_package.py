"""What of a checkout travels to a cluster."""

import zipfile
from pathlib import Path

import pytest

from launcher.config import ConfigError
from launcher.environment import ROOT
from launcher.package import CARRIED, LIMIT_BYTES, collect

TRAVELS = ("pyproject.toml", "launcher/serve.py", "configs/demo.yaml", "kernels/strips.c", "bench/builds.py")
STAYS = (
    ".git/objects/pack", ".gitignore", ".venv/bin/python", "venv/bin/python", ".ci/run", ".env",
    "launcher/__pycache__/serve.cpython-311.pyc", "launcher/stray.pyc", ".pytest_cache/v", "build/lib/x.py",
    "dist/x.whl", "docs/images/processes.svg", "bench/out/serve.json", "phalanx_serve.egg-info/PKG-INFO",
    "weights.safetensors", "small.gguf", "tiny/config.json", "tiny/model.safetensors", "tiny/deep/notes.txt",
    "sharded/config.json", "sharded/model.safetensors.index.json", "old/config.json", "old/pytorch_model.bin",
)  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name in (*TRAVELS, *STAYS):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}\n")
    (root / "pyproject.toml").write_text('[project]\nname = "phalanx-serve"\n')
    return root


def names(root: Path, config: Path | None = None) -> set[str]:
    return {name for name, _ in collect(root, config).files}


def test_the_code_travels_and_nothing_else(checkout: Path) -> None:
    assert names(checkout) == set(TRAVELS)


def test_links_travel_only_if_they_stay_inside(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (checkout / "configs" / "inside.yaml").symlink_to("demo.yaml")
    (checkout / "configs" / "outside.yaml").symlink_to(tmp_path / "secret")
    (checkout / "configs" / "nowhere.yaml").symlink_to("nothing")
    (checkout / "loop").symlink_to(checkout)
    assert names(checkout) == {*TRAVELS, "configs/inside.yaml"}


def test_this_checkout_travels_and_is_small() -> None:
    package = collect(ROOT, ROOT / "configs" / "demo.yaml")
    found = {name for name, _ in package.files}
    assert {
        "launcher/__main__.py",
        "kernels/strips.c",
        "vote/ballot.py",
        "dp_engine/rank.py",
        "ep/placement.py",
    } <= found
    assert package.config == "configs/demo.yaml"
    assert package.size < LIMIT_BYTES / 4


def test_a_configuration_from_elsewhere_is_carried_along(checkout: Path, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("dp: 3\n")
    package = collect(checkout, config)
    assert package.config == CARRIED
    assert dict(package.files)[CARRIED] == config
    hidden = checkout / ".hidden.yaml"
    hidden.write_text("dp: 4\n")
    assert collect(checkout, hidden).config == CARRIED, "inside, but it does not travel there"


def test_too_much_is_refused_with_the_largest_named(checkout: Path) -> None:
    for name, count in (("huge.bin", 3000), ("big.csv", 2000), ("notes.txt", 1000)):
        (checkout / name).write_bytes(b"x" * count * 1024)
    collect(checkout, None, limit=7 << 20)
    with pytest.raises(ConfigError) as caught:
        collect(checkout, None, limit=5 << 20)
    text = str(caught.value)
    assert "at most 5.0 MiB travel" in text and "\n" not in text
    assert text.index("huge.bin (2.9 MiB)") < text.index("big.csv (2.0 MiB)") < text.index("notes.txt (1.0 MiB)")


def test_an_installed_phalanx_is_no_checkout(tmp_path: Path) -> None:
    (tmp_path / "launcher").mkdir()
    with pytest.raises(ConfigError, match="is no checkout of phalanx"):
        collect(tmp_path, None)
    (tmp_path / "pyproject.toml").write_text('name = "other"\n')
    with pytest.raises(ConfigError, match="is no checkout of phalanx"):
        collect(tmp_path, None)


def test_equal_files_make_an_equal_archive(checkout: Path, tmp_path: Path) -> None:
    collect(checkout, None).write(tmp_path / "one.zip")
    (checkout / "launcher" / "serve.py").touch()
    collect(checkout, None).write(tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert set(archive.namelist()) == set(TRAVELS)
        assert archive.read("launcher/serve.py") == b"this is launcher/serve.py\n"
        assert archive.getinfo("launcher/serve.py").external_attr >> 16 == 0o644
