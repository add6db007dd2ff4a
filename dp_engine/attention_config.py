"""The attention of a model, as config.json has it."""

from dataclasses import dataclass

from dp_engine.families import Family
from dp_engine.json_file import JsonFile
from dp_engine.rope_config import RopeConfig


@dataclass(frozen=True)
class GroupedQueries:
    """Attention in which groups of query heads share a key and value head. qk_norm: of q and k before the rotation,
    over a head or over all of them. clip: q, k and v stay within +-clip."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    clip: float | None

    @property
    def kv_shape(self) -> tuple[int, ...]:
        return 2, self.num_kv_heads, self.head_dim

    @property
    def cached_dims(self) -> tuple[int, int]:
        """Of a key and of a value in the cache."""
        return self.head_dim, self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Attention over keys and values that are kept as one latent vector of kv_rank, and a rotated key of rope_dim that
    all heads share. q_rank: None when queries are not compressed. interleaved: the checkpoint has the two features of a
    rotated pair side by side. scale: of the scores."""

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool
    interleaved: bool
    scale: float

    @property
    def kv_shape(self) -> tuple[int, ...]:
        return (self.kv_rank + self.rope_dim,)

    @property
    def cached_dims(self) -> tuple[int, int]:
        """Of a key and of a value in the cache; the value is part of the key."""
        return self.kv_rank + self.rope_dim, self.kv_rank


def head_dim(config: JsonFile) -> int:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if config.values.get("head_dim") is None and hidden % heads:
        raise config.error("head_dim", f"is missing and hidden_size {hidden} is no multiple of {heads} attention heads")
    return config.integer("head_dim", default=hidden // heads)


def load_grouped_queries(config: JsonFile, family: Family) -> GroupedQueries:
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.error("num_attention_heads", f"{heads} is no multiple of num_key_value_heads {kv_heads}")
    return GroupedQueries(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim(config),
        qkv_bias=config.flag(family.qkv_bias),
        out_bias=config.flag(family.out_bias),
        qk_norm=config.flag(family.qk_norm),
        clip=None if config.get("clip_qkv") is None else config.number("clip_qkv"),
    )


def load_latent_attention(config: JsonFile, family: Family, rope: RopeConfig) -> LatentAttention:
    heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", default=heads) != heads:
        raise config.error("num_key_value_heads", f"must be num_attention_heads, {heads}, with latent attention")
    nope, rotated = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    return LatentAttention(
        num_heads=heads,
        q_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=config.integer("v_head_dim"),
        bias=config.flag(family.qkv_bias),
        interleaved=config.flag("rope_interleave"),
        scale=(nope + rotated) ** -0.5 * rope.mscale**2,
    )
