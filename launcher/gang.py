"""One life of a gang: one Ray actor per rank in a placement that outlives it, born and dying together."""

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dp_engine.link import RankKeys
from dp_engine.spec import RankSpec
from launcher.config import DeploymentConfig
from launcher.cores import Share
from launcher.ends import GangEnd, RankEnd, blame, end_of, one_line
from launcher.errors import DeploymentFailed
from launcher.interfaces import Endpoint, NoInterface, choose_all, loopback
from launcher.placement import Placement
from launcher.processes import ProcessId, end_processes
from launcher.rank_actor import RankActor, Rendezvous, Setup
from launcher.rank_environment import travelling
from launcher.whereabouts import Whereabouts, check_devices, in_order

log = logging.getLogger(__name__)

SETTLE_S = 4.0  # after the first rank ends, the others get this long to say what they saw
KILL_GRACE_S = 0.5  # for processes to end when Ray asks them to; Ray calls any other end a crash
KILL_S = 3.0  # for those that were killed to be gone
ANSWER_S = 2.0  # for idle processes to say that they are there
REACH_S = 10.0  # for a connection between nodes

OnLog = Callable[[int, int, str], None]  # rank, level, line


class Gang:
    """Owns the actors. `place`, `launch`, `wait_end`; `kill` at any time. Blocking calls of Ray run in threads."""

    def __init__(
        self, config: DeploymentConfig, model_dir: Path, epoch: int, placement: Placement, on_log: OnLog | None = None
    ) -> None:
        """placement: reserved, and still its owner's after this life. on_log: hears where each rank is."""
        self._config = config
        self._model_dir = model_dir
        self._epoch = epoch
        self._placement = placement
        self._on_log = on_log
        self._here = ""  # the launcher's node
        self._dead = False
        self._actors: list[Any] = []  # as they were started
        self._ranks: list[Any] = []  # the same by rank
        self._runs: list[Any] = []
        self._ended: list[asyncio.Future[Any]] = []
        self.whereabouts: list[Whereabouts] = []

    async def place(self) -> None:
        """Start an empty process for each rank in the placement, and number them. Raises DeploymentFailed.

        May come while the life before still serves, if ranks have no GPU: started and imported processes then wait
        for `launch`, which saves a restart about half of its time. See `waits`.
        """
        shares = await self._placement.shares()
        actors = await asyncio.to_thread(self._start, shares)
        asked = [actor.whereabouts.remote() for actor in actors]
        found = await _get(asked, self._config.ray.start_timeout_s, "rank processes")
        order = in_order(found)
        self.whereabouts = [found[i] for i in order]
        self._ranks = [actors[i] for i in order]
        check_devices(self.whereabouts, self._config.ranks.gpus)
        for rank, where in enumerate(self.whereabouts):
            if self._on_log is not None:
                self._on_log(rank, logging.INFO, f"on {where}")

    async def waits(self) -> bool:
        """Has been placed and could be launched: all its processes answer."""
        if not self._ranks or self._dead:
            return False
        try:
            await _get([rank.whereabouts.remote() for rank in self._ranks], ANSWER_S, "waiting ranks")
        except DeploymentFailed:
            return False
        return True

    def on_node(self, node_id: str) -> bool:
        """Are all ranks on this node?"""
        return {where.node_id for where in self.whereabouts} == {node_id}

    async def launch(self, router_endpoint: str, keys: RankKeys) -> None:
        """Rank 0 opens the rendezvous, all ranks see that they can reach it and the router, then all run.

        Raises DeploymentFailed with the ranks that cannot.
        """
        cfg = self._config
        timeout_s = cfg.ray.start_timeout_s
        endpoints = self._endpoints()
        places = {"the router": _split(router_endpoint)}
        rendezvous: Rendezvous | None = None
        if cfg.dp > 1:
            opened = self._ranks[0].open_rendezvous.remote(endpoints[0].address, timeout_s)
            [rendezvous] = await _get([opened], timeout_s, "rank 0's rendezvous")
            places["rank 0"] = (rendezvous.host, rendezvous.port)
        await self._check_reach(places, endpoints)
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
                threads=where.threads,
                host=endpoint.address,
                gpu=",".join(where.devices),
                chaos=cfg.chaos.enabled,
            )
            for rank, (where, endpoint) in enumerate(zip(self.whereabouts, endpoints, strict=True))
        ]
        self._runs = [
            actor.run.remote(spec, rendezvous, endpoint)
            for actor, spec, endpoint in zip(self._ranks, specs, endpoints, strict=True)
        ]

    async def wait_end(self) -> GangEnd:
        """Wait until any rank ends, then a little for the rest to say what they saw."""
        if not self._ended:
            self._ended = [asyncio.wrap_future(run.future()) for run in self._runs]
            for future in self._ended:
                future.add_done_callback(_retrieve)
        await asyncio.wait(self._ended, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(self._ended, timeout=SETTLE_S)
        ends = await asyncio.to_thread(self._ends)
        return GangEnd(blame(ends), tuple(ends))

    async def kill(self) -> None:
        """End all processes, whatever state they are in; the placement stays. Idempotent; takes seconds at most."""
        self._dead = True
        actors, self._actors = self._actors, []
        if not actors:
            return
        on_node: dict[str, list[ProcessId]] = defaultdict(list)
        for where in self.whereabouts:
            on_node[where.node_id].append(where.process)
        here = on_node.pop(self._here, [])
        through_ray = asyncio.create_task(asyncio.to_thread(_kill_through_ray, actors, on_node))
        left = await asyncio.to_thread(end_processes, here, KILL_GRACE_S, KILL_S)
        await asyncio.wait({through_ray}, timeout=KILL_S)
        if left:
            log.warning("processes of ranks do not end: pid %s", ", ".join(map(str, left)))

    def _start(self, shares: Sequence[Share]) -> list[Any]:
        """An actor for each bundle."""
        cfg = self._config
        self._here = ray.get_runtime_context().get_node_id()
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        env = travelling(os.environ, cfg.ranks.env)
        actor_class = ray.remote(RankActor)
        for bundle, share in enumerate(shares):
            if self._dead:
                raise DeploymentFailed("the gang was killed while it was placed")
            actor = actor_class.options(
                num_cpus=0,  # the bundle has them; so there is room in it for the next life's process to wait
                num_gpus=cfg.ranks.gpus,
                max_restarts=0,
                max_concurrency=1,
                scheduling_strategy=self._placement.strategy_for(bundle),
            ).remote(Setup(env, share, cfg.ranks.threads, cfg.ranks.pin, addresses))
            self._actors.append(actor)
        return list(self._actors)

    def _endpoints(self) -> list[Endpoint]:
        """What each rank binds to: loopback if they are all on one node."""
        if len({where.node_id for where in self.whereabouts}) == 1:
            return [loopback(where.interfaces) for where in self.whereabouts]
        nodes = {where.node_ip: where.interfaces for where in self.whereabouts}
        try:
            chosen = choose_all(nodes, self._config.ranks.interface)
        except NoInterface as error:
            raise DeploymentFailed(str(error)) from None
        return [chosen[where.node_ip] for where in self.whereabouts]

    async def _check_reach(self, places: dict[str, tuple[str, int]], endpoints: Sequence[Endpoint]) -> None:
        """What cannot be reached is said now, by whom, instead of at the end of a time-out that nobody explains."""
        asked = [actor.unreachable.remote(places, REACH_S) for actor in self._ranks]
        answers = await _get(asked, self._config.ray.start_timeout_s, "ranks")
        faults = [
            f"rank {rank} (node {where.node_ip}, {endpoint.interface} {endpoint.address}) cannot reach "
            + "; ".join(missed)
            for rank, (where, endpoint, missed) in enumerate(zip(self.whereabouts, endpoints, answers, strict=True))
            if missed
        ]
        if faults:
            there = {f"node {where.node_ip} has {', '.join(map(str, where.interfaces))}" for where in self.whereabouts}
            raise DeploymentFailed(
                f"{'; '.join(faults)}. {'; '.join(sorted(there))}. Open the nodes' ports to each other, or choose "
                "another network with ranks.interface"
            )

    def _ends(self) -> list[RankEnd]:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        ends = []
        for rank, run in enumerate(self._runs):
            error: BaseException | None = None
            try:
                ray.get(run, timeout=0)
            except GetTimeoutError:
                continue
            except RayError as caught:
                error = caught
            ends.append(end_of(rank, error, self.whereabouts[rank], alive))
        return ends


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Whoever wants to know asks Ray; this one is not missed."""
    if not future.cancelled():
        future.exception()


def _kill_through_ray(actors: Sequence[Any], away: dict[str, list[ProcessId]]) -> None:
    """Ray asks a process to end and kills it after 5 s; on other nodes a task does at once what only a node can do."""
    with contextlib.suppress(RayError, ValueError):
        for actor in actors:
            ray.kill(actor)
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        end_there = ray.remote(end_processes)
        tasks = [
            end_there.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
            ).remote(processes, KILL_GRACE_S, KILL_S / 2)
            for node_id, processes in away.items()
            if node_id in alive
        ]
        ray.wait(tasks, num_returns=len(tasks), timeout=KILL_S) if tasks else None


def _split(endpoint: str) -> tuple[str, int]:
    """Host and port of a ZMQ endpoint."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


async def _get(refs: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """Results of actors. Holds no thread, since many gangs may wait for long. Raises DeploymentFailed."""
    answers = asyncio.gather(*(asyncio.wrap_future(ref.future()) for ref in refs))
    try:
        return await asyncio.wait_for(answers, timeout_s)
    except TimeoutError:
        raise DeploymentFailed(f"{what} did not come up within {timeout_s:g} s") from None
    except RayError as error:
        raise DeploymentFailed(f"{what} did not come up: {one_line(error)}") from None
