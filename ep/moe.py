"""The mixture-of-experts layer: route, dispatch, compute, combine."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ep.dispatch import Dispatcher
from kernels.experts import Experts


def route_softmax(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Mixtral's routing: softmax over all experts, the top_k of it, made to sum to 1.

    x [T, H], router fp32 [E, H] -> weights fp32 [T, k], topk_ids int64 [T, k], best first. All of it in fp32: in bf16
    models too, where a router rounded to bf16 would be no faster and route by rounding errors.
    """
    scores = torch.softmax(F.linear(x.float(), router), dim=-1)
    weights, topk_ids = torch.topk(scores, top_k, dim=-1)
    return weights.div_(weights.sum(-1, keepdim=True)), topk_ids


class MoELayer:
    """Router and this rank's experts of one layer. Every rank calls it once per forward, tokens or not."""

    def __init__(self, layer: int, router: Tensor, experts: Experts, top_k: int, dispatcher: Dispatcher):
        """layer: which MoE layer it is, from 0; router: [E, H], kept in fp32."""
        self.layer = layer
        self.router = router.float()
        self.experts = experts
        self.top_k = top_k
        self.dispatcher = dispatcher
        self.num_rows = 0  # computed by this rank's experts since the start

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], the experts' outputs summed in k order in fp32."""
        weights, topk_ids = route_softmax(x, self.router, self.top_k)
        dispatched = self.dispatcher.dispatch(self.layer, x, topk_ids, weights)
        self.num_rows += len(dispatched.rows)
        entry = self.dispatcher.log.enter(b"experts", len(dispatched.rows))
        outputs = self.experts(dispatched.rows, dispatched.counts)
        self.dispatcher.log.leave(entry)
        return self.dispatcher.combine(outputs, dispatched.handle)
