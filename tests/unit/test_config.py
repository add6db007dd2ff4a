"""One schema; every way to get it wrong is one line that names the setting."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dp_engine.config import EngineConfig
from kernels.native import cache_dir
from launcher.config import ConfigError, DeploymentConfig, load_config
from vote.config import VoteConfig

ROOT = Path(__file__).resolve().parents[2]


def written(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return path


def test_defaults_need_no_file() -> None:
    assert load_config(None) == DeploymentConfig()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert load_config(path).dp >= 1


def test_demo_configuration_is_the_demo_on_two_ranks_of_this_machine() -> None:
    config = load_config(ROOT / "configs" / "demo.yaml")
    assert (config.model, config.dp, config.server.host) == ("demo", 2, None)


def test_an_empty_file_means_defaults(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "# nothing\n")) == DeploymentConfig()


def test_flags_win_over_set_and_set_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "dp: 3\nserver: {port: 1, host: 10.0.0.1}\nengine: {block_size: 8}\n")
    config = load_config(path, ["server.port=2", "dp=4", "engine.block_size=32"], server__port=3, dp=None)
    assert (config.server.port, config.dp, config.engine.block_size) == (3, 4, 32)
    assert config.server.host == "10.0.0.1"


def test_a_later_set_wins() -> None:
    assert load_config(None, ["dp=2", "dp=5"]).dp == 5


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("engine.kv_memory_gib=0.5", 0.5),
        ("engine.num_blocks=100", 100),
        ("engine.num_blocks=null", None),
        ("engine.chunked_prefill=false", False),
        ("engine.preemption=recompute", "recompute"),
        ("server.model_name=a=b", "a=b"),
        ("vote.control_timeout_s=5", 5.0),
    ],
)
def test_set_values_are_yaml(override: str, value: Any) -> None:
    section, key = override.split("=")[0].split(".")
    assert getattr(getattr(load_config(None, [override]), section), key) == value


@pytest.mark.parametrize(
    ("text", "overrides", "flags", "wanted"),
    [
        ("modle: x\n", [], {}, "'modle'"),
        ("engine: {blocksize: 16}\n", [], {}, "'engine.blocksize'"),
        ("dp: 0\n", [], {}, "'dp'"),
        ("dp: two\n", [], {}, "'dp'"),
        ("dp:\n", [], {}, "'dp'"),
        ("engine:\n", [], {}, "'engine'"),
        ("server: {port: 70000}\n", [], {}, "'server.port'"),
        ("engine: {preemption: never}\n", [], {}, "'engine.preemption'"),
        ("engine: {preset: deepinfer}\nvote: 5\n", [], {}, "'vote'"),
        ("engine: {preset: [deepinfer]}\n", [], {}, "'engine.preset'"),
        ("- a\n- b\n", [], {}, "mapping"),
        ("just text\n", [], {}, "mapping"),
        ("dp: [1\n", [], {}, "YAML"),
        ("", ["dp"], {}, "key=value"),
        ("", ["=3"], {}, "key=value"),
        ("", ["dp=[1"], {}, "dp"),
        ("", ["engine.depth.x=1"], {}, "'engine.depth'"),
        ("dp: 2\n", ["dp.x=1"], {}, "'dp'"),
        ("", ["server.colour=red"], {}, "'server.colour'"),
        ("", [], {"dp": 0}, "'dp'"),
        ("", [], {"server__port": -1}, "'server.port'"),
    ],
)
def test_every_error_is_one_line_that_names_the_setting(
    tmp_path: Path, text: str, overrides: list[str], flags: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text), overrides, **flags)
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "overrides", "wanted"),
    [
        ("engine: {draft_ngram_min: 5}\n", [], "setting 'engine': draft_ngram_min is above draft_ngram_max"),
        ("", ["engine.policy=unified", "engine.role=prefill"], "setting 'engine': role prefill or decode needs"),
        ("engine: {role: prefill}\n", [], "engine.role prefill cannot be served"),
        ("", ["engine.role=decode"], "engine.role decode cannot be served"),
        ("", ["engine.preset=deepinfer", "engine.role=decode"], "engine.role decode cannot be served"),
    ],
)
def test_settings_that_do_not_go_together_are_named_without_what_was_given(
    tmp_path: Path, text: str, overrides: list[str], wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text), overrides)
    assert str(caught.value).startswith(wanted)
    assert "Value error" not in str(caught.value) and "{" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "overrides", "vote"),
    [
        ("", ["engine.preset=deepinfer"], ("cadence", False)),
        ("engine: {preset: deepinfer}\n", [], ("cadence", False)),
        ("engine: {preset: deepinfer}\nvote: {all_interval: 7}\n", [], ("cadence", False)),
        ("engine: {preset: deepinfer}\n", ["vote.decision=adaptive"], ("adaptive", False)),
        ("vote: {fast_path: true}\n", ["engine.preset=deepinfer"], ("cadence", True)),
        ("engine: {preset: vllm}\n", [], ("adaptive", True)),
        ("engine: {preset: null}\n", [], ("adaptive", True)),
        ("", [], ("adaptive", True)),
    ],
)
def test_preset_deepinfer_brings_its_vote(
    tmp_path: Path, text: str, overrides: list[str], vote: tuple[str, bool]
) -> None:
    config = load_config(written(tmp_path, text), overrides)
    assert (config.vote.decision, config.vote.fast_path) == vote


def test_preset_deepinfer_brings_its_vote_in_python_too() -> None:
    assert DeploymentConfig(engine=EngineConfig(preset="deepinfer")).vote.decision == "cadence"
    given = VoteConfig(any_interval=5)
    assert DeploymentConfig(engine=EngineConfig(preset="deepinfer"), vote=given).vote == given


@pytest.mark.parametrize("preset", ["deepinfer", "vllm"])
def test_a_printed_configuration_reads_back_as_itself(tmp_path: Path, preset: str) -> None:
    config = load_config(None, [f"engine.preset={preset}", "vote.fast_path=true"])
    assert load_config(written(tmp_path, yaml.safe_dump(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_an_unreadable_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read config") as caught:
        load_config(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(None).dp = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"PHALANX_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/phalanx"),
        ({"HOME": "/home/u"}, "/home/u/.cache/phalanx"),
    ],
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], wanted: str) -> None:
    for name in ("PHALANX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(wanted)
