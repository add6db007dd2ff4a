"""Settings of the engine: presets, what they leave to the user, and combinations that cannot work."""

from typing import Any

import pytest
from pydantic import ValidationError

from dp_engine.config import PRESETS, EngineConfig
from dp_engine.phased import PhasedScheduler
from dp_engine.policies import make_scheduler
from dp_engine.unified import UnifiedScheduler


def test_presets_name_known_settings_only() -> None:
    for settings in PRESETS.values():
        assert set(settings) <= set(EngineConfig.model_fields)
        EngineConfig(**settings)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_what_it_says_and_nothing_else(preset: Any) -> None:
    config, plain = EngineConfig(preset=preset), EngineConfig()
    for name in EngineConfig.model_fields:
        if name != "preset":
            assert getattr(config, name) == PRESETS[preset].get(name, getattr(plain, name)), name


@pytest.mark.parametrize("preset", PRESETS)
def test_settings_given_beside_a_preset_win(preset: Any) -> None:
    for name, value in {"readmission_margin": 5, "max_preemptions": 3, "preemption": "terminate"}.items():
        assert getattr(EngineConfig(preset=preset, **{name: value}), name) == value


def test_defaults_differ_from_deepinfer_by_knobs_with_names() -> None:
    """Each of them where ours is better; docs/scheduling.md has the reasons."""
    plain = EngineConfig()
    assert {name for name, value in PRESETS["deepinfer"].items() if getattr(plain, name) != value} == {
        "want", "watermark_escape", "decode_headroom", "release", "refusal", "readmission_margin", "max_preemptions",
        "clip_drafts", "prefix_cache",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "preemption"),
    [
        ({}, "terminate"),
        ({"policy": "unified"}, "recompute"),
        ({"policy": "unified", "preemption": "terminate"}, "terminate"),
        ({"preset": "vllm"}, "recompute"),
        ({"preset": "deepinfer"}, "terminate"),
    ],
)
def test_the_unified_policy_recomputes_unless_told_otherwise(given: dict[str, Any], preemption: str) -> None:
    assert EngineConfig(**given).preemption == preemption


@pytest.mark.parametrize(("policy", "kind"), [("phased", PhasedScheduler), ("unified", UnifiedScheduler)])
def test_a_policy_has_its_scheduler(policy: Any, kind: type[Any]) -> None:
    scheduler = make_scheduler(EngineConfig(policy=policy), 9, 64, [2])
    assert type(scheduler) is kind and scheduler.pool.capacity == 8 and scheduler.max_model_len == 64


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"role": "decode", "preemption": "recompute"}, "role decode cannot recompute"),
        ({"role": "prefill", "policy": "unified"}, "needs the phased policy"),
        ({"num_state_slots": 4}, "num_state_slots needs prefix_cache off"),
        ({"overlap": True, "release": "next_decode"}, "overlap needs release at settlement"),
        ({"overlap": True, "preset": "deepinfer"}, "overlap needs release at settlement"),
        ({"admission": "full", "clip_drafts": False}, "it needs clip_drafts"),
        ({"admission": "full", "preset": "deepinfer"}, "it needs clip_drafts"),
        ({"draft_ngram_min": 4}, "draft_ngram_min is above draft_ngram_max"),
        ({"lookahead_tokens": 17, "max_num_batched_tokens": 16}, "below 2 \\* cp_size or lookahead_tokens"),
        ({"cp_size": 4, "max_num_batched_tokens": 7}, "below 2 \\* cp_size"),
        ({"cp_size": 2, "max_num_batched_tokens": 7, "lookahead_tokens": 5}, "lookahead_tokens"),  # cut to 4
        ({"num_blocks": 1}, "num_blocks"),
        ({"num_state_slots": 1, "prefix_cache": False}, "num_state_slots"),
        ({"kv_watermark": 0}, "kv_watermark"),
        ({"kv_watermark": 1.5}, "kv_watermark"),
        ({"decode_headroom": 2}, "decode_headroom"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"preset": "sglang"}, "preset"),
        ({"chunk": 5}, "chunk"),
    ],
)
def test_combinations_that_cannot_work_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EngineConfig(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"role": "prefill"},
        {"role": "decode"},
        {"num_state_slots": 4, "prefix_cache": False},
        {"overlap": True, "preset": "deepinfer", "release": "settlement"},
        {"lookahead_tokens": 16, "max_num_batched_tokens": 16},
        {"cp_size": 4, "max_num_batched_tokens": 8},
        {"max_preemptions": None},
        {"kv_watermark": 1.0, "decode_headroom": 1},
    ],
)
def test_combinations_at_the_edge(given: dict[str, Any]) -> None:
    EngineConfig(**given)
