"""Attention layers of the decoder."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dp_engine.attention_config import GroupedQueries, LatentAttention
from dp_engine.models.tensors import Tensors
from kernels.attention import AttentionPlan, paged_attention, write_kv
from kernels.linear import make_linear
from kernels.mla import mla_attention
from kernels.norm import rms_norm
from kernels.rotary import rotate_

LATENT_EPS = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps says


@dataclass(frozen=True, slots=True)
class Context:
    """What a step is for layers of one kind: the rotations [T, 1, rotated] and slots int64 [T] of its rows, and who
    attends to what."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    plan: AttentionPlan


class GroupedQueryAttention:
    """Query heads in groups that share a key and value head. One product gives queries, keys and values."""

    def __init__(self, shape: GroupedQueries, tensors: Tensors, prefix: str):
        hidden, family = tensors.config.hidden_size, tensors.config.family
        self.shape = shape
        self.q_width = shape.num_heads * shape.head_dim
        kv_width = shape.num_kv_heads * shape.head_dim
        self.qk_widths = self.q_width, kv_width
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        self.qkv = tensors.linear(names, (self.q_width, kv_width, kv_width), hidden, shape.qkv_bias)
        self.out = tensors.linear([f"{prefix}.o_proj"], [hidden], self.q_width, shape.out_bias)
        self.eps = tensors.config.rms_norm_eps
        self.head_norm: Tensor | None = None  # [heads + kv_heads, head_dim]
        self.whole_norms: tuple[Tensor, ...] = ()
        if shape.qk_norm and family.norm_per_head:
            q_norm, k_norm = (tensors.take(f"{prefix}.{part}_norm.weight", shape.head_dim) for part in "qk")
            self.head_norm = torch.cat((q_norm.expand(shape.num_heads, -1), k_norm.expand(shape.num_kv_heads, -1)))
        elif shape.qk_norm:
            self.whole_norms = tuple(
                tensors.take(f"{prefix}.{part}_norm.weight", width)
                for part, width in zip("qk", self.qk_widths, strict=True)
            )
        self.sinks = tensors.take(f"{prefix}.sinks", shape.num_heads) if family.sinks else None

    def __call__(self, normed: Tensor, x: Tensor, context: Context, cache: Tensor) -> Tensor:
        """x [T, H] plus the attention of normed [T, H]; T > 0."""
        shape = self.shape
        rotated_heads = shape.num_heads + shape.num_kv_heads
        qkv = self.qkv(normed)
        by_head = qkv.view(-1, rotated_heads + shape.num_kv_heads, shape.head_dim)
        if self.head_norm is not None:
            queries_keys = by_head[:, :rotated_heads]
            queries_keys.copy_(rms_norm(queries_keys, self.head_norm, self.eps))
        elif self.whole_norms:
            for part, weight in zip(
                qkv[:, : sum(self.qk_widths)].split(self.qk_widths, 1), self.whole_norms, strict=True
            ):
                part.copy_(rms_norm(part, weight, self.eps))
        if shape.clip is not None:
            qkv.clamp_(-shape.clip, shape.clip)
        rotate_(by_head[:, :rotated_heads, : context.cos.shape[-1]], context.cos, context.sin)
        write_kv(cache, context.slots, qkv[:, self.q_width :])
        attended = paged_attention(by_head, cache, context.plan, shape.num_heads, sinks=self.sinks)
        return self.out.add(attended, x)

    def warm_up(self, x: Tensor) -> None:
        self.out.add(self.qkv(x)[:, : self.q_width].contiguous(), x)


class MultiHeadLatentAttention:
    """Keys and values of all heads come from one latent vector per token, which is all that the cache keeps, beside a
    rotated key. One product gives the latent vector and the queries, or what queries are made of."""

    def __init__(self, shape: LatentAttention, tensors: Tensors, prefix: str):
        hidden = tensors.config.hidden_size
        self.shape = shape
        self.out = tensors.linear([f"{prefix}.o_proj"], [hidden], shape.num_heads * shape.value_dim, shape.bias)
        self.kv_norm = tensors.take(f"{prefix}.kv_a_layernorm.weight", shape.kv_rank)
        self.key_up, self.value_up = self._load_up(tensors, f"{prefix}.kv_b_proj")
        self._load_queries_and_latent(tensors, prefix)

    def _load_up(self, tensors: Tensors, name: str) -> tuple[Tensor, Tensor]:
        """From the latent to keys [heads, nope_dim, kv_rank] and values [heads, value_dim, kv_rank]."""
        shape, widths = self.shape, (self.shape.nope_dim, self.shape.value_dim)
        up = tensors.take(f"{name}.weight", shape.num_heads * sum(widths), shape.kv_rank)
        keys, values = up.unflatten(0, (shape.num_heads, -1)).split(widths, dim=1)
        return keys.contiguous(), values.contiguous()

    def _load_queries_and_latent(self, tensors: Tensors, prefix: str) -> None:
        shape, hidden = self.shape, tensors.config.hidden_size
        invariant = tensors.config.batch_invariant
        q_width = shape.num_heads * (shape.nope_dim + shape.rope_dim)
        kv_width = shape.kv_rank + shape.rope_dim
        self.q_width = shape.q_rank or q_width  # columns of the first product that belong to queries
        latent = self._halves(tensors.take(f"{prefix}.kv_a_proj_with_mqa.weight", kv_width, hidden), 1)
        self.q_norm = self.q_up = None
        if shape.q_rank is None:
            queries = self._halves(tensors.take(f"{prefix}.q_proj.weight", q_width, hidden), shape.num_heads)
        else:
            queries = tensors.take(f"{prefix}.q_a_proj.weight", shape.q_rank, hidden)
            self.q_norm = tensors.take(f"{prefix}.q_a_layernorm.weight", shape.q_rank)
            up = tensors.take(f"{prefix}.q_b_proj.weight", q_width, shape.q_rank)
            self.q_up = make_linear(self._halves(up, shape.num_heads), None, invariant)
        bias = None
        if shape.bias:
            latent_bias = self._halves(tensors.take(f"{prefix}.kv_a_proj_with_mqa.bias", kv_width), 1)
            compressed = shape.q_rank is not None
            q_bias = tensors.take(f"{prefix}.q_a_proj.bias", self.q_width) if compressed else queries.new_zeros(q_width)
            bias = torch.cat((q_bias, latent_bias))
        self.down = make_linear(torch.cat((queries, latent)), bias, invariant)

    def _halves(self, rows: Tensor, heads: int) -> Tensor:
        """Each head's last rope_dim rows in half-split order: `rotate_` knows no other."""
        if not self.shape.interleaved:
            return rows
        by_head = rows.unflatten(0, (heads, -1)).clone()
        pairs = by_head[:, -self.shape.rope_dim :].clone()
        by_head[:, -self.shape.rope_dim :] = torch.cat((pairs[:, ::2], pairs[:, 1::2]), dim=1)
        return by_head.flatten(0, 1)

    def __call__(self, normed: Tensor, x: Tensor, context: Context, cache: Tensor) -> Tensor:
        """x [T, H] plus the attention of normed [T, H]; T > 0."""
        shape = self.shape
        queries, latent, key = self.down(normed).split((self.q_width, shape.kv_rank, shape.rope_dim), dim=1)
        if self.q_up is not None and self.q_norm is not None:
            queries = self.q_up(rms_norm(queries, self.q_norm, LATENT_EPS))
        q_nope, q_rope = queries.unflatten(1, (shape.num_heads, -1)).split((shape.nope_dim, shape.rope_dim), dim=2)
        rotate_(q_rope, context.cos, context.sin)
        rotate_(key.unsqueeze(1), context.cos, context.sin)
        rows = torch.cat((rms_norm(latent, self.kv_norm, LATENT_EPS), key), dim=1)
        write_kv(cache, context.slots, rows)
        attended = mla_attention(q_nope, q_rope, rows, cache, context.plan, self.key_up, self.value_up, shape.scale)
        return self.out.add(attended, x)

    def warm_up(self, x: Tensor) -> None:
        first = self.down(x)
        if self.q_up is not None:
            self.q_up(first[:, : self.q_width].contiguous())
        self.out.add(x.new_zeros(len(x), self.shape.num_heads * self.shape.value_dim), x)
