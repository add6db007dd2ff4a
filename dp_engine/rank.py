"""The process of one rank: joins the gang, checks itself against the others, loads, and runs the step loop."""

import hashlib
import logging
import os
import platform
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dp_engine import messages
from dp_engine.chaos import Chaos
from dp_engine.checkpoint import CheckpointError
from dp_engine.compiler import GrammarCompiler
from dp_engine.engine import Engine, StepCounters
from dp_engine.grammar import Vocabulary
from dp_engine.kv_cache import num_blocks_for
from dp_engine.link import SILENT_VOTES, Link, LinkHandler
from dp_engine.loading import LoadingReports, num_reports
from dp_engine.model_config import ModelConfig, ModelConfigError
from dp_engine.policies import make_scheduler
from dp_engine.runner import ModelRunner, max_step_tokens
from dp_engine.spec import RankSpec
from dp_engine.worker import make_worker
from ep.config import ExpertConfig
from ep.dispatch import Dispatcher, make_dispatcher
from ep.placement import Placements
from ep.rebalance import Rebalancer
from vote.ballot import PROTOCOL_VERSION
from vote.errors import LockstepBroken, VoteError
from vote.group import Groups
from vote.observers import ObserverKeys, ObserverProcess, Observers, gather_observers
from vote.protocol import StepProtocol
from vote.recorder import Recorder
from vote.settings import Settings, compare_settings, digest, wait_for_keys
from vote.witness import Witness

log = logging.getLogger(__name__)


def run_rank(spec: RankSpec, store: dist.Store | None) -> None:
    """Join, load, serve until shut down. `store`: the gang's rendezvous (None for a gang of one).

    Raises what ended the rank: vote.errors.VoteError, CheckpointError, or the exception of a step.
    """
    torch.set_num_threads(spec.threads)
    recorder = Recorder(spec.rank, spec.world_size, shared=True)
    observer = ObserverProcess(recorder, spec.host, _observer_keys(spec))
    link = Link(spec.router_endpoint, spec.rank, spec.keys, SILENT_VOTES * spec.vote.control_timeout_s)
    _log_to(link)
    groups = Groups()
    try:
        engine = _join(spec, store, link, recorder, observer, groups)
        engine.run()
    except VoteError as error:
        _tell(link, error)
        raise
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"
        recorder.last_words(words)
        groups.abandon()
        if not isinstance(error, (ModelConfigError, CheckpointError)):
            log.exception("rank %d failed", spec.rank)
        link.send(messages.Goodbye(spec.rank, words))
        raise
    else:
        link.send(messages.Goodbye(spec.rank, ""))
        observer.close()
    finally:
        link.close()


def _tell(link: Link, error: VoteError) -> None:
    """The report goes into this rank's own log and to the launcher, which shows it once."""
    if isinstance(error, LockstepBroken) and error.report:
        print(error.report, file=sys.stderr, flush=True)
        link.send(messages.Diagnosis(link.rank, error.report, sorted(error.culprits), error.innocent))
    link.send(messages.Goodbye(link.rank, str(error)))


def code_digest() -> str:
    """Stands for the source files of the packages that run on a rank: ranks with other code do not belong together."""
    root = Path(__file__).resolve().parents[1]
    found = hashlib.blake2b(digest_size=8)
    for package in ("dp_engine", "ep", "kernels", "vote"):
        for path in sorted((root / package).rglob("*.[pc]*")):
            if path.suffix in (".py", ".c"):
                found.update(f"{path.relative_to(root)}\0{len(data := path.read_bytes())}\0".encode() + data)
    return found.hexdigest()


def gang_settings(spec: RankSpec, config: ModelConfig, checkpoint_digest: str, num_blocks: int) -> Settings:
    """What must be equal on all ranks, by name. The names appear in the error if it is not."""
    settings = {
        "code": code_digest(),
        "protocol": f"{PROTOCOL_VERSION}.{messages.PROTOCOL_VERSION}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "launch": spec.keys.launch_id,
        "epoch": str(spec.epoch),
        "world_size": str(spec.world_size),
        "checkpoint": checkpoint_digest,
        "max_model_len": str(config.max_model_len),
        "kv_blocks": str(num_blocks),
    }
    for section in ("engine", "vote", "experts"):
        for name, value in getattr(spec, section).model_dump().items():
            settings[f"{section}.{name}"] = str(value)
    return settings


def _observer_keys(spec: RankSpec) -> ObserverKeys:
    return ObserverKeys(spec.keys.client_public, spec.keys.client_secret)


def _join(
    spec: RankSpec,
    store: dist.Store | None,
    link: Link,
    recorder: Recorder,
    observer: ObserverProcess,
    groups: Groups,
) -> Engine:
    """Check the settings before anything is loaded, load, wait for the slowest, warm up, say Hello."""
    device = choose_device(spec)
    config = ModelConfig.load(Path(spec.model_dir), spec.engine)
    num_blocks = num_blocks_for(config, spec.engine)
    settings = gang_settings(spec, config, config.digest, num_blocks)
    observers = _meet(spec, store, settings, observer)
    dispatcher = _connect(spec, store, place_experts(config, spec.world_size, spec.experts), device, recorder, groups)
    runner = _load(spec, store, link, dispatcher)
    runner.warm_up()
    counters = StepCounters()
    rebalancer = Rebalancer(runner.moe_layers, dispatcher, groups.data, spec.experts)
    worker = make_worker(runner, spec.engine.overlap, spec.threads, recorder.data, rebalancer)
    mixed = spec.engine.policy == "unified"
    protocol = StepProtocol(
        groups.control, spec.vote, Witness(recorder, observers),
        mixed=mixed, settings=digest(settings), epoch=spec.epoch,
        count_collectives=lambda: worker.num_collectives, placement=lambda: worker.placement,
        on_ballot=counters.count_ballot,
    )  # fmt: skip
    scheduler = make_scheduler(spec.engine, num_blocks, config.max_model_len, config.eos_token_ids)
    _introduce(spec, link, num_blocks, config.max_model_len, observer.address)
    compiler = GrammarCompiler(lambda: Vocabulary.load(Path(spec.model_dir), config.vocab_size, config.eos_token_ids))
    return Engine(
        link, protocol, scheduler, worker, counters,
        mixed=mixed, overlap=spec.engine.overlap, ring=recorder.control,
        chaos=Chaos(link, scheduler) if spec.chaos else None, compiler=compiler, rebalancer=rebalancer,
    )  # fmt: skip


def _meet(spec: RankSpec, store: dist.Store | None, settings: Settings, observer: ObserverProcess) -> Observers | None:
    """All ranks are there and have the same settings. Returns their observers; a gang of one has none."""
    if store is not None:
        compare_settings(store, spec.rank, spec.world_size, settings, spec.start_timeout_s)
    return gather_observers(observer, store, spec.rank, spec.world_size, _observer_keys(spec), spec.start_timeout_s)


def _connect(
    spec: RankSpec,
    store: dist.Store | None,
    placements: Placements,
    device: torch.device,
    recorder: Recorder,
    groups: Groups,
) -> Dispatcher:
    """Join the groups, and make what carries tokens over them."""
    if placements.layers:
        groups.connect(
            store, spec.rank, spec.world_size, control=spec.vote.control_backend, device=device, host=spec.host,
            secret=spec.keys.client_secret.encode(), timeout_s=spec.vote.control_timeout_s,
        )  # fmt: skip
    else:
        recorder.votes_alone()  # without experts the ranks share nothing that they would have to keep step for
    dispatcher = make_dispatcher(
        spec.experts.backend if placements.layers else "local",
        placements, spec.rank, spec.world_size, groups.data, device, recorder.data,
        max_tokens=max_step_tokens(spec.engine),
        timeout_s=spec.vote.control_timeout_s,
        exact_combine=spec.experts.exact_combine,
    )  # fmt: skip
    groups.leave_too(dispatcher.close)
    return dispatcher


def _load(spec: RankSpec, store: dist.Store | None, link: Link, dispatcher: Dispatcher) -> ModelRunner:
    """Load this rank's share of the checkpoint, and wait until all have theirs."""
    started = time.monotonic()
    loading = LoadingReports(link, store)
    device = dispatcher.device
    runner = ModelRunner.load(Path(spec.model_dir), spec.engine, dispatcher, device, log.info, loading.on_bytes)
    loading.close()
    log.info("loaded in %.1f s on %s, %d threads", time.monotonic() - started, device, spec.threads)
    if store is not None:
        store.set(f"loaded/{spec.rank}", "")
        keys = {rank: f"loaded/{rank}" for rank in range(spec.world_size)}
        wait_for_keys(store, keys, spec.start_timeout_s, "the end of loading", lambda: num_reports(store))
    return runner


def _introduce(spec: RankSpec, link: Link, num_blocks: int, max_model_len: int, observer: str) -> None:
    """Say Hello to the router, and wait for its answer."""
    link.send(
        messages.Hello(
            protocol=messages.PROTOCOL_VERSION,
            launch_id=spec.keys.launch_id,
            epoch=spec.epoch,
            rank=spec.rank,
            world_size=spec.world_size,
            pid=os.getpid(),
            num_blocks=num_blocks - 1,
            max_model_len=max_model_len,
            observer=observer,
        )
    )
    link.wait_welcome(spec.start_timeout_s)


def place_experts(config: ModelConfig, world_size: int, experts: ExpertConfig) -> Placements:
    """Where the experts are at first. Raises ModelConfigError when copies of them do not fit."""
    layers, redundant = config.num_moe_layers, experts.redundant_experts
    if not layers:
        return Placements(())
    try:
        return Placements.contiguous(layers, config.num_experts, world_size, redundant)
    except ValueError as error:
        raise ModelConfigError(f"experts.redundant_experts is {redundant}: {error}") from error


def choose_device(spec: RankSpec) -> torch.device:
    """The one GPU reserved for this rank, else the CPU. Raises RuntimeError when torch cannot use a reserved GPU."""
    if not spec.gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"GPU {spec.gpu} is reserved for rank {spec.rank}, but torch {torch.__version__} finds none on "
            f"{platform.node()} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}): "
            "is it torch's build for CUDA, and does nvidia-smi work there?"
        )
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def _log_to(link: Link) -> None:
    """Everything from INFO goes to the launcher, which puts the rank's name before it."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.handlers = [LinkHandler(link)]
