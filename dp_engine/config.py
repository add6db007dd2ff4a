"""Settings of one rank's engine. Equal on all ranks, except for what is measured on the spot (free memory)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """Scheduler limits and KV pool of a rank. Lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: what the checkpoint names.")
    policy: Literal["phased"] = Field("phased", description="phased: a step is either prefill or decode (DeepInfer).")
    block_size: int = Field(16, ge=1, description="Tokens per KV block.")
    num_blocks: int | None = Field(None, ge=2, description="KV blocks, null block included; default: kv_memory_gib.")
    kv_memory_gib: float = Field(1.0, gt=0, description="Memory of a rank's KV cache when num_blocks is not given.")
    max_model_len: int | None = Field(None, ge=2, description="Longest sequence; default: the checkpoint's.")
    max_num_seqs: int = Field(64, ge=1, description="Sequences that run at the same time on a rank.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Token budget of a prefill step.")
    chunked_prefill: bool = Field(True, description="Split prompts that exceed the token budget over several steps.")
    kv_watermark: float = Field(0.9, gt=0, le=1, description="No prefill is wanted while more of the pool is in use.")
    preemption: Literal["terminate", "recompute"] = Field(
        "terminate",
        description="When blocks run out the oldest sequence ends (insufficient_system_resource) or starts again.",
    )
    max_preemptions: int = Field(8, ge=0, description="recompute: preemptions of a sequence before it is terminated.")
