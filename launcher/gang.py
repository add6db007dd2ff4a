"""The gang: one Ray actor per rank in one placement group, born and dying together."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dp_engine.link import RankKeys
from dp_engine.spec import RankSpec
from launcher.config import ConfigError, DeploymentConfig
from launcher.errors import DeploymentFailed
from launcher.rank_actor import RankActor, Rendezvous, Whereabouts

log = logging.getLogger(__name__)

SETTLE_S = 4.0  # after the first rank ends, the others get this long to say what they saw
BYSTANDERS = {"LockstepBroken", "SettingsMismatch", "RanksMissing"}  # errors of ranks that only noticed something


@dataclass(frozen=True)
class RankEnd:
    """How a rank's `run` ended. `bystander`: it only noticed that another rank had left, as its reason says."""

    rank: int
    reason: str
    bystander: bool = False


def blame(ends: Iterable[RankEnd]) -> str:
    """Who ended the gang, in one line: not those that only noticed, unless there is nobody else."""
    known = sorted(ends, key=lambda end: end.rank)
    culprits = [end for end in known if not end.bystander]
    return "; ".join(f"rank {end.rank} {end.reason}" for end in culprits) or next(end.reason for end in known)


class Gang:
    """Owns placement group and actors. `place`, then `launch`; blocking calls of Ray run in threads."""

    def __init__(self, config: DeploymentConfig, model_dir: Path, epoch: int) -> None:
        self._config = config
        self._model_dir = model_dir
        self._epoch = epoch
        self._placement: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self.whereabouts: list[Whereabouts] = []

    async def place(self) -> None:
        """Reserve the ranks' resources and start an empty actor on each. Raises ConfigError if they do not fit."""
        await asyncio.to_thread(self._place)

    def on_node(self, node_id: str) -> bool:
        """Are all ranks on this node?"""
        return {where.node_id for where in self.whereabouts} == {node_id}

    async def launch(self, router_endpoint: str, keys: RankKeys) -> None:
        """Rank 0 opens the rendezvous, then all ranks run."""
        await asyncio.to_thread(self._launch, router_endpoint, keys)

    async def wait_end(self) -> str:
        """Wait until any rank ends, then a little for the rest to say what they saw; returns whom to blame."""
        futures = [asyncio.wrap_future(run.future()) for run in self._runs]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(futures, timeout=SETTLE_S)
        for future in futures:
            future.exception() if future.done() else future.cancel()
        ends = await asyncio.to_thread(lambda: [self._end_of(rank, run) for rank, run in enumerate(self._runs)])
        return blame(end for end in ends if end is not None)

    async def kill(self) -> None:
        """End all actors and give the resources back. Idempotent."""
        await asyncio.to_thread(self._kill)

    def _place(self) -> None:
        cfg = self._config
        bundle = {"CPU": cfg.ranks.cpus} | ({"GPU": cfg.ranks.gpus} if cfg.ranks.gpus else {})
        if cfg.ray.address is None:
            _check_fits(bundle, cfg.dp)
        group = placement_group([bundle] * cfg.dp, strategy=cfg.ray.strategy)
        self._placement = group
        if not group.wait(cfg.ray.placement_timeout_s):
            raise ConfigError(_does_not_fit(bundle, cfg.dp, f" within {cfg.ray.placement_timeout_s:g} s"))
        actor_class = ray.remote(RankActor)
        actors = [
            actor_class.options(
                num_cpus=cfg.ranks.cpus,
                num_gpus=cfg.ranks.gpus,
                max_restarts=0,
                max_concurrency=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for index in range(cfg.dp)
        ]
        self._actors = actors
        found = _get([actor.whereabouts.remote() for actor in actors], cfg.ray.start_timeout_s, "rank processes")
        order = sorted(range(cfg.dp), key=lambda i: (found[i].node_ip, found[i].node_id, found[i].gpus, i))
        self._actors = [actors[i] for i in order]
        self.whereabouts = [found[i] for i in order]

    def _launch(self, router_endpoint: str, keys: RankKeys) -> None:
        cfg = self._config
        timeout_s = cfg.ray.start_timeout_s
        on_node = Counter(where.node_id for where in self.whereabouts)
        single_host = len(on_node) == 1
        threads = [
            cfg.ranks.threads or max(1, where.cores // on_node[where.node_id]) for where in self.whereabouts
        ]  # fmt: skip
        interface = "lo" if single_host else None
        prepared = [actor.prepare.remote(n, interface) for actor, n in zip(self._actors, threads, strict=True)]
        _get(prepared, timeout_s, "the ranks' preparation")
        rendezvous: Rendezvous | None = None
        if cfg.dp > 1:
            host = "127.0.0.1" if single_host else self.whereabouts[0].node_ip
            opened = self._actors[0].open_rendezvous.remote(host, timeout_s)
            [rendezvous] = _get([opened], timeout_s, "rank 0's rendezvous")
        specs = [
            RankSpec(
                rank=rank,
                world_size=cfg.dp,
                epoch=self._epoch,
                router_endpoint=router_endpoint,
                keys=keys,
                model_dir=str(self._model_dir),
                engine=cfg.engine,
                vote=cfg.vote,
                experts=cfg.experts,
                start_timeout_s=timeout_s,
                threads=threads[rank],
                host="127.0.0.1" if single_host else self.whereabouts[rank].node_ip,
                chaos=cfg.chaos.enabled,
            )
            for rank in range(cfg.dp)
        ]
        self._runs = [actor.run.remote(spec, rendezvous) for actor, spec in zip(self._actors, specs, strict=True)]

    def _end_of(self, rank: int, run: Any) -> RankEnd | None:
        """Actor errors are not all RayActorError: an exception inside `run` comes as RayTaskError."""
        pid = self.whereabouts[rank].pid
        try:
            ray.get(run, timeout=0)
        except GetTimeoutError:
            return None
        except RayActorError:
            return RankEnd(rank, f"died: its process (pid {pid}) was killed or crashed")
        except RayTaskError as error:
            cause = error.cause
            if type(cause).__name__ in BYSTANDERS:
                return RankEnd(rank, _one_line(cause), bystander=True)
            return RankEnd(rank, f"failed: {type(cause).__name__}: {_one_line(cause)}")
        except RayError as error:
            return RankEnd(rank, f"ended: {type(error).__name__}: {_one_line(error)}")
        return RankEnd(rank, "left unasked")

    def _kill(self) -> None:
        with contextlib.suppress(RayError, ValueError):
            for actor in self._actors:
                ray.kill(actor)
            if self._placement is not None:
                remove_placement_group(self._placement)
        self._actors = []
        self._placement = None


def _get(refs: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    try:
        return ray.get(list(refs), timeout=timeout_s)
    except GetTimeoutError:
        raise DeploymentFailed(f"{what} did not come up within {timeout_s:g} s") from None
    except RayError as error:
        raise DeploymentFailed(f"{what} did not come up: {_one_line(error)}") from None


def _check_fits(bundle: dict[str, float], ranks: int) -> None:
    """A local Ray will not grow, so what does not fit is refused at once."""
    deadline = time.monotonic() + 5.0  # a new node's resources appear a moment after `ray.init` returns
    while True:
        have = ray.cluster_resources()
        if all(have.get(name, 0.0) >= amount * ranks for name, amount in bundle.items()):
            return
        if "CPU" in have or time.monotonic() > deadline:
            raise ConfigError(_does_not_fit(bundle, ranks, ""))
        time.sleep(0.1)


def _does_not_fit(bundle: dict[str, float], ranks: int, when: str) -> str:
    free = ray.available_resources()
    total = ray.cluster_resources()
    wanted = ", ".join(f"{amount * ranks:g} {name}" for name, amount in bundle.items())
    nodes = "; ".join(
        f"node {node['NodeManagerAddress']}: " + ", ".join(f"{node['Resources'].get(n, 0):g} {n}" for n in bundle)
        for node in ray.nodes()
        if node["Alive"]
    )
    available = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in bundle)
    per_rank = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    return (
        f"{ranks} ranks do not fit{when}: wanted {wanted} ({per_rank} each), available {available} ({nodes}); "
        "use fewer ranks (--dp) or less per rank (--set ranks.cpus=0.5)"
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:1000]
