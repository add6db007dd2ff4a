"""Ranks that do not belong together are refused before the first step, by name and value; so are groups that do not
hold all ranks.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from dp_engine import rank as rank_module
from dp_engine.config import EngineConfig
from dp_engine.link import RankKeys
from dp_engine.messages import Goodbye
from dp_engine.spec import RankSpec
from ep.config import ExpertConfig
from tests.multirank.gang import Gang, leave_together
from tests.scripted_link import Script, ScriptedLink
from vote.config import VoteConfig
from vote.errors import RanksMissing, SettingsMismatch
from vote.group import CPU, Groups
from vote.settings import compare_settings

pytestmark = pytest.mark.xdist_group("start")  # one gang answers all tests

SIZE, ODD = 3, 1
Table = dict[str, dict[int, str]]


@dataclass(frozen=True)
class Oddity:
    """How one rank differs: in its spec, in another checkpoint, or in what it is made of. `names`: what is said to
    differ; `values`: of the first of them, the usual one and the odd one, where they are known beforehand."""

    names: tuple[str, ...]
    values: tuple[str, str] | None
    engine: Mapping[str, Any] = field(default_factory=dict)
    vote: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    another_model: bool = False
    made_of: Callable[[], AbstractContextManager[Any]] = nullcontext


def of_rank(name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Another value of a name that `dp_engine.rank` uses."""
    return lambda: patch(f"dp_engine.rank.{name}", value)


ODDITIES = {
    "all_interval": Oddity(("vote.all_interval",), ("70", "71"), vote={"all_interval": 71}),
    "any_interval": Oddity(("vote.any_interval",), ("100", "99"), vote={"any_interval": 99}),
    "decision": Oddity(("vote.decision",), ("adaptive", "cadence"), vote={"decision": "cadence"}),
    "timeout": Oddity(("vote.control_timeout_s",), ("30.0", "31.0"), vote={"control_timeout_s": 31}),
    "policy": Oddity(("engine.policy", "engine.preemption"), ("phased", "unified"), {"policy": "unified"}),
    "block_size": Oddity(("engine.block_size",), ("16", "32"), {"block_size": 32}),
    "pool": Oddity(("kv_blocks", "engine.num_blocks"), ("20", "24"), {"num_blocks": 24}),
    "memory": Oddity(
        ("kv_blocks", "engine.num_blocks", "engine.kv_memory_gib"), ("20", "256"),
        {"num_blocks": None, "kv_memory_gib": 256 * 16 * 2 * 2 * 2 * 16 * 4 / 2**30},
    ),
    "length": Oddity(("max_model_len", "engine.max_model_len"), ("512", "100"), {"max_model_len": 100}),
    "drafts": Oddity(("engine.num_draft_tokens",), ("0", "2"), {"num_draft_tokens": 2}),
    "overlap": Oddity(("engine.overlap",), ("False", "True"), {"overlap": True}),
    "checkpoint": Oddity(("checkpoint",), None, another_model=True),
    "code": Oddity(("code",), ("this code", "that code"), made_of=of_rank("code_digest", lambda: "that code")),
    "python": Oddity(("python",), None, made_of=of_rank("platform.python_version", lambda: "3.11.0")),
    "torch": Oddity(("torch",), None, made_of=of_rank("torch.__version__", "2.6.0")),
    "protocol": Oddity(("protocol",), None, made_of=of_rank("PROTOCOL_VERSION", 0)),
    "epoch": Oddity(("epoch",), ("1", "2"), spec={"epoch": 2}),
    "launch": Oddity(("launch",), ("this", "that"), spec={"keys": RankKeys("that", "", "", "")}),
}  # fmt: skip


def refusals(rank: int, store: dist.Store, models: tuple[Path, Path]) -> tuple[dict[str, Table], str]:
    """One rank: the start with every oddity in turn, and a start to which the odd rank does not come."""
    spec = RankSpec(
        rank, SIZE, 1, "", RankKeys("this", "", "", ""), str(models[0]), EngineConfig(num_blocks=20), VoteConfig(),
        ExpertConfig(), start_timeout_s=60.0, threads=1, host="127.0.0.1",
    )  # fmt: skip
    tables = {}
    for name, oddity in ODDITIES.items():
        odd = rank == ODD
        with of_rank("code_digest", lambda: "this code")(), oddity.made_of() if odd else nullcontext():
            tables[name] = refusal(strange(spec, oddity, models[1]) if odd else spec, dist.PrefixStore(name, store))
    said = ""
    if rank != ODD:
        with pytest.raises(RanksMissing) as caught:
            compare_settings(dist.PrefixStore("late", store), rank, SIZE, {}, 1.0)
        said = str(caught.value)
    leave_together(rank, store, SIZE)
    return tables, said


def strange(spec: RankSpec, oddity: Oddity, another_model: Path) -> RankSpec:
    return replace(
        spec,
        engine=EngineConfig(**({"num_blocks": 20} | dict(oddity.engine))),
        vote=VoteConfig(**oddity.vote),
        model_dir=str(another_model) if oddity.another_model else spec.model_dir,
        **oddity.spec,
    )


class LinkToNobody(ScriptedLink):
    def close(self) -> None:
        """Nothing is open."""


def refusal(spec: RankSpec, store: dist.Store) -> Table:
    """A whole rank with a link to nobody, and without an observer."""
    link = LinkToNobody(Script(), spec.rank)
    with patch.object(rank_module, "Link", lambda *_: link), patch.object(rank_module, "ObserverProcess"):
        try:
            rank_module.run_rank(spec, store)
        except SettingsMismatch as error:
            assert not dist.is_initialized(), "groups were connected"
            assert link.sent[-1] == Goodbye(spec.rank, str(error))
            return error.differences
    raise AssertionError("the rank has served")


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[dict[str, Table], str]]:
    """By rank."""
    from tests.checkpoints import write_mixtral

    path = tmp_path_factory.mktemp("models")
    models = write_mixtral(path / "one"), write_mixtral(path / "another", sliding_window=None, rms_norm_eps=1e-6)
    with Gang() as gang:
        gang.start_all(refusals, SIZE, models)
        return gang.results(range(SIZE))


@pytest.mark.parametrize("name", ODDITIES)
def test_a_rank_that_differs_is_refused(refused: dict[int, tuple[dict[str, Table], str]], name: str) -> None:
    oddity = ODDITIES[name]
    tables = [refused[rank][0][name] for rank in range(SIZE)]
    assert all(table == tables[0] for table in tables), "all say the same"
    assert set(tables[0]) == set(oddity.names)
    usual, odd = tables[0][oddity.names[0]][0], tables[0][oddity.names[0]][ODD]
    assert usual != odd and oddity.values in (None, (usual, odd))
    for number, differing in enumerate(oddity.names):
        values = tables[0][differing]
        assert values == {rank: values[ODD] if rank == ODD else values[0] for rank in range(SIZE)}, number
    words = f"{oddity.names[0]}: rank 0 has {usual}, rank 1 has {odd}, rank 2 has {usual}"
    assert words in str(SettingsMismatch(tables[0]))


def test_a_rank_that_does_not_come_is_named(refused: dict[int, tuple[dict[str, Table], str]]) -> None:
    words = "rank(s) 1 did not arrive at the start-up check within 1 s"
    assert [said for _, said in refused.values()] == [words, "", words]


def test_code_is_known_by_its_sources(tmp_path: Path) -> None:
    for name in ("dp_engine/rank.py", "vote/ballot.py", "ep/placement.py", "kernels/strips.c", "launcher/cli.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    with patch("dp_engine.rank.__file__", str(tmp_path / "dp_engine/rank.py")):
        seen = [rank_module.code_digest()]
        for name in ("vote/ballot.py", "kernels/strips.c", "ep/new.py"):
            (tmp_path / name).write_text("changed")
            seen.append(rank_module.code_digest())
        for name in ("launcher/cli.py", "vote/ballot.pyc", "vote/README.md"):  # not of a rank's code
            (tmp_path / name).write_text("changed")
            assert rank_module.code_digest() == seen[-1], name
    assert len(set(seen)) == len(seen)


def too_small(rank: int, store: dist.Store) -> str:
    """The data group holds rank 0 alone."""
    connect = dist.new_group
    with (
        patch.object(dist, "new_group", lambda **options: connect([0], **options)),
        pytest.raises(RuntimeError) as caught,
    ):
        Groups().connect(
            store, rank, 2, control="gloo", device=CPU, host="127.0.0.1", secret=b"a secret", timeout_s=30.0
        )
    leave_together(rank, store, 2)
    return str(caught.value)


def test_a_group_of_another_size_is_refused() -> None:
    with Gang() as gang:
        gang.start_all(too_small, 2)
        said = gang.results(range(2))
    assert said[0] == "rank 0: control and data group have (2, 1) ranks, not 2"
    assert said[1].startswith("rank 1: control and data group have (2, ")
