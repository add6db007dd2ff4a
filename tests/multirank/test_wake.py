"""Going to sleep and waking up: whole ranks, a real router and real sockets; and how such a gang ends."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dp_engine.config import EngineConfig
from dp_engine.messages import Sampling
from dp_engine.spec import RankSpec
from ep.config import ExpertConfig
from launcher.books import Quote
from launcher.keys import LaunchKeys
from launcher.router import Router
from tests.fake_gang import collect, open_link
from tests.multirank.gang import Gang
from tests.multirank.serving_rank import POISON, End, serve
from vote.config import VoteConfig

pytestmark = pytest.mark.xdist_group("wake")

ROUNDS, MANY_ROUNDS = 150, 500
LONGEST_GAP_S = 0.005
PROMPTS = ([5, 6, 7], [20, 21], [30], [40] * 9)
PATIENCE_S = 30.0  # with a request: one that is lost is never answered
ENGINES = {"2-phased": (2, {}), "3-unified-overlap": (3, {"policy": "unified", "overlap": True})}


@dataclass
class Seen:
    """What a gang did, until a poisoned request ended it. `first`: the first answer; `naps`: sleeps by rank."""

    rounds: int
    first: list[int]
    texts: dict[int, list[list[int]]] = field(default_factory=dict)  # by prompt
    naps: list[int] = field(default_factory=list)
    failure: str = ""
    failed_after_s: float = 0.0
    diagnoses: list[str] = field(default_factory=list)
    ends: dict[int, End] = field(default_factory=dict)


async def live(size: int, model: Path, engine: dict[str, Any], rounds: int) -> Seen:
    """One life of a gang whose last request, to its last rank, is poison."""
    keys, rng = LaunchKeys.generate(), random.Random(size)
    router = Router(size)
    link = await open_link(router, keys)
    specs = [
        RankSpec(
            rank, size, 1, link.endpoint, keys.for_rank(), str(model), EngineConfig(num_blocks=40, **engine),
            VoteConfig(), ExpertConfig(), start_timeout_s=60.0, threads=1, host="127.0.0.1",
        )
        for rank in range(size)
    ]  # fmt: skip

    async def ask(rank: int, prompt: list[int]) -> list[int]:
        quote = Quote(0, 0, 0, rank)
        link.books.quote = lambda *_: quote  # type: ignore[method-assign]
        ticket = router.submit(prompt, Sampling(2, temperature=0.0, ignore_eos=True))
        assert ticket.rank == rank
        return (await asyncio.wait_for(collect(ticket), PATIENCE_S))[0]

    with Gang() as gang:
        gang.start_all(serve, size, specs)
        await link.wait_ready(60)
        seen = Seen(rounds, await ask(size - 1, PROMPTS[0]), {number: [] for number in range(len(PROMPTS))})
        for _ in range(rounds):
            await asyncio.sleep(rng.uniform(0, LONGEST_GAP_S))
            number = rng.randrange(len(PROMPTS))
            seen.texts[number].append(await ask(rng.randrange(size), PROMPTS[number]))
        seen.naps = [link.reports[rank].idle_sleeps for rank in range(size)]
        started = time.monotonic()
        last = asyncio.create_task(ask(size - 1, [POISON]))
        seen.failure, seen.failed_after_s = await link.wait_down(), time.monotonic() - started
        last.cancel()  # it waits for a next life
        seen.ends = await asyncio.to_thread(gang.results, range(size))
        await asyncio.sleep(0.2)  # for their last messages
    await router.close()
    seen.diagnoses = [link.diagnosis.text] if link.diagnosis is not None else []
    return seen


@pytest.fixture(
    scope="module",
    params=[
        *((name, ROUNDS) for name in ENGINES),
        *(pytest.param((name, MANY_ROUNDS), marks=pytest.mark.slow) for name in ENGINES),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    from tests.checkpoints import write_mixtral

    name, rounds = request.param
    size, engine = ENGINES[name]
    model = write_mixtral(tmp_path_factory.mktemp("model") / "tiny", seed=1)
    return asyncio.run(asyncio.wait_for(live(size, model, engine, rounds), 180))


def test_every_request_is_answered_however_soon_it_follows(seen: Seen) -> None:
    """The very first one too; whichever rank answers says the same."""
    assert sum(len(texts) for texts in seen.texts.values()) == seen.rounds
    for texts in seen.texts.values():
        assert all(text == texts[0] for text in texts)
        assert len(texts[0]) == 2
    assert seen.first == seen.texts[0][0]


def test_the_gang_slept_in_between(seen: Seen) -> None:
    """All ranks as often, but for the last time, of which some may have told already."""
    assert max(seen.naps) - min(seen.naps) <= 1
    assert min(seen.naps) >= seen.rounds // 10


def test_a_failed_rank_is_named_at_once(seen: Seen) -> None:
    """By the router, and by the ranks that are left; the report comes once."""
    last = len(seen.ends) - 1
    assert f"rank {last} failed: ValueError: this token is poison" in seen.failure
    assert seen.failed_after_s < 10
    assert seen.ends[last].error == "this token is poison"
    for rank in range(last):
        assert seen.ends[rank].culprits == {last: "failed: ValueError: this token is poison"}
    assert seen.diagnoses == [seen.ends[0].report] and seen.ends[0].report
