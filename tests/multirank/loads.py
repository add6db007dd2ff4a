"""Random loads for dispatchers, and what must become of them, worked out without one.

Experts are element by element, so a row's output has the same bits wherever and beside whatever it is computed; each
expert of each layer is another function, so a row at the wrong one shows.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ep.dispatch import Dispatcher
from ep.placement import ExpertPlacement, Turns

HIDDEN = 16  # bytes of a row: a multiple of 16, as GPU kernels want them


@dataclass(frozen=True)
class Load:
    """A forward of several layers. `counts`: tokens of each rank; `placements`: where the experts of each layer are;
    `one_expert`: all tokens choose the same ones."""

    counts: tuple[int, ...]
    top_k: int
    dtype: torch.dtype
    placements: tuple[ExpertPlacement, ...]
    one_expert: bool = False
    seed: int = 0

    def tokens(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of all ranks in order: x [T, H], topk_ids [T, k], weights [T, k]."""
        generator = torch.Generator().manual_seed(1000 * self.seed + layer)
        total, experts = sum(self.counts), self.placements[layer].num_logical
        x = torch.randn(total, HIDDEN, generator=generator).to(self.dtype)
        scores, topk_ids = torch.rand(total, experts, generator=generator).topk(self.top_k)
        if self.one_expert and total:
            topk_ids[:] = topk_ids[0]
        return x, topk_ids, scores / scores.sum(-1, keepdim=True)

    def share(self, rank: int) -> slice:
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])


def expert(rows: Tensor, layer: int, logical: int | Tensor) -> Tensor:
    """What logical expert `logical` of `layer`, or one for each row, int64 [N, 1], makes of rows [N, H]."""
    return (rows.float() * (1.5 + logical) - (layer + 0.25) * (1 + logical)).to(rows.dtype)


def run(dispatcher: Dispatcher, load: Load) -> list[tuple[Tensor, Tensor]]:
    """The rank's part: rows received and tokens combined, for each layer."""
    results = []
    dispatcher.begin_step(load.counts[dispatcher.rank])
    for layer, placement in enumerate(load.placements):
        x, topk_ids, weights = (tensor[load.share(dispatcher.rank)] for tensor in load.tokens(layer))
        dispatched = dispatcher.dispatch(layer, x, topk_ids, weights)
        outputs, local = dispatched.rows.clone(), placement.local_experts(dispatcher.rank)
        parts = outputs.split(dispatched.counts) if local else ()
        for logical, part in zip(local, parts, strict=True):
            part.copy_(expert(part, layer, logical))
        results.append((dispatched.rows, dispatcher.combine(outputs, dispatched.handle)))
    return results


def expected(load: Load) -> list[list[tuple[Tensor, Tensor]]]:
    """What `run` returns on each rank: rows by slot, then by source rank and token; sums in k order."""
    by_rank: list[list[tuple[Tensor, Tensor]]] = [[] for _ in load.counts]
    for layer, placement in enumerate(load.placements):
        x, topk_ids, weights = load.tokens(layer)
        shares = [ids.reshape(-1).numpy() for ids in topk_ids.split(load.counts)]
        sent = [Turns(placement, source).physical(ids) for source, ids in enumerate(shares)]
        physical = torch.from_numpy(np.concatenate(sent)).view_as(topk_ids)
        total = torch.zeros(len(x), HIDDEN)
        for k in range(load.top_k):
            total += expert(x, layer, topk_ids[:, k : k + 1]).float() * weights[:, k : k + 1]
        for rank, results in enumerate(by_rank):
            slots = range(placement.first_physical[rank], placement.first_physical[rank + 1])
            rows = [x[(physical == slot).nonzero()[:, 0]] for slot in slots]
            results.append((torch.cat([*rows, x[:0]]), total.to(load.dtype)[load.share(rank)]))
    return by_rank


def random_placement(dice: random.Random, num_logical: int, world_size: int) -> ExpertPlacement:
    """Every expert somewhere, some on several ranks, in no order; as likely as not a rank has none."""
    held: list[list[int]] = [[] for _ in range(world_size)]
    homes = dice.sample(range(world_size), dice.randint(1, world_size))
    for logical in range(num_logical):
        for rank in dice.sample(homes, dice.choice((1, 1, 1, len(homes)))):
            held[rank].append(logical)
    for experts in held:
        dice.shuffle(experts)
    return ExpertPlacement(num_logical, tuple(map(len, held)), tuple(expert for experts in held for expert in experts))


def loads_for(world_size: int, rounds: int) -> list[Load]:
    """The situations, each in a layer as it comes and in one that is placed at random, `rounds` times."""
    dice, loads = random.Random(world_size), list[Load]()
    for _ in range(rounds):
        some = tuple(dice.randint(1, 9) for _ in range(world_size))
        one = [0] * world_size
        one[dice.randrange(world_size)] = 1
        idle = [*some]
        idle[dice.randrange(world_size)] = 0
        for counts in (some, tuple(idle), tuple(one), (0,) * world_size, (40,) * world_size):
            for one_expert in (False, True):
                top_k = dice.choice((1, 2, 2, 3, 4))
                num_logical = dice.randint(top_k, 9)
                first = ExpertPlacement.contiguous(num_logical, world_size)
                placements = (first, random_placement(dice, num_logical, world_size))
                dtype = dice.choice((torch.float32, torch.float32, torch.bfloat16))
                loads.append(Load(counts, top_k, dtype, placements, one_expert, len(loads)))
    return loads
