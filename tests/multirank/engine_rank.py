"""A rank as `dp_engine.rank` puts it together, with a script in the place of the router.

Free of `transformers`, whose import is most of a process's start.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import zmq

from dp_engine.compiler import GrammarCompiler
from dp_engine.config import EngineConfig
from dp_engine.engine import Engine, StepCounters
from dp_engine.grammar import Vocabulary
from dp_engine.link import RankKeys
from dp_engine.messages import Report
from dp_engine.model_config import ModelConfig
from dp_engine.policies import make_scheduler
from dp_engine.rank import place_experts, run_rank
from dp_engine.runner import ModelRunner, max_step_tokens
from dp_engine.spec import RankSpec
from dp_engine.worker import make_worker
from ep.config import ExpertConfig
from ep.dispatch import CPU, make_dispatcher
from ep.rebalance import Rebalancer
from tests.scripted_link import Answer, Script, ScriptedLink
from vote.config import VoteConfig
from vote.errors import SettingsMismatch
from vote.group import SoloGroup, TorchControlGroup
from vote.protocol import StepProtocol
from vote.recorder import Recorder
from vote.witness import Witness

GROUP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Run:
    """What a gang is asked to do, and its settings. Prefix blocks have 8 tokens unless `engine` says otherwise."""

    script: Script
    engine: Mapping[str, Any]
    vote: Mapping[str, Any] = field(default_factory=dict)
    experts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankResult:
    """What a rank answered, its last report, and the data collectives it entered."""

    answers: dict[int, Answer]
    rejected: dict[int, str]
    report: Report
    num_collectives: int
    turns: int


def run_alone(directory: Path, run: Run) -> RankResult:
    """A gang of one, in this process."""
    return _run(directory, run, SoloGroup(), Witness(Recorder(0, 1)), None)


def run_all(
    rank: int,
    group: Any,
    directory: Path,
    runs: Mapping[Any, Run],
    make_rebalancer: Callable[..., Rebalancer] = Rebalancer,
) -> dict[Any, RankResult]:
    """One rank of a gang (`tests.multirank.gang`): all runs, one after the other."""
    witness = Witness(Recorder(rank, group.size()))
    data = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    results = {}
    for name, run in runs.items():
        try:
            results[name] = _run(directory, run, TorchControlGroup(group), witness, data, make_rebalancer)
        except Exception as error:
            witness.recorder.last_words(f"{name}: {error!r}")
            raise RuntimeError(f"in run {name}") from error
    return results


def _run(
    directory: Path,
    run: Run,
    control: Any,
    witness: Witness,
    data: Any,
    make_rebalancer: Callable[..., Rebalancer] = Rebalancer,
) -> RankResult:
    config = EngineConfig(**{"block_size": 8, "num_blocks": 80, **run.engine})
    experts = ExpertConfig(**run.experts)
    placements = place_experts(ModelConfig.load(directory, config), control.size, experts)
    dispatcher = make_dispatcher(
        "auto", placements, control.rank, control.size, data,
        max_tokens=max_step_tokens(config), timeout_s=GROUP_TIMEOUT_S,
    )  # fmt: skip
    runner = ModelRunner.load(directory, config, dispatcher, CPU, lambda line: None)
    counters = StepCounters()
    rebalancer = make_rebalancer(runner.moe_layers, dispatcher, data, experts)
    worker = make_worker(runner, config.overlap, 1, rebalancer=rebalancer)
    mixed = config.policy == "unified"
    protocol = StepProtocol(
        control, VoteConfig(**run.vote), witness, mixed=mixed,
        count_collectives=lambda: worker.num_collectives, placement=lambda: worker.placement,
        on_ballot=counters.count_ballot,
    )  # fmt: skip
    model = runner.model_config
    scheduler = make_scheduler(config, runner.num_blocks, model.max_model_len, model.eos_token_ids)
    link = ScriptedLink(run.script, control.rank)
    parts = link, protocol, scheduler, worker, counters
    compiler = GrammarCompiler(lambda: Vocabulary.load(directory, model.vocab_size, model.eos_token_ids))
    options: Any = {"mixed": mixed, "overlap": config.overlap, "compiler": compiler, "rebalancer": rebalancer}
    Engine(*parts, **options).run()  # type: ignore[arg-type]
    assert worker.num_collectives == runner.num_collectives, "stopped with a step in flight"
    assert scheduler.num_unfinished == 0 and scheduler.pool.num_used == 0
    scheduler.check_integrity()
    return RankResult(link.answers(), link.rejected, link.reports[-1], runner.num_collectives, link.turn)


def start(rank: int, group: Any, directory: Path, engines: Sequence[Mapping[str, Any]]) -> str:
    """A whole rank, up to the comparison of the settings, which fails; there is no router at its endpoint. Returns the
    error."""
    (server, _), (public, secret) = zmq.curve_keypair(), zmq.curve_keypair()
    spec = RankSpec(
        rank=rank,
        world_size=group.size(),
        epoch=1,
        router_endpoint="tcp://127.0.0.1:9",
        keys=RankKeys("launch", server.decode(), public.decode(), secret.decode()),
        model_dir=str(directory),
        engine=EngineConfig(num_blocks=20, **engines[rank]),
        vote=VoteConfig(),
        experts=ExpertConfig(),
        start_timeout_s=60.0,
        threads=1,
        host="127.0.0.1",
    )
    try:
        run_rank(spec, dist.distributed_c10d._get_default_store())
    except SettingsMismatch as error:
        return str(error)
    raise AssertionError("the rank has served")
