"""Experts that move while requests run: texts, steps and weights stay what they are, and loads become even."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from dp_engine.messages import Sampling
from ep.placement import ExpertPlacement
from launcher.demo_model import demo_model_path
from tests.checkpoints import write_mixtral
from tests.multirank.engine_rank import RankResult, Run
from tests.multirank.gang import run_gang
from tests.multirank.rebalance_rank import EXPERTS, HIDDEN, INNER, leave_in_the_middle, run_both, serve_demo
from tests.scripted_link import Script

pytestmark = pytest.mark.xdist_group("rebalance")

RESTLESS = {"rebalance_interval_steps": 1, "rebalance_window_steps": 16, "rebalance_threshold": 0.0}
PHASED: dict[str, Any] = {"policy": "phased", "overlap": False}
UNIFIED: dict[str, Any] = {"policy": "unified", "overlap": True}
RUNS: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {  # by number of ranks: engine, experts
    2: [(PHASED, {}), (UNIFIED, {"redundant_experts": 3, "rebalance_moves_per_step": 2})],
    3: [(UNIFIED, {"redundant_experts": 2})],
}


def busy(size: int) -> Script:
    """Texts of many lengths on all ranks, a pause in which the gang sleeps, and more of them."""
    script, rng = Script(size), np.random.default_rng(3)
    for number in range(12):
        prompt = rng.integers(3, 320, int(rng.integers(2, 30))).tolist()
        turn = 1000 * (number >= 8) + 6 * (number % 8)
        script.add(turn, number + 1, prompt, Sampling(40, temperature=0.0, ignore_eos=True), rank=number)
    return script


Results = Callable[[int], list[tuple[dict[Any, RankResult], dict[int, Any]]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By number of ranks, what one gang of them found."""
    directory = write_mixtral(tmp_path_factory.mktemp("model") / "tiny", seed=1, hidden=HIDDEN, intermediate=INNER)

    @cache
    def of(size: int) -> list[tuple[dict[Any, RankResult], dict[int, Any]]]:
        runs = {}
        for number, (engine, experts) in enumerate(RUNS[size]):
            runs[number, "still"] = Run(busy(size), engine)
            runs[number, "moving"] = Run(busy(size), engine, experts=RESTLESS | experts)
        return run_gang(run_both, size, directory, runs)

    return of


@pytest.mark.parametrize("size", RUNS)
def test_texts_and_steps_stay_what_they_are(results: Results, size: int) -> None:
    for number in range(len(RUNS[size])):
        ranks = [runs[number, "moving"] for runs, _ in results(size)]
        for still, moving in zip((runs[number, "still"] for runs, _ in results(size)), ranks, strict=True):
            assert seen_by_clients(moving) == seen_by_clients(still)
            assert moving.report.experts is not None
            assert moving.report.experts.rebalances >= 10
            assert moving.report.experts.layers_placed >= 20
        assert sum(rank.report.experts.received for rank in ranks) >= 40  # type: ignore[union-attr]
        assert len({rank.num_collectives for rank in ranks}) == 1


def seen_by_clients(result: RankResult) -> tuple[Any, ...]:
    """Texts and steps."""
    texts = {request: answer.tokens for request, answer in result.answers.items()}
    report = result.report
    return texts, result.turns, report.prefill_steps, report.decode_steps, report.mixed_steps, report.idle_sleeps


def packings(experts: frozenset[int], sizes: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to put so many experts on each rank."""
    if not sizes:
        yield []
    for some in combinations(sorted(experts), sizes[0]) if sizes else ():
        for rest in packings(experts - set(some), sizes[1:]):
            yield [list(some), *rest]


def best_packing(counts: np.ndarray, sizes: Sequence[int]) -> float:
    """The lowest sum over steps of the busiest rank's rows. counts: [T, E]."""
    everybody = frozenset(range(EXPERTS))
    return min(np.max([counts[:, part].sum(1) for part in packing], 0).sum() for packing in packings(everybody, sizes))


@pytest.mark.parametrize("size", RUNS)
def test_the_busiest_ranks_share_is_that_of_the_best_packing(results: Results, size: int) -> None:
    for redundant in (0, 4):
        found = [found[redundant] for _, found in results(size)]
        counts, before, after, placements = zip(*found, strict=True)
        total = np.sum(counts, axis=0)
        was, now = (np.max(rows, 0).sum() / total.sum() for rows in (before, after))
        sizes = placements[0].layers[0].local_counts
        best = 1 / size if redundant else best_packing(total, sizes) / total.sum()
        assert now <= 1.08 * best if redundant else now <= 1.05 * best  # turns of few tokens are not quite even
        assert was > now
        assert [placement.epoch for placement in placements] == [1] * size
        assert len({placement.digest for placement in placements}) == 1


def test_a_rank_that_leaves_while_experts_move_is_noticed() -> None:
    noticed, left = run_gang(leave_in_the_middle, 2, group_timeout_s=3.0)
    assert "for moving experts, failed" in noticed
    assert left == "left"


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.skipif(not demo_model_path().exists(), reason="no demo model in the cache: make model")
@pytest.mark.parametrize("size", [2, 3])
def test_demo_traffic(size: int) -> None:
    """Real text through the demo's random routers: in the mean over its layers, the busiest rank's share."""
    tokenizer, script = AutoTokenizer.from_pretrained(demo_model_path()), Script(size)
    source = Path("docs/scheduling.md").read_text()
    texts = [text for text in source.split("\n\n") if len(text) > 100]
    for number in range(130):
        sampling = Sampling(96, temperature=0.8, seed=number, ignore_eos=True)
        prompt = tokenizer.encode(texts[number % len(texts)])[:64]
        script.add(3 * number, number + 1, prompt, sampling, rank=number)
    experts = {"rebalance_interval_steps": 176, "rebalance_window_steps": 176, "rebalance_threshold": 0.01}
    run = Run(script, {"block_size": 16, "num_blocks": 600, "policy": "unified"}, experts=experts)
    before, after, counts, ranks = zip(
        *run_gang(serve_demo, size, demo_model_path(), run, timeout_s=900.0), strict=True
    )
    total = np.sum(counts, axis=0)
    sizes = ExpertPlacement.contiguous(EXPERTS, size).local_counts
    best = np.mean([best_packing(layer[None], sizes) / layer.sum() for layer in total])
    was, now = ((np.max(rows, 0) / np.sum(rows, 0)).mean() for rows in (before, after))
    print(f"dp {size}: busiest rank's share {was:.4f}, now {now:.4f}, at best {best:.4f}; {ranks[0].report.experts}")
    assert now <= 1.05 * best
    assert was > 1.05 * best
