"""Which experts a token goes to, and how much each of them counts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import rows
from kernels.invariance import sigmoid
from kernels.linear import make_linear
from kernels.rows import MOST_EXPERTS, Scores, Scoring


@dataclass(frozen=True, slots=True)
class Routing:
    """A family's rule.

    top_k: experts of a token.
    scoring: what makes scores of logits. `softmax` is over all experts, `topk_softmax` over the chosen ones alone,
        `sigmoid` looks at each by itself.
    normalize: weights are divided by their sum.
    scale: and multiplied by this in the end.
    num_groups, topk_groups: experts lie in so many groups of one size, and a token's come from the best `topk_groups`.
        A group is as good as its best expert, or with `sigmoid` as its best two together.
    """

    top_k: int
    scoring: Scoring = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits fp32 [T, E] -> weights fp32 [T, k], topk_ids int64 [T, k], best first.

    `correction`, fp32 [E], is added to sigmoid scores where experts are chosen, but not in their weights.
    """
    if routing.scoring == "topk_softmax":
        best, topk_ids = torch.topk(logits, routing.top_k, dim=-1)
        return _finish(torch.softmax(best, dim=-1), routing), topk_ids
    alone = routing.scoring == "sigmoid"
    scores = sigmoid(logits) if alone else torch.softmax(logits, dim=-1)
    choice = scores if correction is None else scores + correction
    if routing.topk_groups < routing.num_groups:
        choice = choice.masked_fill(_outside(choice, routing), -torch.inf if alone else 0.0)
    topk_ids = torch.topk(choice, routing.top_k, dim=-1).indices
    return _finish((scores if alone else choice).gather(1, topk_ids), routing), topk_ids


def _outside(choice: Tensor, routing: Routing) -> Tensor:
    """bool [T, E]: is the expert in none of the token's groups?"""
    by_group = choice.unflatten(1, (routing.num_groups, -1))
    best_of_group = 2 if routing.scoring == "sigmoid" else 1
    worth = torch.topk(by_group, best_of_group, dim=-1).values.sum(-1)
    chosen = torch.topk(worth, routing.topk_groups, dim=-1).indices
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(1, chosen, False)
    return outside.repeat_interleave(by_group.shape[2], dim=1)


def _finish(weights: Tensor, routing: Routing) -> Tensor:
    if routing.normalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + 1e-20 if routing.scoring == "sigmoid" else total)
    return weights if routing.scale == 1.0 else weights * routing.scale


class Router:
    """The linear layer that scores experts, and the rule. Owns its weights.

    All of it is in fp32, in bf16 models too, where a router rounded to bf16 would be no faster and route by rounding
    errors.
    """

    def __init__(
        self,
        routing: Routing,
        weight: Tensor,
        bias: Tensor | None = None,
        correction: Tensor | None = None,
        invariant: bool = False,
    ):
        """weight [E, H]; bias of the logits and correction of the scores (`route`): [E]."""
        self.routing = routing
        weight, bias = weight.float(), None if bias is None else bias.float()
        self.scores = Scores(weight, bias) if Scores.fit(weight) else make_linear(weight, bias, invariant)
        self.correction = None if correction is None else correction.float().contiguous()
        self._in_c = routing.topk_groups == routing.num_groups and len(weight) <= MOST_EXPERTS

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> weights fp32 [T, k], topk_ids int64 [T, k]."""
        logits, rule = self.scores(x if isinstance(self.scores, Scores) else x.float()), self.routing
        if self._in_c and rows.usable(logits, step=1):
            return rows.route(logits, rule.top_k, rule.scoring, self.correction, rule.normalize, rule.scale)
        return route(logits, rule, self.correction)
