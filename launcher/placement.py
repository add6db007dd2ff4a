"""Where the ranks of one gang go: a Ray placement group, one bundle per rank, kept from one life to the next."""

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.config import ConfigError, DeploymentConfig, RanksConfig
from launcher.cores import Share

_POLL_S = 0.1
_TOGETHER_S = 5.0  # for a gang that fits on one node to get it
_LOCAL_NODE_S = 5.0  # a new node's resources appear a moment after `ray.init` returns

_numbers = itertools.count()  # Ray wants names of placement groups to be unique

Resources = Mapping[str, float]


def bundle_of(ranks: RanksConfig) -> dict[str, float]:
    """What Ray reserves for one rank."""
    return {"CPU": ranks.cpus} | ({"GPU": ranks.gpus} if ranks.gpus else {}) | ranks.resources


def fits_one_node(bundle: Resources, count: int, free: Sequence[Resources]) -> bool:
    """Is there a node with room for `count` bundles?"""
    return any(all(node.get(name, 0.0) >= amount * count for name, amount in bundle.items()) for node in free)


def shares_of(replica: int, nodes: Mapping[int, Sequence[str]]) -> list[Share]:
    """What each rank of a gang gets of its node's cores. nodes: by gang, the node of each of its bundles."""
    on_node: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for gang in sorted(nodes):
        for bundle, node in enumerate(nodes[gang]):
            on_node[node].append((gang, bundle))
    return [Share(on_node[n].index((replica, b)), len(on_node[n])) for b, n in enumerate(nodes[replica])]


class Placement:
    """Owns the placement group of one replica. `reserve` before every life of the gang, `release` once at the end."""

    def __init__(self, config: DeploymentConfig, replica: int) -> None:
        self._config = config
        self._replica = replica
        self._bundle = bundle_of(config.ranks)
        self._group: PlacementGroup | None = None

    async def reserve(self) -> None:
        """Have the ranks' resources: new ones, or, in a later life, those of before, moved by Ray if a node was lost.

        What Ray cannot move within half of `ray.placement_timeout_s` is given up and reserved anew. Raises ConfigError
        with what was wanted and what there is, at the time-out, or at once if a local Ray is too small.
        """
        cfg = self._config
        deadline = time.monotonic() + cfg.ray.placement_timeout_s
        if self._group is not None:
            if await self._stands(time.monotonic() + cfg.ray.placement_timeout_s / 2):
                return
            await self.release()
        if cfg.ray.address is None:
            await self._check_fits()
        if await self._wants_one_node():
            await self._create("STRICT_PACK")
            if await self._stands(min(deadline, time.monotonic() + _TOGETHER_S)):
                return
            await self.release()
        await self._create(cfg.ray.strategy)
        if not await self._stands(deadline):
            words = await asyncio.to_thread(self._does_not_fit, cfg.dp, f" within {cfg.ray.placement_timeout_s:g} s")
            await self.release()
            raise ConfigError(words)

    def strategy_for(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        """For the actor of one bundle."""
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    async def shares(self) -> list[Share]:
        """By bundle: which of its node's cores are for it, seen with all gangs of this launch that have a place."""
        cfg = self._config
        if cfg.ray.address is None:
            return shares_of(self._replica, {gang: [""] * cfg.dp for gang in range(cfg.replicas)})
        return shares_of(self._replica, await asyncio.to_thread(self._nodes_by_gang))

    async def release(self) -> None:
        """Give the resources back. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RayError, ValueError):
                await asyncio.to_thread(remove_placement_group, group)

    async def _wants_one_node(self) -> bool:
        """PACK begins with the node that has most to spare, which may tear apart a gang that fits on another one."""
        cfg = self._config
        if cfg.ray.strategy != "PACK" or cfg.dp == 1 or cfg.ray.address is None:
            return False
        free = await asyncio.to_thread(available_resources_per_node)
        return fits_one_node(self._bundle, cfg.dp, list(free.values()))

    async def _create(self, strategy: str) -> None:
        name = f"{_names_of_launch()}{self._replica}-{next(_numbers)}"
        bundles = [dict(self._bundle)] * self._config.dp
        self._group = await asyncio.to_thread(placement_group, bundles, strategy=strategy, name=name)

    async def _stands(self, deadline: float) -> bool:
        """Wait until every bundle has a node that is alive; False when that does not come."""
        while True:
            state = await asyncio.to_thread(self._state)
            if state == "CREATED" or state == "REMOVED" or time.monotonic() > deadline:
                return state == "CREATED"
            await asyncio.sleep(_POLL_S)

    def _state(self) -> str:
        """Ray's word for the group; it may be behind with its word for a group that has just lost a node."""
        table = placement_group_table(self._group)
        if table.get("state") == "CREATED" and not set(table["bundles_to_node_id"].values()) <= set(_alive_nodes()):
            return "RESCHEDULING"
        return table.get("state", "REMOVED")

    def _nodes_by_gang(self) -> dict[int, list[str]]:
        prefix = _names_of_launch()
        found = {}
        for table in placement_group_table().values():
            if table["name"].startswith(prefix) and table["state"] == "CREATED":
                gang = int(table["name"].removeprefix(prefix).partition("-")[0])
                found[gang] = [node for _, node in sorted(table["bundles_to_node_id"].items())]
        return found

    async def _check_fits(self) -> None:
        """A local Ray will not grow, so what does not fit there, all gangs together, is refused at once."""
        ranks = self._config.dp * self._config.replicas
        deadline = time.monotonic() + _LOCAL_NODE_S
        while True:
            have = await asyncio.to_thread(ray.cluster_resources)
            if all(have.get(name, 0.0) >= amount * ranks for name, amount in self._bundle.items()):
                return
            if "CPU" in have or time.monotonic() > deadline:
                raise ConfigError(await asyncio.to_thread(self._does_not_fit, ranks, ""))
            await asyncio.sleep(_POLL_S)

    def _does_not_fit(self, ranks: int, when: str) -> str:
        """Wanted against available, in all and per node."""
        cfg = self._config
        free = available_resources_per_node()
        nodes = _alive_nodes()
        total = {node_id: node["Resources"] for node_id, node in nodes.items()}
        wanted = _amounts({name: amount * ranks for name, amount in self._bundle.items()})
        available = _of(self._bundle, list(free.values()), list(total.values()))
        per_node = "; ".join(
            f"node {node['NodeManagerAddress']}: {_of(self._bundle, [free.get(node_id, {})], [total[node_id]])}"
            for node_id, node in nodes.items()
        )
        return (
            f"{ranks} ranks do not fit{when}: wanted {wanted} ({_amounts(self._bundle)} each, {cfg.ray.strategy}), "
            f"available {available} ({per_node}); use fewer ranks (--dp) or less per rank (--set ranks.cpus=0.5)"
        )


def _names_of_launch() -> str:
    """The names of all placement groups of this launch begin so."""
    return f"phalanx-{ray.get_runtime_context().get_job_id()}-"


def _alive_nodes() -> dict[str, dict]:
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _amounts(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _of(names: Iterable[str], free: Sequence[Resources], total: Sequence[Resources]) -> str:
    """What is free of what there is, over some nodes."""
    return ", ".join(
        f"{sum(node.get(name, 0.0) for node in free):g} of {sum(node.get(name, 0.0) for node in total):g} {name}"
        for name in names
    )
