"""docs/configuration.md says what the schema says."""

from pathlib import Path

from launcher.config_reference import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "run: python -m launcher.config_reference > docs/configuration.md"


def test_every_knob_is_described() -> None:
    assert "| None |" not in reference()
    assert "| `engine.block_size` | int | `16` |" in reference()
