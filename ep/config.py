"""Settings of expert parallelism."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ExpertConfig(BaseModel):
    """How tokens travel to the ranks that own their experts."""

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
