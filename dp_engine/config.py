"""Settings of one rank's engine. Equal on all ranks, except for what is measured on the spot (free memory)."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

# What the published schedulers do where ours does something better; docs/scheduling.md has the reasons.
PRESETS: dict[str, dict[str, Any]] = {
    "deepinfer": {
        "policy": "phased",
        "want": "head",
        "watermark_escape": False,
        "decode_headroom": 1,
        "release": "next_decode",
        "refusal": "at_prefill",
        "readmission_margin": 0,
        "max_preemptions": None,
        "clip_drafts": False,
        "prefix_cache": False,
    },
    "vllm": {
        "policy": "unified",
        "preemption": "recompute",
        "readmission_margin": 0,
        "max_preemptions": None,
        "prefix_share": "scheduled",
    },
}


class EngineConfig(BaseModel):
    """Scheduler limits and KV pool of a rank. Lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: what the checkpoint names.")
    preset: Literal["deepinfer", "vllm"] | None = Field(
        None, description="Defaults of a published scheduler, decision for decision; settings given beside it win."
    )
    policy: Literal["phased", "unified"] = Field(
        "phased",
        description="phased: a step is either prefill or decode (DeepInfer); "
        "unified: a step mixes both under one token budget (vLLM V1).",
    )
    role: Literal["both", "prefill", "decode"] = Field(
        "both", description="What the engine does of a request. prefill and decode need a KV transfer between engines."
    )
    overlap: bool = Field(False, description="Schedule a step while the one before it is being computed.")
    batch_invariant: bool = Field(
        False,
        description="Compute a request's logits in a way that no other request and no rank changes; slower, except for "
        "bf16 where the C kernels run.",
    )

    # ---- memory
    block_size: int = Field(16, ge=1, description="Tokens per KV block.")
    num_blocks: int | None = Field(None, ge=2, description="KV blocks, null block included; default: kv_memory_gib.")
    kv_memory_gib: float = Field(1.0, gt=0, description="Memory of a rank's KV cache when num_blocks is not given.")
    num_state_slots: int | None = Field(
        None, ge=2, description="Per-sequence state areas, null slot included; default: the model keeps no such state."
    )
    prefix_cache: bool = Field(True, description="Keep computed blocks by content and share them between requests.")
    prefix_share: Literal["computed", "scheduled"] = Field(
        "computed", description="A block can be shared once it is computed, or as soon as its tokens are scheduled."
    )

    # ---- limits
    max_model_len: int | None = Field(None, ge=2, description="Longest sequence; default: the checkpoint's.")
    max_num_seqs: int = Field(64, ge=1, description="Sequences that run at the same time on a rank.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Most tokens in a step's input.")
    max_num_scheduled_tokens: int | None = Field(
        None, ge=1, description="unified: token budget without draft slots; default: max_num_batched_tokens."
    )
    chunked_prefill: bool = Field(True, description="Split prompts that exceed the token budget over several steps.")
    prefill_max_sum_seqlen_k: int | None = Field(
        None, ge=1, description="phased: most KV positions of all sequences of a prefill step; default: no limit."
    )
    cp_size: int = Field(1, ge=1, description="Context-parallel ranks: chunks are aligned to twice as many tokens.")
    lookahead_tokens: int = Field(0, ge=0, description="phased: no chunk of a prompt is smaller than this.")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="unified: most tokens of one prompt in a step while others run too; 0: no such limit."
    )

    # ---- who comes first, who has to go
    order: Literal["fcfs", "priority"] = Field(
        "fcfs", description="unified: waiting requests in order of arrival, or by priority first (lower is earlier)."
    )
    admission: Literal["current", "full"] = Field(
        "current",
        description="A request starts when its present length fits, or when its whole length can be reserved, "
        "so that nothing is ever preempted.",
    )
    preemption: Literal["terminate", "recompute"] = Field(
        "terminate",
        description="When blocks run out a sequence ends (insufficient_system_resource) or is computed again later.",
    )
    max_preemptions: int | None = Field(
        8, ge=0, description="recompute: preemptions of a sequence before it is terminated; null: no limit."
    )
    readmission_margin: int = Field(
        1, ge=0, description="A preempted sequence starts again when so many tokens more than its own fit."
    )
    kv_watermark: float = Field(0.9, gt=0, le=1, description="phased: no prefill while more of the pool is in use.")
    watermark_escape: bool = Field(True, description="phased: the watermark does not hold while nothing runs.")
    want: Literal["admissible", "head"] = Field(
        "admissible", description="phased: ask for prefill if the head could be admitted, or if there is a head at all."
    )
    decode_headroom: int = Field(
        0, ge=0, le=1, description="phased: free blocks that a decoding sequence must find even if it needs none."
    )
    release: Literal["settlement", "next_decode"] = Field(
        "settlement", description="phased: a finished sequence gives its blocks back at once, or in the next decode."
    )
    refusal: Literal["at_once", "at_prefill"] = Field(
        "at_once", description="A request that can never run is refused on arrival, or when its turn comes."
    )

    # ---- drafts
    num_draft_tokens: int = Field(
        0, ge=0, description="Tokens guessed per decode from the sequence's own text and verified in the same step."
    )
    draft_ngram_max: int = Field(3, ge=1, description="Longest run of last tokens that is looked up for a guess.")
    draft_ngram_min: int = Field(2, ge=1, description="Shortest run that is looked up.")
    clip_drafts: bool = Field(True, description="No draft beyond the token budget or the end of the sequence.")

    @property
    def cp_alignment(self) -> int:
        """Prefill chunks come in multiples of this (DeepInfer): the zigzag split over context-parallel ranks gives each
        of them a piece from the front and one from the back."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = PRESETS.get(str(data.get("preset")), {}) | data
        if data.get("policy") == "unified":
            data.setdefault("preemption", "recompute")
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role == "decode" and self.preemption == "recompute":
            raise ValueError("role decode cannot recompute: it never prefills; set preemption to terminate")
        if self.role != "both" and self.policy != "phased":
            raise ValueError("role prefill or decode needs the phased policy")
        if self.num_state_slots is not None and self.prefix_cache:
            raise ValueError("a cached prefix has no state: num_state_slots needs prefix_cache off")
        if self.role == "prefill" and self.release == "next_decode":
            raise ValueError("role prefill never decodes: it needs release at settlement")
        if self.policy == "unified" and self.refusal == "at_prefill":
            raise ValueError("refusal at_prefill needs the phased policy")
        if self.overlap and self.release == "next_decode":
            raise ValueError("overlap needs release at settlement")
        if self.admission == "full" and not self.clip_drafts:
            raise ValueError("admission full reserves no room for drafts beyond a sequence's end: it needs clip_drafts")
        if self.draft_ngram_min > self.draft_ngram_max:
            raise ValueError("draft_ngram_min is above draft_ngram_max")
        if self.max_num_batched_tokens // self.cp_alignment * self.cp_alignment < max(self.lookahead_tokens, 1):
            raise ValueError("max_num_batched_tokens is below 2 * cp_size or lookahead_tokens: no chunk would ever fit")
        return self
