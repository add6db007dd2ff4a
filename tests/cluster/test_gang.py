"""Placements and lives of gangs in a real cluster of three raylets."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from launcher import gang as gang_module
from launcher.config import ConfigError, DeploymentConfig, load_config
from launcher.ends import GangEnd
from launcher.gang import Gang
from launcher.keys import LaunchKeys
from launcher.placement import Placement
from tests.cluster.conftest import RayCluster
from tests.cluster.scripted import MeetingActor, ScriptedActor
from tests.serve.server import Server, wait_until


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "RankActor", ScriptedActor)
    monkeypatch.setattr(gang_module, "SETTLE_S", 1.0)


def config(cluster: RayCluster, *settings: str) -> DeploymentConfig:
    return load_config(None, [f"ray.address='{cluster.address}'", "ray.start_timeout_s=120", *settings])


@contextlib.asynccontextmanager
async def placed(cfg: DeploymentConfig, script: str = "", replica: int = 0) -> AsyncIterator[Gang]:
    """A gang in its place; neither is left behind."""
    placement = Placement(cfg, replica)
    try:
        await placement.reserve()
        async with life(cfg, script, placement) as gang:
            yield gang
    finally:
        await placement.release()


@contextlib.asynccontextmanager
async def life(cfg: DeploymentConfig, script: str, placement: Placement, epoch: int = 1) -> AsyncIterator[Gang]:
    gang = Gang(cfg, Path(script), epoch, placement)
    try:
        await gang.place()
        yield gang
    finally:
        await gang.kill()


async def launch(gang: Gang) -> None:
    """`launch` towards a socket that stands for the router's."""
    with socket.create_server(("127.0.0.1", 0)) as anywhere, socket.create_server(("", 0)) as everywhere:
        local = len({where.node_id for where in gang.whereabouts}) == 1
        port = (anywhere if local else everywhere).getsockname()[1]
        host = "127.0.0.1" if local else gang.whereabouts[0].node_ip
        await gang.launch(f"tcp://{host}:{port}", LaunchKeys.generate().for_rank())


def nodes_of(gang: Gang) -> list[str]:
    return [where.node_id for where in gang.whereabouts]


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0.0)


# ---- where ranks go


def test_strict_spread_has_a_node_for_each_rank_in_their_order(cluster: RayCluster) -> None:
    async def look() -> list[str]:
        async with placed(config(cluster, "dp=3", "ray.strategy=STRICT_SPREAD")) as gang:
            assert all(len(where.cores) == len(os.sched_getaffinity(0)) for where in gang.whereabouts)
            return nodes_of(gang)

    nodes = asyncio.run(look())
    assert len(set(nodes)) == 3 and nodes == sorted(nodes)


def test_spread_orders_ranks_by_node(cluster: RayCluster) -> None:
    async def look() -> list[str]:
        async with placed(config(cluster, "dp=4", "ray.strategy=SPREAD")) as gang:
            return nodes_of(gang)

    nodes = asyncio.run(look())
    assert len(set(nodes)) == 3 and nodes == sorted(nodes)


def test_a_gang_that_fits_on_a_node_is_not_torn_apart(cluster: RayCluster) -> None:
    """Ray's PACK begins with the node that has most to spare, here the head, which has CPUs for two of the three."""
    settings = ("dp=3", "ranks.cpus=0.5", "ranks.resources.slot=1")

    async def look() -> list[str]:
        single = placed(config(cluster, "dp=1", "ranks.resources.head=1"), replica=1)
        async with single, placed(config(cluster, *settings)) as gang:
            return nodes_of(gang)

    assert asyncio.run(look()) == [cluster.gpu_node.node_id] * 3


def test_gangs_side_by_side_share_nodes_and_cores(cluster: RayCluster) -> None:
    cfg = config(cluster, "dp=1", "replicas=2", "ranks.resources.far=1")

    async def look() -> list[tuple[int, ...]]:
        one, two = Placement(cfg, 0), Placement(cfg, 1)
        try:
            await one.reserve()
            await two.reserve()
            async with life(cfg, "", one) as first, life(cfg, "", two) as second:
                return [first.whereabouts[0].cores, second.whereabouts[0].cores]
        finally:
            await one.release()
            await two.release()

    cores = asyncio.run(look())
    allowed = len(os.sched_getaffinity(0))
    assert not set(cores[0]) & set(cores[1])
    assert len(cores[0] + cores[1]) == (allowed if allowed > 1 else 0)


def test_ranks_get_their_devices_in_order(cluster: RayCluster) -> None:
    async def look() -> Gang:
        async with placed(config(cluster, "dp=2", "ranks.gpus=1", "ranks.resources.far=1")) as gang:
            return gang

    gang = asyncio.run(look())
    assert [where.devices for where in gang.whereabouts] == [("0",), ("1",)]
    assert "GPU 1" in str(gang.whereabouts[1])


def test_what_cannot_be_placed_is_said_in_time(cluster: RayCluster) -> None:
    cfg = config(cluster, "dp=4", "ray.strategy=STRICT_SPREAD", "ray.placement_timeout_s=2", "ranks.resources.head=1")
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        asyncio.run(Placement(cfg, 0).reserve())
    assert time.monotonic() - began < 15
    words = str(caught.value)
    assert "4 ranks do not fit within 2 s: wanted 4 CPU, 4 head (1 CPU, 1 head each, STRICT_SPREAD)" in words
    assert "of 6 CPU, 2 of 2 head" in words and words.count("node ") == 3
    wait_until(lambda: free_cpus() == 6, 30, "everything is free again")


# ---- how lives end


async def end_of_life(cfg: DeploymentConfig, script: str) -> GangEnd:
    async with placed(cfg, script) as gang:
        await launch(gang)
        return await asyncio.wait_for(gang.wait_end(), 60)


@pytest.mark.parametrize(
    ("script", "rank", "kind", "words"),
    [
        ("wait,kill", 1, "killed", "rank 1 died: its process (pid "),
        ("exit,wait", 0, "killed", "rank 0 died: its process (pid "),
        ("raise,notice", 0, "raised", "rank 0 failed: ValueError: a step went wrong"),
        ("wait,leave", 1, "left", "rank 1 left unasked"),
    ],
)
def test_every_end_of_a_rank_is_the_gangs(cluster: RayCluster, script: str, rank: int, kind: str, words: str) -> None:
    end = asyncio.run(end_of_life(config(cluster, "ranks.cpus=0.5"), script))
    culprits = [end for end in end.ends if not end.bystander]
    assert [(end.rank, end.kind) for end in culprits] == [(rank, kind)]
    assert end.reason.startswith(words)
    assert len(end.ends) == (2 if "notice" in script else 1)


def test_stopped_ranks_are_ended_and_the_next_life_waits_in_their_place(cluster: RayCluster) -> None:
    """On a node that is full, and not the launcher's, so that only Ray can get at it."""
    cfg = config(cluster, "ranks.resources.far=1")

    async def lives() -> tuple[list[int], float, GangEnd]:
        placement = Placement(cfg, 0)
        await placement.reserve()
        try:
            first = life(cfg, "wait,wait", placement)
            async with first as one, life(cfg, "wait,leave", placement, epoch=2) as two:
                await launch(one)
                assert await two.waits() and nodes_of(one) == nodes_of(two)
                pids = [where.pid for where in one.whereabouts]
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                assert not await one.waits()
                began = time.monotonic()
                await one.kill()
                took = time.monotonic() - began
                await one.kill()  # once more changes nothing
                await placement.reserve()
                await launch(two)
                return pids, took, await asyncio.wait_for(two.wait_end(), 60)
        finally:
            await placement.release()

    pids, took, end = asyncio.run(lives())
    assert took < 10 and end.reason == "rank 1 left unasked"
    wait_until(lambda: not any(running(pid) for pid in pids), 20, f"gone: {pids}")


def test_what_travels_to_a_rank(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "HF_HUB_OFFLINE", "HF_TOKEN", "NAMED"):
        monkeypatch.setenv(name, "from-the-shell")
    cfg = config(cluster, "dp=1", "ranks.env={NAMED: null, GIVEN: here}", "ranks.threads=3")
    words = asyncio.run(end_of_life(cfg, "environment")).ends[0].reason.split()
    assert {"HF_HUB_OFFLINE=from-the-shell", "NAMED=from-the-shell", "GIVEN=here", "OMP_NUM_THREADS=3"} <= set(words)
    assert not any(word.startswith(("MASTER_ADDR=", "GLOO_SOCKET_IFNAME=", "HF_TOKEN=")) for word in words)


# ---- many at once


def test_six_gangs_meet_at_once_three_times(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gang finds its own ranks and no others: their sums differ."""
    monkeypatch.setattr(gang_module, "RankActor", MeetingActor)
    cfg = config(cluster, "replicas=6", "ranks.cpus=0.4")

    async def meet(replica: int) -> list[str]:
        placement = Placement(cfg, replica)
        try:
            await placement.reserve()
            gang = Gang(cfg, Path(), replica + 1, placement)
            try:
                await gang.place()
                sums = []
                for _ in range(3):
                    await launch(gang)
                    sums += [end.reason for end in (await asyncio.wait_for(gang.wait_end(), 120)).ends]
                return sums
            finally:
                await gang.kill()
        finally:
            await placement.release()

    async def all_meet() -> list[list[str]]:
        return await asyncio.gather(*(meet(replica) for replica in range(6)))

    for replica, sums in enumerate(asyncio.run(all_meet())):
        assert sums == [f"failed: ValueError: sum {200 * (replica + 1) + 1}"] * 6


# ---- when more than a rank is gone


def running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_killed_launcher_leaves_nothing_in_the_cluster(cluster: RayCluster, checkpoint: Path) -> None:
    wait_until(lambda: free_cpus() == 6, 30, "nobody else is there")
    with Server(
        "--model",
        str(checkpoint),
        "--ray-address",
        cluster.address,
        "--set",
        "ray.strategy=STRICT_SPREAD",
        timeout_s=200,
    ) as server:
        assert server.complete("capital", 4)["usage"]["completion_tokens"] >= 1
        pids = [server.pid_of(rank) for rank in (0, 1)]
        os.kill(pids[1], signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(running(pid) for pid in pids), 40, f"gone: {pids}")
    wait_until(lambda: free_cpus() == 6, 40, "everything is free again")
    observers = subprocess.run(["pgrep", "-f", "vote.observer"], capture_output=True, text=True, check=False)
    assert not set(observers.stdout.split()) & set(map(str, pids))


def test_a_lost_node_ends_the_gang_and_the_next_life_is_elsewhere(cluster: RayCluster) -> None:
    cfg = config(cluster, "ray.strategy=STRICT_SPREAD", "ranks.cpus=2")  # two whole nodes

    async def lives() -> tuple[GangEnd, list[str], list[str], int]:
        holder = Placement(config(cluster, "dp=1", "ranks.cpus=2", "ranks.resources.far=1"), 1)
        await holder.reserve()  # leaves the head and the last node
        placement = Placement(cfg, 0)
        await placement.reserve()
        try:
            async with life(cfg, "wait,wait", placement) as first:
                await launch(first)
                lost = nodes_of(first).index(cluster.last.node_id)
                await asyncio.to_thread(cluster.lose, cluster.last)
                end = await asyncio.wait_for(first.wait_end(), 120)
            await holder.release()
            await placement.reserve()
            async with life(cfg, "wait,wait", placement, epoch=2) as second:
                return end, nodes_of(first), nodes_of(second), lost
        finally:
            await holder.release()
            await placement.release()

    end, before, after, lost = asyncio.run(lives())
    assert [(e.rank, e.kind) for e in end.ends] == [(lost, "lost")]
    assert f"rank {lost} was lost with its node" in end.reason and before[lost][:8] in end.reason
    assert before[lost] not in after and len(set(after)) == 2


def test_a_place_that_is_gone_for_good_is_an_error_in_time(cluster: RayCluster) -> None:
    """Two nodes are left: three ranks on a node each cannot be placed any more."""
    cluster.lose(cluster.last)
    cfg: Any = config(cluster, "dp=3", "ray.strategy=STRICT_SPREAD", "ray.placement_timeout_s=2")
    with pytest.raises(ConfigError, match="wanted 3 CPU"):
        asyncio.run(Placement(cfg, 0).reserve())
