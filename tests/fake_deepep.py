"""DeepEP's two buffers over a gloo group, on the CPU: what `ep.deepep` relies on, and as picky as the kernels are.

As there, a token goes once to each rank that has one of its experts, where it comes with that rank's own expert numbers
(-1: another rank's); combine adds the ranks' rows in fp32, rank by rank, and knows no weights.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Kernels:
    def __init__(self, group: Any, max_tokens: int | None, hidden: int):
        self.group, self.max_tokens, self.hidden = group, max_tokens, hidden

    def layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens per rank, tokens per expert, and which token goes to which rank, bool [T, ranks]."""
        size = self.group.size()
        assert num_experts % size == 0, "each rank must have as many experts"
        chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.int64)
        chosen.scatter_(1, torch.where(topk_idx < 0, num_experts, topk_idx), 1)
        chosen = chosen[:, :num_experts]
        in_rank = chosen.unflatten(1, (size, -1)).sum(-1) > 0
        return in_rank.sum(0, dtype=torch.int32), chosen.sum(0, dtype=torch.int32), in_rank

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_experts: int) -> tuple[Any, ...]:
        """Tokens, experts, weights, counts, handle."""
        assert len(x) > 0 and x.is_contiguous() and x.shape[1] == self.hidden and topk_weights.dtype == torch.float32
        assert self.max_tokens is None or len(x) <= self.max_tokens, "more tokens than the buffer was made for"
        assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
        size, rank = self.group.size(), self.group.rank()
        _, _, in_rank = self.layout(topk_idx, num_experts)
        sent = [in_rank[:, other].nonzero().flatten() for other in range(size)]
        outgoing = torch.cat(sent)
        send_splits = [len(part) for part in sent]
        receive_splits = self._exchange(torch.tensor(send_splits), [1] * size, [1] * size).tolist()
        tokens, experts, weights = (
            self._exchange(tensor[outgoing], send_splits, receive_splits) for tensor in (x, topk_idx, topk_weights)
        )
        per_rank = num_experts // size
        local = experts - rank * per_rank
        local[(local < 0) | (local >= per_rank)] = -1
        counts = torch.bincount(local[local >= 0], minlength=per_rank).tolist()
        return tokens, local, weights, counts, (outgoing, send_splits, receive_splits, len(x))

    def combine(self, x: Tensor, handle: tuple[Any, ...]) -> Tensor:
        outgoing, send_splits, receive_splits, num_tokens = handle
        assert len(x) == sum(receive_splits) and x.is_contiguous()
        returned = self._exchange(x, receive_splits, send_splits)
        total = torch.zeros(num_tokens, x.shape[1])
        for tokens, rows in zip(outgoing.split(send_splits), returned.split(send_splits), strict=True):
            total[tokens] += rows.float()
        return total.to(x.dtype)

    def _exchange(self, rows: Tensor, send_splits: list[int], receive_splits: list[int]) -> Tensor:
        received = rows.new_empty(sum(receive_splits), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive_splits, send_splits, group=self.group)
        return received


class ElasticBuffer:
    """V2's: receives in the order of the sources only if `deterministic`, else in some order."""

    def __init__(
        self, group: Any, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int, deterministic: bool = False,
        num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100,
    ):  # fmt: skip
        assert num_topk > 0 and min(num_cpu_timeout_secs, num_gpu_timeout_secs) > 0 and deterministic
        self._kernels = _Kernels(group, num_max_tokens_per_rank, hidden)

    def dispatch(
        self, x: Tensor, *, topk_idx: Tensor, topk_weights: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Any, None]:
        *received, counts, inner = self._kernels.dispatch(x, topk_idx, topk_weights, num_experts)
        tokens, experts, weights = received
        return tokens, experts, weights, SimpleNamespace(num_recv_tokens_per_expert_list=counts, inner=inner), None

    def combine(self, x: Tensor, *, handle: Any) -> tuple[Tensor, None, None]:
        return self._kernels.combine(x, handle.inner), None, None


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """Legacy: wants the layout it has computed, and knows some numbers of ranks only."""

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int):
        assert num_nvl_bytes > 0
        self._kernels = _Kernels(group, None, 0)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, None, Tensor, Tensor, None]:
        per_rank, per_expert, in_rank = self._kernels.layout(topk_idx, num_experts)
        return per_rank, None, per_expert, in_rank, None

    def dispatch(
        self, x: Tensor, *, topk_idx: Tensor, topk_weights: Tensor, num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: None, is_token_in_rank: Tensor, num_tokens_per_expert: Tensor,
    ) -> tuple[Any, ...]:  # fmt: skip
        layout = self._kernels.layout(topk_idx, len(num_tokens_per_expert))
        given = num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
        assert all(torch.equal(found, wanted) for found, wanted in zip(given, layout, strict=True))
        self._kernels.hidden = x.shape[1]
        return (*self._kernels.dispatch(x, topk_idx, topk_weights, len(num_tokens_per_expert)), None)

    def combine(self, x: Tensor, handle: Any) -> tuple[Tensor, None, None]:
        return self._kernels.combine(x, handle), None, None


V2 = SimpleNamespace(ElasticBuffer=ElasticBuffer, Buffer=Buffer, topk_idx_t=torch.int64)
LEGACY = SimpleNamespace(Buffer=Buffer)
