"""Faults on demand in a gang of real processes under load: the right rank is named, or nothing is lost."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dp_engine.config import EngineConfig
from dp_engine.link import SILENT_VOTES
from dp_engine.messages import Fault, Sampling
from dp_engine.spec import RankSpec
from ep.config import ExpertConfig
from launcher.keys import LaunchKeys
from launcher.router import Router
from tests.fake_gang import collect, open_link
from tests.multirank.gang import Gang
from tests.multirank.serving_rank import End, live
from vote.config import VoteConfig

pytestmark = pytest.mark.xdist_group("chaos")

SIZE, VICTIM, OTHER = 2, 1, 0
BLOCKS = 40
PATIENCE_S = 60.0
SHORT_S = 3.0  # for a vote, where a fault shows by its end only


@dataclass
class Seen:
    """What a gang did. `texts`: answers, disturbed ones after undisturbed ones; `failure`: the router's words."""

    texts: list[list[list[int]]] = field(default_factory=list)
    used_blocks: list[int] = field(default_factory=list)
    failure: str = ""
    ends: dict[int, End] = field(default_factory=dict)


async def life(model: Path, harmless: list[Fault], fatal: Fault, timeout_s: float) -> Seen:
    """Streams without faults, with each of the harmless ones, and one that ends the gang; all at rank `VICTIM`."""
    keys, seen = LaunchKeys.generate(), Seen()
    router = Router(SIZE, silence_s=SILENT_VOTES * timeout_s)
    link = await open_link(router, keys)
    specs = [
        RankSpec(
            rank, SIZE, 1, link.endpoint, keys.for_rank(), str(model),
            EngineConfig(num_blocks=BLOCKS, preemption="recompute"), VoteConfig(control_timeout_s=timeout_s),
            ExpertConfig(), start_timeout_s=60.0, threads=1, host="127.0.0.1", chaos=True,
        )
        for rank in range(SIZE)
    ]  # fmt: skip

    async def texts(fault: Fault | None) -> list[list[int]]:
        """The fault comes when all streams have begun."""
        sampling = Sampling(60, temperature=0.0, ignore_eos=True)
        tickets = [router.submit([5 + number, 6, 7], sampling) for number in range(6)]
        begun = [list((await anext(ticket)).tokens) for ticket in tickets]
        if fault is not None:
            router.inject(0, VICTIM, fault)
        rest = await asyncio.gather(*map(collect, tickets))
        return [first + tokens for first, (tokens, _) in zip(begun, rest, strict=True)]

    with Gang() as gang:
        gang.start_all(live, SIZE, specs)
        await link.wait_ready(PATIENCE_S)
        for fault in (None, *harmless):
            seen.texts.append(await asyncio.wait_for(texts(fault), PATIENCE_S))
        for _ in range(100):  # until the last steps of a fault have passed, and the gang sleeps
            await collect(router.submit([5], Sampling(2, ignore_eos=True)))
            await asyncio.sleep(0.02)
            seen.used_blocks = [link.reports[rank].used_blocks for rank in range(SIZE)]
            if not any(seen.used_blocks):
                break
        last = asyncio.create_task(texts(fatal))
        seen.failure = await asyncio.wait_for(link.wait_down(), PATIENCE_S)
        last.cancel()  # its streams wait for a next life, which does not come
        seen.ends = await asyncio.to_thread(gang.results, [OTHER] if fatal.kind in ("kill", "hang") else range(SIZE))
    await router.close()
    return seen


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.checkpoints import write_mixtral  # imports more than the ranks need

    return write_mixtral(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def seen_of(model: Path, fatal: Fault, harmless: list[Fault], timeout_s: float = 30.0) -> Seen:
    return asyncio.run(asyncio.wait_for(life(model, harmless, fatal, timeout_s), 180))


def test_slow_steps_and_a_full_pool_change_no_token_and_an_exception_is_named(model: Path) -> None:
    harmless = [Fault(0, "slow", seconds=0.01, steps=20), Fault(0, "full", steps=15)]
    seen = seen_of(model, Fault(0, "raise", after_steps=5), harmless)
    undisturbed, slow, full = seen.texts
    assert slow == full == undisturbed and all(len(text) == 60 for text in undisturbed)
    assert seen.used_blocks == [0] * SIZE
    assert seen.failure == f"rank {VICTIM} failed: ChaosError: chaos: raise on demand (after_steps 5)"
    assert seen.ends[OTHER].culprits == {VICTIM: "failed: ChaosError: chaos: raise on demand (after_steps 5)"}


def test_a_rank_that_kills_itself_is_named(model: Path) -> None:
    seen = seen_of(model, Fault(0, "kill", after_steps=3), [])
    assert seen.failure.startswith(f"rank {VICTIM}: its connection was closed")
    assert list(seen.ends[OTHER].culprits or {}) == [VICTIM]
    assert "was killed or crashed" in seen.ends[OTHER].error


def test_a_rank_that_hangs_is_named(model: Path) -> None:
    seen = seen_of(model, Fault(0, "hang"), [], SHORT_S)
    assert list(seen.ends[OTHER].culprits or {}) == [VICTIM]
    assert f": rank {VICTIM} is in no collective" in seen.failure
    assert "_hang (dp_engine/chaos.py" in seen.ends[OTHER].report
