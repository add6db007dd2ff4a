"""Rotary embedding as config.json spells it: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""

import math
from dataclasses import dataclass
from typing import Any

from dp_engine.families import Family
from dp_engine.json_file import JsonFile
from kernels.rotary import Rope

LAYER_TYPES = ("full_attention", "sliding_attention")
_SHARED = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}  # fmt: skip


@dataclass(frozen=True)
class RopeConfig:
    """`by_type`: the rope of layers of each type. `longest`: tokens of a sequence it is good for. `mscale`: what a
    DeepSeek checkpoint multiplies the softmax' scale by, squared."""

    by_type: dict[str, Rope]
    longest: int
    mscale: float


def load_rope(config: JsonFile, features: int, family: Family) -> RopeConfig:
    """`features` of a head may be rotated, or a part of them in families with `partial_rotary`.

    Theta is never guessed, a key that is not understood is refused by name.
    """
    section, source = _section(config)
    nested = [kind for kind in LAYER_TYPES if isinstance(section.get(kind), dict)]
    if nested and set(section) - set(nested):
        raise config.error(source, f"mixes layer types with {sorted(set(section) - set(nested))}")
    by_type, mscales = {}, []
    for kind in LAYER_TYPES:
        own = section[kind] if kind in nested else section
        if nested and kind not in nested:
            continue
        parser = _Parser(config, own, source, features, family.partial_rotary)
        by_type[kind] = parser.rope()
        mscales.append(parser.softmax_mscale())
    first = next(iter(by_type.values()))
    longest = config.integer("max_position_embeddings")
    if first.kind in ("linear", "dynamic", "yarn"):
        longest = max(longest, int(first.factor * (first.original_length or longest)))
    return RopeConfig(by_type, longest, mscales[0])


def _section(config: JsonFile) -> tuple[dict[str, Any], str]:
    """The object that describes rope, and its key. Two of them must say the same."""
    found = {key: config.values[key] for key in ("rope_parameters", "rope_scaling") if config.values.get(key)}
    for key, section in found.items():
        if not isinstance(section, dict):
            raise config.error(key, f"must be an object, not {section!r}")
    if len(found) == 2:
        newer, older = ({**section, "rope_type": _kind(section)} for section in found.values())
        differing = [key for key in newer.keys() & older.keys() - {"type"} if newer[key] != older[key]]
        if differing:
            raise config.error("rope_scaling", f"and rope_parameters differ in {', '.join(sorted(differing))}")
        return older | newer, "rope_parameters"
    source = next(iter(found), "rope_theta")
    return found.get(source, {}), source


def _kind(section: dict[str, Any]) -> Any:
    return section.get("rope_type", section.get("type", "default"))


class _Parser:
    """One rope section."""

    def __init__(self, config: JsonFile, section: dict[str, Any], source: str, features: int, partial: bool):
        self.config, self.section, self.source, self.features = config, section, source, features
        self.kind = _kind(section)
        if not isinstance(self.kind, str) or self.kind not in _KEYS:
            supported = ", ".join(_KEYS)
            raise self.error(f"has rope type {self.kind!r}, which is not supported (supported: {supported})")
        known = _SHARED | (set().union(*_KEYS.values()) if self.kind == "default" else _KEYS[self.kind])
        if unknown := sorted(set(section) - known):
            raise self.error(f"has {', '.join(unknown)}, which rope type {self.kind} does not support")
        share = section.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        self.share = 1.0 if share is None else config.positive("partial_rotary_factor", share)
        if self.share > 1 or (self.share < 1 and not partial):
            raise config.error("partial_rotary_factor", f"{self.share} is not supported here")

    def error(self, problem: str) -> Exception:
        return self.config.error(self.source, problem)

    def rope(self) -> Rope:
        dim = int(self.features * self.share)
        if dim % 2 or not dim:
            raise self.config.error("head_dim", f"{dim} rotated features are odd or none, so they cannot be in pairs")
        theta = self._theta()
        if self.kind == "default":
            return Rope(dim, theta)
        longest = self.config.integer("max_position_embeddings")
        if self.kind == "linear":
            return Rope(dim, theta, "linear", self._number("factor"))
        if self.kind == "dynamic":
            return Rope(dim, theta, "dynamic", self._number("factor"), longest)
        inside = int(self._number("original_max_position_embeddings", longest))
        original = self.config.integer("original_max_position_embeddings", default=inside)
        if self.kind == "llama3":
            low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
            if low >= high:
                raise self.error(f"has low_freq_factor {low}, which must be below high_freq_factor {high}")
            factor = self._number("factor")
            return Rope(dim, theta, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
        return Rope(
            dim,
            theta,
            "yarn",
            self._number("factor", longest / original),
            original,
            beta_fast=self._number("beta_fast", 32.0),
            beta_slow=self._number("beta_slow", 1.0),
            truncate=bool(self.section.get("truncate", True)),
            amplitude=self._amplitude(longest / original),
        )

    def softmax_mscale(self) -> float:
        """1 unless `mscale_all_dim` is set."""
        if self.kind == "default" or not self.section.get("mscale_all_dim"):
            return 1.0
        return _mscale(self._number("factor"), self._number("mscale_all_dim"))

    def _amplitude(self, default_factor: float) -> float:
        if self.section.get("attention_factor") is not None:
            return self._number("attention_factor")
        factor = self._number("factor", default_factor)
        if self.section.get("mscale") and self.section.get("mscale_all_dim"):
            return _mscale(factor, self._number("mscale")) / _mscale(factor, self._number("mscale_all_dim"))
        return _mscale(factor, 1.0)

    def _theta(self) -> float:
        older, newer = self.config.values.get("rope_theta"), self.section.get("rope_theta")
        if newer is not None and older is not None and newer != older:
            raise self.error(f"names rope_theta {newer} but rope_theta itself is {older}")
        theta = older if newer is None else newer
        if theta is None:
            raise self.config.error("rope_theta", "is missing (neither rope_parameters nor rope_theta names it)")
        return self.config.positive("rope_theta", theta)

    def _number(self, key: str, default: float | None = None) -> float:
        value = self.section.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"of rope type {self.kind} has no {key}")
        return self.config.positive(f"{self.source}.{key}", value)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
