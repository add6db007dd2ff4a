"""Counts of tokens per expert: recorded from the demo, or made up.

    python -m bench.eplb_counts MODEL_DIR     record bench/data/demo-counts.npz anew

The recording serves paragraphs of this project's docs and code as prompts, up to 16 at a time, on one rank. The demo's
experts are alike, but its routers are random: how uneven they are is what matters here.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

RECORDED = Path(__file__).parent / "data" / "demo-counts.npz"
STEPS, NEW_TOKENS, RUNNING = 256, 40, 16

# Steps of a gang: tokens, with top_k experts each.
STEP_TOKENS, TOP_K = 2048, 8


def recorded() -> np.ndarray:
    """int64 [steps, layers, experts] of the demo, as it served real text."""
    return np.load(RECORDED)["counts"].astype(np.int64)


def zipf(experts: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [steps, experts]: a few experts are liked much better than others, all the time."""
    return _drawn(np.tile(_popularity(experts, rng), (steps, 1)), rng)


def drifting(experts: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """A quarter of the load goes to an eighth of the experts, and others take their place over and over."""
    weights = np.tile(_popularity(experts, rng), (steps, 1))
    for first in range(0, steps, max(steps // 4, 1)):
        hot = rng.choice(experts, max(experts // 8, 1), replace=False)
        rows = weights[first : first + max(steps // 4, 1)]
        rows[:, hot] += rows.sum(1, keepdims=True) / 3 / len(hot)
    return _drawn(weights, rng)


def correlated(experts: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Experts belong to topics; each step is about few of them, so that those of a topic are busy together."""
    topics = max(experts // 8, 2)
    topic_of = rng.permutation(np.arange(experts) % topics)
    about = rng.dirichlet(np.full(topics, 0.5), steps)
    return _drawn(about[:, topic_of] * _popularity(experts, rng), rng)


SYNTHETIC: dict[str, Callable[[int, int, np.random.Generator], np.ndarray]] = {
    "zipf": zipf,
    "drifting": drifting,
    "correlated": correlated,
}


def _popularity(experts: int, rng: np.random.Generator) -> np.ndarray:
    weights = 1 / np.arange(1.0, experts + 1) ** 0.7
    return rng.permutation(weights / weights.sum())


def _drawn(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Tokens of each step, none twice to one expert, so no expert gets more than all of them."""
    top_k = min(TOP_K, weights.shape[1] // 4)
    chances = weights / weights.sum(1, keepdims=True) * top_k
    return rng.binomial(STEP_TOKENS, np.minimum(chances, 1.0)).astype(np.int64)


def record(model_dir: Path) -> np.ndarray:
    """int64 [STEPS, layers, experts] from a rank of its own."""
    from transformers import AutoTokenizer

    from dp_engine.config import EngineConfig
    from dp_engine.messages import Add, Sampling
    from dp_engine.model_config import ModelConfig
    from dp_engine.policies import make_scheduler
    from dp_engine.runner import ModelRunner
    from ep.dispatch import CPU, make_dispatcher
    from ep.placement import Placements
    from vote.decision import StepType

    engine = EngineConfig(policy="unified", num_blocks=512, max_num_seqs=RUNNING)
    config = ModelConfig.load(model_dir, engine)
    dispatcher = make_dispatcher("local", Placements.contiguous(config.num_layers, config.num_experts, 1), 0, 1, None)
    runner = ModelRunner.load(model_dir, engine, dispatcher, CPU, lambda line: None)
    scheduler = make_scheduler(engine, runner.num_blocks, config.max_model_len, config.eos_token_ids)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    root = Path(__file__).parents[1]
    sources = sorted(root.glob("docs/*.md")) + sorted(root.glob("dp_engine/*.py"))
    paragraphs = [part for path in sources for part in path.read_text().split("\n\n") if len(part) > 200]
    prompts = [tokenizer.encode(part)[:128] for part in np.random.default_rng(0).permutation(paragraphs).tolist()]
    counts, before = [], dispatcher.counts.copy()
    for number in range(STEPS):
        while scheduler.num_unfinished < RUNNING:
            sampling = Sampling(NEW_TOKENS, temperature=0.8, seed=len(prompts), ignore_eos=True)
            scheduler.add(Add(number, len(prompts), prompts.pop(), sampling), None)
        scheduler.plan(StepType.MIXED)
        scheduler.settle(*runner.run(scheduler.batch()))
        counts.append(dispatcher.counts - before)
        before = dispatcher.counts.copy()
    return np.array(counts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.eplb_counts", description="Record the demo's counts.")
    parser.add_argument("model_dir", type=Path)
    counts = record(parser.parse_args().model_dir)
    np.savez_compressed(RECORDED, counts=counts.astype(np.int16))
    print(f"{RECORDED}: {counts.shape}, {counts.sum()} pairs")


if __name__ == "__main__":
    main()
