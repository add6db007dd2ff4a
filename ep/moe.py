"""The mixture-of-experts layer: route, dispatch, compute, combine."""

from collections.abc import Callable

from torch import Tensor

from ep.dispatch import Dispatcher
from ep.routing import Router
from kernels.experts import Experts


class MoELayer:
    """Router and this rank's experts of one layer. Every rank calls it once per forward, tokens or not.

    `experts` may be replaced between two steps, together with the dispatcher's placement of this layer.
    """

    def __init__(
        self,
        layer: int,
        router: Router,
        experts: Experts,
        dispatcher: Dispatcher,
        shared: Callable[[Tensor], Tensor] | None = None,
    ):
        """layer: which MoE layer it is, from 0, dense layers not counted; shared: what every token goes through
        besides, on its own rank, [T, H] -> [T, H] with T > 0."""
        self.layer = layer
        self.router = router
        self.experts = experts
        self.dispatcher = dispatcher
        self.shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], the experts' outputs summed in k order in fp32, plus the shared part's."""
        weights, topk_ids = self.router(x)
        dispatched = self.dispatcher.dispatch(self.layer, x, topk_ids, weights)
        entry = self.dispatcher.log.enter(b"experts", len(dispatched.rows))
        outputs = self.experts(dispatched.rows, dispatched.counts)
        self.dispatcher.log.leave(entry)
        combined = self.dispatcher.combine(outputs, dispatched.handle)
        return combined.add_(self.shared(x)) if self.shared is not None and len(x) else combined
