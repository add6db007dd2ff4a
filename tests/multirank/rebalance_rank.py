"""A rank whose experts move, with a model and without. Free of `transformers`, whose import takes seconds."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from ep.config import ExpertConfig
from ep.dispatch import CollectiveFailed, make_dispatcher
from ep.moe import MoELayer
from ep.placement import Placements
from ep.rebalance import Rebalancer
from ep.routing import Router, Routing
from kernels.experts import ExpertWeights, make_experts
from tests.multirank.engine_rank import RankResult, Run, run_all

HIDDEN, INNER, EXPERTS = 64, 96, 8


class Checked(Rebalancer):
    """Compares, after each piece, what this rank computes with to what the checkpoint has."""

    def __init__(self, model_dir: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._checkpoint = load_file(model_dir / "model.safetensors")

    def advance(self) -> None:
        received = self.counters.received
        super().advance()
        assert self.counters.received - received <= self._config.rebalance_moves_per_step
        for layer in self._layers:
            placement = self.dispatcher.placements.layers[layer.layer]
            for slot, expert in enumerate(placement.local_experts(self.dispatcher.rank)):
                prefix = f"model.layers.{layer.layer}.block_sparse_moe.experts.{expert}"
                for part, tensor in zip(("w1", "w3", "w2"), layer.experts.weights(slot).tensors(), strict=True):
                    assert torch.equal(tensor, self._checkpoint[f"{prefix}.{part}.weight"]), (layer.layer, slot, part)


def expert(number: int) -> ExpertWeights:
    """All its weights are its number, and a half."""
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    return ExpertWeights(*(torch.full(shape, number + 0.5) for shape in shapes))


def skewed(num_tokens: int, rng: np.random.Generator) -> torch.Tensor:
    """topk_ids of tokens that like the first experts best."""
    weights = 1 / np.arange(1.0, EXPERTS + 1)
    ids = [rng.choice(EXPERTS, 2, replace=False, p=weights / weights.sum()) for _ in range(num_tokens)]
    return torch.tensor(np.array(ids).reshape(-1, 2))


class Stand:
    """One layer on a rank, fed without a router."""

    def __init__(self, rank: int, group: Any, **settings: Any) -> None:
        config = ExpertConfig(rebalance_interval_steps=1, rebalance_window_steps=16, **settings)
        placements = Placements.contiguous(1, EXPERTS, group.size(), config.redundant_experts)
        self.dispatcher = make_dispatcher("alltoall", placements, rank, group.size(), group)
        experts = make_experts([expert(number) for number in self.held])
        self.layer = MoELayer(0, Router(Routing(2), torch.zeros(EXPERTS, HIDDEN)), experts, self.dispatcher)
        self.rebalancer = Rebalancer([self.layer], self.dispatcher, group, config)

    @property
    def held(self) -> tuple[int, ...]:
        return self.dispatcher.placements.layers[0].local_experts(self.dispatcher.rank)

    def step(self, topk_ids: torch.Tensor) -> int:
        """Rows for this rank. Checks that the first choice of each token has been computed by that expert."""
        self.dispatcher.begin_step(len(topk_ids))
        weights = torch.tensor([1.0, 0.0]).expand(len(topk_ids), 2)
        sent = self.dispatcher.dispatch(0, torch.ones(len(topk_ids), HIDDEN), topk_ids, weights)
        numbers = torch.tensor(self.held, dtype=torch.float32).repeat_interleave(torch.tensor(sent.counts))
        computed = self.dispatcher.combine(numbers[:, None] * sent.rows, sent.handle)
        assert torch.equal(computed[:, 0], topk_ids[:, 0].float())
        self.rebalancer.step_done()
        return len(sent.rows)

    def go_round(self) -> None:
        """One round of rebalancing, with steps in between."""
        rounds = self.rebalancer.counters.rounds
        while self.rebalancer.counters.rounds == rounds:
            assert self.rebalancer.wanted
            self.rebalancer.advance()
            self.step(torch.tensor([[0, 7]]))


def even_out(rank: int, group: Any) -> dict[int, Any]:
    """By number of redundant experts: a step's counts and this rank's rows, before and after."""
    found = {}
    for redundant in (0, 4):
        stand = Stand(rank, group, redundant_experts=redundant)
        steps = [skewed(12 * (rank + 1), np.random.default_rng(9 * step + rank)) for step in range(16)]
        before = [stand.step(step) for step in steps]
        stand.go_round()
        after = [stand.step(step) for step in steps]
        counts = np.stack([np.bincount(step.reshape(-1), minlength=EXPERTS) for step in steps])
        values = [float(stand.layer.experts.weights(slot).down[0, 0]) for slot in range(len(stand.held))]
        assert values == [number + 0.5 for number in stand.held]
        found[redundant] = counts, before, after, stand.dispatcher.placements
    return found


def leave_in_the_middle(rank: int, group: Any) -> str:
    """Rank 1 goes while experts move."""
    stand = Stand(rank, group)
    for step in range(16):
        stand.step(skewed(12, np.random.default_rng(step)))
    stand.rebalancer.advance()
    if rank == 1:
        return "left"
    try:
        for _ in range(3):
            stand.rebalancer.advance()
    except CollectiveFailed as error:
        return str(error)
    return "nothing noticed"


def run_both(
    rank: int, group: Any, directory: Path, runs: Mapping[Any, Run]
) -> tuple[dict[Any, RankResult], dict[int, Any]]:
    """With a model and without, in one gang."""
    return run_all(rank, group, directory, runs, partial(Checked, directory)), even_out(rank, group)


class Judged(Rebalancer):
    """Keeps what its ranks had to compute before experts moved for the first time."""

    rows_before: list[int] | None = None

    def advance(self) -> None:
        if self.rows_before is None:
            self.rows_before = self.recent_rows()
        super().advance()

    def recent_counts(self) -> np.ndarray:
        """int64 [layers, E]: what this rank's tokens asked for in the last steps."""
        return self._loads.gain()


def serve_demo(rank: int, group: Any, model_dir: Path, run: Run) -> tuple[list[int], list[int], np.ndarray, RankResult]:
    """Rows of this rank by layer before experts moved, and in the end; what its tokens asked for in the end."""
    made: list[Judged] = []

    def make(*arguments: Any) -> Judged:
        made.append(Judged(*arguments))
        return made[0]

    result = run_all(rank, group, model_dir, {0: run}, make)[0]
    assert made[0].rows_before is not None, "experts have not moved"
    return made[0].rows_before, made[0].recent_rows(), made[0].recent_counts(), result
