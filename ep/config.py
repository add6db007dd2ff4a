"""Settings of expert parallelism."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ExpertConfig(BaseModel):
    """How tokens travel to the ranks that own their experts, and which ranks these are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["auto", "local", "alltoall", "allgather", "shm", "deepep"] = Field(
        "auto",
        description="local: all experts on this rank (dp 1); alltoall, allgather: torch.distributed; shm: memory that "
        "the ranks of one host share, on CPUs; deepep: DeepSeek's kernels, on GPUs. auto: local at dp 1, shm for CPUs "
        "of one host, else alltoall.",
    )
    exact_combine: bool = Field(
        False,
        description="deepep: send one row per token and expert instead of one per token and rank, so that sums have "
        "the same last bits as with any other backend.",
    )
    redundant_experts: int = Field(
        0,
        ge=0,
        description="Copies of experts beyond the first of each, per layer in the whole gang, for the busiest ones.",
    )
    rebalance_interval_steps: int = Field(
        0, ge=0, description="Steps from one look at the experts' load to the next; 0: experts stay where they are."
    )
    rebalance_window_steps: int = Field(
        1024, ge=1, description="Recent steps by whose load experts are placed, and imbalance is reported."
    )
    rebalance_threshold: float = Field(
        0.05, ge=0.0, lt=1.0, description="A layer's experts move if the busiest rank's load falls by more than this."
    )
    rebalance_moves_per_step: int = Field(
        1, ge=1, description="Experts of a layer that a rank sends or receives at most between two steps."
    )
    ranks_per_node: int = Field(
        0,
        ge=0,
        description="Ranks in a row that share a host, if routing groups should stay on one; 0: hosts do not matter.",
    )
