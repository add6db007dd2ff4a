"""Order of ranks, their devices, shares of nodes, and what travels to them."""

from pathlib import Path

import pytest

from launcher.config import DECIDED_VARIABLES, ConfigError, load_config
from launcher.cores import Share
from launcher.errors import DeploymentFailed
from launcher.placement import bundle_of, fits_one_node, shares_of
from launcher.processes import ProcessId
from launcher.rank_environment import SECRET, TRAVELLING, travelling
from launcher.whereabouts import Whereabouts, check_devices, in_order

OF_MASTER_ADDR = ["MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]  # its kin


def at(node_ip: str, *devices: str, node_id: str = "", cores: tuple[int, ...] = ()) -> Whereabouts:
    return Whereabouts(node_id or f"id-{node_ip}", node_ip, ProcessId(7, "1"), devices, 2, cores, ())


def test_ranks_are_ordered_by_node_and_device() -> None:
    found = [at("10.0.0.12", "0"), at("10.0.0.3", "10"), at("10.0.0.3", "9"), at("10.0.0.12"), at("10.0.0.3", "MIG-a")]
    assert in_order(found) == [2, 1, 4, 3, 0]


def test_where_a_rank_is_in_one_line() -> None:
    assert str(at("10.0.0.3", "1", node_id="abcdef0123", cores=(0, 1, 4))) == (
        "node 10.0.0.3 (abcdef01), pid 7, GPU 1, 2 threads on cores 0-1,4"
    )
    assert str(at("10.0.0.3", node_id="abcdef0123")).endswith("CPU, 2 threads on any core")


def test_a_rank_without_its_device_is_named() -> None:
    with pytest.raises(DeploymentFailed, match=r"rank 1 on node 10\.0\.0\.2 got no device: 1 GPU was reserved"):
        check_devices([at("10.0.0.1", "0"), at("10.0.0.2")], 1)
    check_devices([at("10.0.0.1"), at("10.0.0.1")], 0)


def test_ranks_on_one_device_are_named_unless_they_asked_for_a_part() -> None:
    ranks = [at("10.0.0.1", "0"), at("10.0.0.1", "3"), at("10.0.0.2", "3"), at("10.0.0.1", "3")]
    with pytest.raises(DeploymentFailed, match=r"ranks 1, 3 are all on GPU 3 of node 10\.0\.0\.1"):
        check_devices(ranks, 1)
    check_devices(ranks, 0.5)


def test_shares_count_all_gangs_of_the_launch() -> None:
    nodes = {0: ["a", "a", "b"], 2: ["b", "c", "b"], 1: ["b", "a", "a"]}
    assert shares_of(0, nodes) == [Share(0, 4), Share(1, 4), Share(0, 4)]
    assert shares_of(1, nodes) == [Share(1, 4), Share(2, 4), Share(3, 4)]
    assert shares_of(2, nodes) == [Share(2, 4), Share(0, 1), Share(3, 4)]


def test_what_is_reserved_for_a_rank() -> None:
    cfg = load_config(None, ["ranks.cpus=4", "ranks.gpus=1", "ranks.resources={nic: 0.5}"])
    assert bundle_of(cfg.ranks) == {"CPU": 4, "GPU": 1, "nic": 0.5}
    assert bundle_of(load_config(None).ranks) == {"CPU": 1}


def test_a_node_must_have_room_for_all() -> None:
    free = [{"CPU": 4.0}, {"CPU": 16.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 4.0}]
    assert fits_one_node({"CPU": 2, "GPU": 1}, 1, free)
    assert not fits_one_node({"CPU": 2, "GPU": 1}, 2, free)
    assert fits_one_node({"CPU": 2}, 8, free)


def test_what_travels() -> None:
    environ = {
        "HF_HOME": "/models", "HF_TOKEN": "t", "NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0", "MINE": "m",
        "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "7", "MASTER_ADDR": "elsewhere", "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "3",
    }  # fmt: skip
    by_prefix = {"HF_HOME": "/models", "NCCL_DEBUG": "INFO", "OMP_PROC_BIND": "true"}
    assert travelling(environ, {}) == by_prefix
    named = {"HF_TOKEN": None, "MINE": None, "GIVEN": "x", "NCCL_DEBUG": "WARN", "NOT_SET": None}
    assert travelling(environ, named) == by_prefix | {"HF_TOKEN": "t", "MINE": "m", "GIVEN": "x", "NCCL_DEBUG": "WARN"}


def test_the_docs_say_what_travels() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "placement.md").read_text()
    assert [name for name in (*TRAVELLING, *SECRET, *DECIDED_VARIABLES) if name not in page] == OF_MASTER_ADDR


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("ranks.env={MASTER_ADDR: a}", "MASTER_ADDR is not for you to set: rank 0 says where the ranks meet"),
        ("ranks.env={GLOO_SOCKET_IFNAME: lo}", "ranks.interface decides"),
        ("ranks.interface=10.1.0.1/16", "10.1.0.1/16 has host bits set"),
        ("ranks.resources={GPU: 1}", "use ranks.cpus and ranks.gpus"),
        ("ranks.resources={nic: 0}", "nic: 0 is no amount"),
        ("ranks.gpus=2", "ranks.gpus"),
        ("replicas=0", "replicas"),
    ],
)
def test_settings_that_are_refused(setting: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting])
    assert words in str(caught.value)
