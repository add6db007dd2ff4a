"""Ranks of a model without experts: one router, and nothing else that joins them."""

import asyncio
from pathlib import Path

import torch

from dp_engine.config import EngineConfig
from dp_engine.messages import Report, Sampling
from dp_engine.spec import RankSpec
from ep.config import ExpertConfig
from launcher.books import Quote
from launcher.keys import LaunchKeys
from launcher.router import Router
from tests.fake_gang import collect, link_of, open_link
from tests.families import KINDS, write_family
from tests.multirank.gang import Gang
from tests.multirank.serving_rank import End, live
from vote.config import VoteConfig
from vote.report import Sightings, examine

SIZE, PROMPT, NEW = 2, [5, 9, 40, 17], 12


async def life(model: Path) -> tuple[list[list[int]], list[Report], Sightings, list[End]]:
    """Four texts of rank 0 and one of rank 1, what they report, what is seen of them, and how they end."""
    keys, router = LaunchKeys.generate(), Router(SIZE)
    link = await open_link(router, keys)
    specs = [
        RankSpec(
            rank, SIZE, 1, link.endpoint, keys.for_rank(), str(model), EngineConfig(num_blocks=40), VoteConfig(),
            ExpertConfig(), start_timeout_s=60.0, threads=1, host="127.0.0.1",
        )
        for rank in range(SIZE)
    ]  # fmt: skip

    async def ask(rank: int) -> list[int]:
        quote = Quote(0, 0, 0, rank)
        link.books.quote = lambda *_: quote  # type: ignore[method-assign]
        ticket = router.submit(PROMPT, Sampling(NEW, temperature=0.0, ignore_eos=True))
        return (await asyncio.wait_for(collect(ticket), 30))[0]

    with Gang() as gang:
        gang.start_all(live, SIZE, specs)
        await link.wait_ready(60)
        texts = [await ask(rank) for rank in (0, 0, 1, 0, 0)]
        await asyncio.sleep(0.3)  # for their reports
        seen = await asyncio.to_thread(link_of(router).observers().look)
        reports = [link.reports[rank] for rank in range(SIZE)]
        assert await link.shutdown(10) == []
        ends = await asyncio.to_thread(gang.results, range(SIZE))
    await router.close()
    return texts, reports, seen, list(ends.values())


def test_each_takes_its_own_steps(tmp_path: Path) -> None:
    model = write_family(tmp_path, KINDS["llama"])
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        whole = model.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
    texts, reports, seen, ends = asyncio.run(asyncio.wait_for(life(tmp_path), 120))
    assert texts == [whole[0, len(PROMPT) :].tolist()] * 5
    assert [report.decode_steps for report in reports] == [4 * (NEW - 1), NEW - 1]
    assert all(report.placeholder_steps == 0 for report in reports)
    assert examine(seen, seen).culprits == {}
    assert ends == [End(), End()]
