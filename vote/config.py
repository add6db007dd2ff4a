"""Settings of the vote. Every field must be equal on all ranks; `vote.settings` compares them before the first step."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class VoteConfig(BaseModel):
    """How the ranks decide on a step, and how long they wait for each other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decision: Literal["adaptive", "cadence"] = Field(
        "adaptive",
        description="adaptive: how long a prefill waits depends on what it is worth to the gang; "
        "cadence: ALL and ANY points at fixed intervals, as DeepInfer publishes them.",
    )
    all_interval: int = Field(70, ge=1, description="cadence: decode steps between two ALL points.")
    any_interval: int = Field(100, ge=1, description="cadence: decode steps between two ANY points.")
    fast_path: bool = Field(True, description="cadence: grant any prefill at once while no rank has decode work.")
    decode_steps_per_prefill: int = Field(
        110,
        ge=1,
        description="adaptive: decode steps for each prefill step while any rank decodes; no wish waits for more.",
    )
    saved_prefills: int = Field(
        4, ge=0, description="adaptive: prefill steps that are granted at once after so many have not been needed."
    )
    decode_steps_per_shared_prefill: int = Field(
        32, ge=1, description="adaptive: the most decode steps a wish waits if every rank has one (no placeholders)."
    )
    decode_steps_per_urgent_prefill: int = Field(
        2,
        ge=1,
        description="adaptive: the most it waits if a rank asks that runs little beside the busiest, or has a prompt "
        "half computed, or twice as many requests waiting as running.",
    )
    control_backend: Literal["star", "gloo", "nccl"] = Field(
        "star",
        description="What ballots travel over: star (TCP, by way of rank 0), gloo, or nccl where every rank has a GPU.",
    )
    control_timeout_s: float = Field(30.0, gt=0, description="Longest wait for a ballot or a data collective.")
