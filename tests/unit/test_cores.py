"""Which cores are whose."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cores import Core, Share, node_cores, parse_list, share_cores, show_list


def cores(*nodes: int, smt: int = 1) -> list[Core]:
    """So many cores on each NUMA node; CPUs are numbered as Linux does, second threads after all first ones."""
    total = sum(nodes)
    numa = [node for node, count in enumerate(nodes) for _ in range(count)]
    return [Core(numa[i], tuple(i + total * thread for thread in range(smt))) for i in range(total)]


def shares(there: list[Core], ranks: int) -> list[tuple[int, ...]]:
    return [share_cores(there, Share(index, ranks)) for index in range(ranks)]


@pytest.mark.parametrize(
    ("there", "ranks", "expected"),
    [
        (cores(4), 1, [(0, 1, 2, 3)]),
        (cores(4), 2, [(0, 1), (2, 3)]),
        (cores(5), 2, [(0, 1), (2, 3, 4)]),
        (cores(2), 3, [(), (), ()]),  # fewer CPUs than ranks: nobody is pinned
        (cores(2, smt=2), 2, [(0, 2), (1, 3)]),  # whole cores
        (cores(2, smt=2), 4, [(0,), (2,), (1,), (3,)]),  # threads, where there are not enough cores
        (cores(2, 2), 2, [(0, 1), (2, 3)]),
        (cores(3, 3), 4, [(0,), (1, 2), (3,), (4, 5)]),
        (cores(4, 4), 3, [(0, 1), (2, 3), (4, 5, 6, 7)]),  # never over two nodes, as even slices would be
        (cores(1, 7), 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),  # a node is too small for its ranks: even slices
        (cores(2, 2, 2), 1, [(0, 1, 2, 3, 4, 5)]),
    ],
)
def test_shares(there: list[Core], ranks: int, expected: list[tuple[int, ...]]) -> None:
    assert shares(there, ranks) == expected


@given(
    nodes=st.lists(st.integers(0, 9), min_size=1, max_size=5), smt=st.integers(1, 2), ranks=st.integers(1, 24)
)  # fmt: skip
def test_shares_are_disjoint_and_everybody_has_one_or_nobody(nodes: list[int], smt: int, ranks: int) -> None:
    found = shares(cores(*nodes, smt=smt), ranks)
    used = [cpu for share in found for cpu in share]
    assert len(used) == len(set(used))
    assert all(found) if sum(nodes) * smt >= ranks else not any(found)


def test_the_kernels_word(tmp_path: Path) -> None:
    for name, text in {
        "node/node0/cpulist": "0-1,4-5\n", "node/node1/cpulist": "2-3,6-7\n", "node/node2/cpulist": "\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    for cpu in range(8):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert node_cores(range(8), tmp_path) == [Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7))]
    assert node_cores([1, 2, 6], tmp_path) == [Core(0, (1,)), Core(1, (2, 6))]  # a container's part of the machine


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    assert node_cores([3, 5], tmp_path) == [Core(0, (3,)), Core(0, (5,))]


def test_this_machine() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert sorted(cpu for core in node_cores(allowed) for cpu in core.cpus) == allowed


@given(st.sets(st.integers(0, 300)))
def test_lists_of_the_kernel(cpus: set[int]) -> None:
    assert parse_list(show_list(sorted(cpus))) == tuple(sorted(cpus))


def test_runs_are_shown_as_runs() -> None:
    assert show_list((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
