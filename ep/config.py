"""Settings of expert parallelism."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ExpertConfig(BaseModel):
    """How tokens travel to the ranks that own their experts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["auto", "local", "alltoall"] = Field(
        "auto", description="local: all experts on this rank (dp 1); alltoall: torch.distributed; auto picks by dp."
    )
