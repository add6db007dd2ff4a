"""The placement group of one replica, which outlives its gangs."""

import asyncio
import contextlib
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.config import ConfigError, DeploymentConfig


class Placement:
    def __init__(self, config: DeploymentConfig, replica: int) -> None:
        self._config = config
        self._group: PlacementGroup | None = None

    async def reserve(self) -> None:
        await asyncio.to_thread(self._reserve)

    def strategy_for(self, index: int) -> Any:
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)

    async def release(self) -> None:
        await asyncio.to_thread(self._release)

    def _reserve(self) -> None:
        if self._group is not None:
            return
        cfg = self._config
        bundle = {"CPU": cfg.ranks.cpus} | ({"GPU": cfg.ranks.gpus} if cfg.ranks.gpus else {})
        if cfg.ray.address is None:
            _check_fits(bundle, cfg.dp * cfg.replicas)
        group = placement_group([bundle] * cfg.dp, strategy=cfg.ray.strategy)
        self._group = group
        if not group.wait(cfg.ray.placement_timeout_s):
            raise ConfigError(_does_not_fit(bundle, cfg.dp, f" within {cfg.ray.placement_timeout_s:g} s"))

    def _release(self) -> None:
        with contextlib.suppress(RayError, ValueError):
            if self._group is not None:
                remove_placement_group(self._group)
        self._group = None


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
