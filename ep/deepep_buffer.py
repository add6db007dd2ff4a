"""The two buffers of DeepEP behind one small interface: `ElasticBuffer` of V2, `Buffer` before it.

Written against deep_ep 2.1.0: README.md, docs/legacy.md, deep_ep/buffers/elastic.py and legacy.py. Relied upon:

- experts are numbered rank by rank, each rank having num_experts / num_ranks of them; topk_idx -1 means no expert;
- `dispatch(x, topk_idx, topk_weights, ...)` sends a token once to each rank that has one of its experts. It comes with
  its topk_idx as numbers of that rank's experts, -1 for those of other ranks, with its weights, and with the number of
  tokens per expert on the host (V2: `handle.num_recv_tokens_per_expert_list`; legacy: the fourth result);
- `combine(x, handle)` adds up, at the source and without weights, what the ranks return of each token; x and result
  are bf16, sums are fp32;
- without `async_...` arguments results may be used on the current stream at once.

Legacy wants the layout computed before, by `get_dispatch_layout`, and has settings for some numbers of ranks only.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ep.dispatch import BackendUnavailable


@dataclass(frozen=True, slots=True)
class Received:
    """tokens [N, H]; experts int64 [N, k], -1 for other ranks'; weights fp32 [N, k]; counts: pairs per local expert."""

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    counts: Sequence[int]
    handle: Any


class ExpertBuffer(Protocol):
    """Between the ranks of a group."""

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int) -> Received:
        """x [T, H], T at least 1; experts int64 [T, k] of `num_experts`, -1 for none; weights fp32 [T, k]."""
        ...

    def combine(self, x: Tensor, handle: Any) -> Tensor:
        """x [N, H] as received -> [T, H] summed over the ranks."""
        ...


class Elastic:
    """V2. Received tokens are ordered by source, so that a run can be repeated bit for bit."""

    def __init__(self, module: Any, group: ProcessGroup, max_tokens: int, hidden: int, top_k: int, timeout_s: float):
        self._dtype = module.topk_idx_t
        self._buffer = module.ElasticBuffer(
            group, num_max_tokens_per_rank=max_tokens, hidden=hidden, num_topk=top_k, deterministic=True,
            num_cpu_timeout_secs=max(1, int(timeout_s)), num_gpu_timeout_secs=max(1, int(timeout_s)),
        )  # fmt: skip

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int) -> Received:
        tokens, local, their_weights, handle, _ = self._buffer.dispatch(
            x, topk_idx=experts.to(self._dtype), topk_weights=weights, num_experts=num_experts
        )
        return Received(tokens, local, their_weights, handle.num_recv_tokens_per_expert_list, handle)

    def combine(self, x: Tensor, handle: Any) -> Tensor:
        total: Tensor = self._buffer.combine(x, handle=handle)[0]
        return total


class Legacy:
    """V1's kernels for high throughput. Its time-outs are its own."""

    def __init__(self, module: Any, group: ProcessGroup, hidden: int, row_bytes: int):
        self._dtype = getattr(module, "topk_idx_t", torch.int64)
        size, kind = group.size(), module.Buffer
        try:
            configs = kind.get_dispatch_config(size), kind.get_combine_config(size)
        except AssertionError:
            raise BackendUnavailable(
                f"experts.backend deepep: DeepEP before V2 has no settings for {size} ranks; install V2 or use alltoall"
            ) from None
        over_nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
        over_rdma = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
        self._buffer = kind(group, over_nvlink, over_rdma)

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int) -> Received:
        experts = experts.to(self._dtype)
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(experts, num_experts)
        tokens, local, their_weights, counts, handle, _ = self._buffer.dispatch(
            x, topk_idx=experts, topk_weights=weights, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        )  # fmt: skip
        return Received(tokens, local, their_weights, counts, handle)

    def combine(self, x: Tensor, handle: Any) -> Tensor:
        total: Tensor = self._buffer.combine(x, handle)[0]
        return total


def make_buffer(
    module: Any, group: ProcessGroup, max_tokens: int, hidden: int, row_bytes: int, top_k: int, timeout_s: float
) -> ExpertBuffer:
    """V2's if `module` has it. A collective over `group`."""
    if hasattr(module, "ElasticBuffer"):
        return Elastic(module, group, max_tokens, hidden, top_k, timeout_s)
    return Legacy(module, group, hidden, row_bytes)


def find_deepep(device: torch.device) -> Any:
    """The installed package. Raises BackendUnavailable with what to do."""
    if device.type != "cuda":
        raise BackendUnavailable(
            f"experts.backend deepep moves tokens between NVIDIA GPUs, and this rank's are on {device}; "
            "use auto, shm, alltoall or allgather"
        )
    try:
        return import_module("deep_ep")
    except (ImportError, AssertionError, OSError) as error:  # it checks CUDA and NCCL by assertions when imported
        raise BackendUnavailable(
            f"experts.backend deepep needs the package deep_ep, which cannot be imported on {platform.node()} "
            f"({type(error).__name__}: {error}): build and install it from https://github.com/deepseek-ai/DeepEP, "
            "or use auto, alltoall or allgather"
        ) from error
