"""docs/scheduling.md says what the scheduler does: its worked example is run, its knobs and presets are looked up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from dp_engine.config import EngineConfig
from dp_engine.ledger import blocks_for
from dp_engine.messages import Add, Sampling
from dp_engine.policies import make_scheduler
from vote.config import VoteConfig
from vote.decision import StepType
from vote.group import SoloGroup
from vote.protocol import StepProtocol
from vote.recorder import Recorder
from vote.witness import Witness

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scheduling.md"

Record = dict[str, Any]

# name: (arrives before step, prompt tokens, new tokens)
REQUESTS = {"A": (1, 3000, 200), "B": (2, 500, 100), "C": (2, 500, 100), "D": (5, 500, 50)}
NAMES = dict(enumerate(REQUESTS, start=1))
PUBLISHED_VOTE = {"decision": "cadence", "fast_path": False}


def table(heading: str) -> list[dict[str, str]]:
    """The first table under a heading: a dict per row, by column."""
    lines = PAGE.read_text().split(f"\n{heading}\n", 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


class Walk:
    """The four requests on a gang of one."""

    def __init__(self, engine: Record, vote: Record) -> None:
        config = EngineConfig(num_blocks=256, max_num_seqs=4, **engine)
        self.mixed = config.policy == "unified"
        self.scheduler = make_scheduler(config, 256, max_model_len=4096, eos_token_ids=[2])
        self.protocol = StepProtocol(SoloGroup(), VoteConfig(**vote), Witness(Recorder(0, 1)), mixed=self.mixed)
        self.records: list[Record] = []

    def run(self) -> list[Record]:
        """Until everybody sleeps; records by step, the first one for step 1."""
        while self.step():
            pass
        assert not self.scheduler.num_unfinished and not self.scheduler.pool.num_used
        return self.records

    def step(self) -> bool:
        number = len(self.records) + 1
        for request_id, name in NAMES.items():
            if REQUESTS[name][0] == number:
                self.arrive(request_id, *REQUESTS[name][1:])
        scheduler, decode_step = self.scheduler, self.protocol.clock.decode_step
        if self.mixed:
            scheduler.plan(StepType.MIXED)
        facts = scheduler.facts()
        agreement = self.protocol.agree(facts, scheduler.try_prefill)
        if not agreement.compute:
            return False
        if not self.mixed:
            scheduler.plan(agreement.step_type)
        batch = scheduler.batch()
        rows = zip(batch.sampling.seed.tolist(), batch.seqlens_q.tolist(), strict=True)
        output = scheduler.settle(np.full(batch.num_outputs, 50))
        self.records.append(
            {
                "decode_step": decode_step,
                "wants prefill": "yes" if facts.wants_prefill else "no",
                "type": agreement.step_type.value,
                "scheduled": ", ".join(sorted(f"{NAMES[seed]} {seqlen_q}" for seed, seqlen_q in rows)),
                "free": scheduler.pool.num_free,
                "ended": ", ".join(sorted(f"{NAMES[i]}: {reason}" for i, reason in output.finished)),
            }
        )
        return True

    def arrive(self, request_id: int, prompt_len: int, max_tokens: int) -> None:
        """The seed is the id, so that a batch tells whose rows it has."""
        prompt = [100 * request_id + i for i in range(prompt_len)]
        sampling = Sampling(max_tokens, seed=request_id, ignore_eos=True)
        self.scheduler.add(Add(0, request_id, prompt, sampling))


def bounds(cell: str) -> tuple[int, int]:
    """`7` or `3–10`."""
    first, _, last = cell.partition("–")
    return int(first), int(last or first)


def check(rows: list[dict[str, str]], records: list[Record]) -> None:
    """Every row of a table against the steps it speaks of, which have no gaps between them."""
    following = bounds(rows[0]["step"])[0]
    for row in rows:
        first, last = bounds(row["step"])
        assert first == following, f"the table leaves out step {following}"
        following = last + 1
        for step in range(first, last + 1):
            record = records[step - 1]
            for name in record.keys() & row.keys() - {"decode_step", "free"}:
                assert row[name] == record[name], f"step {step}, {name}"
            if "decode_step" in row:
                assert bounds(row["decode_step"])[0] + step - first == record["decode_step"], f"step {step}"
        ends = (records[first - 1]["free"], records[last - 1]["free"])
        assert bounds(row["free"]) == ends, f"free blocks of steps {first} to {last}"


@pytest.mark.parametrize(
    ("heading", "engine", "vote"),
    [
        ("### The default", {}, {}),
        ("### Preset `deepinfer`", {"preset": "deepinfer"}, PUBLISHED_VOTE),
        ("### With `preemption: recompute`", {"preemption": "recompute"}, {}),
        ("### Policy `unified`", {"policy": "unified"}, {}),
        ("### Policy `unified`", {"preset": "vllm"}, {}),
    ],
)
def test_the_walk_through(heading: str, engine: Record, vote: Record) -> None:
    rows, records = table(heading), Walk(engine, vote).run()
    check(rows, records)
    same = bounds(rows[0]["step"])[0] - 1  # the steps before the table are those of the default
    assert records[:same] == Walk({}, {}).run()[:same]


@pytest.mark.parametrize(
    ("length", "blocks"), [(3000, 188), (3008, 188), (3009, 189), (3025, 190), (500, 32), (513, 33), (525, 33)]
)
def test_blocks_of_the_example(length: int, blocks: int) -> None:
    assert blocks_for(length, EngineConfig().block_size) == blocks


# ---- knobs and presets


def plain(setting: EngineConfig | VoteConfig, name: str) -> Any:
    return setting.model_dump(mode="json")[name]


def test_defaults_of_the_knobs() -> None:
    sections = {"engine": EngineConfig(), "vote": VoteConfig()}
    for row in table("## Knobs"):
        section, name = row["knob"].strip("`").split(".")
        assert yaml.safe_load(row["default"].strip("`")) == plain(sections[section], name), row["knob"]


def turned_back(heading: str) -> tuple[Record, Record]:
    """What the table of differences sets: engine's and vote's."""
    engine: Record = {}
    vote: Record = {}
    for row in table(heading):
        ((name, value),) = yaml.safe_load(row["turned back by"].strip("`")).items()
        (vote if name.startswith("vote.") else engine)[name.removeprefix("vote.")] = value
    return engine, vote


@pytest.mark.parametrize(
    ("heading", "preset", "policy", "published_vote"),
    [("### From DeepInfer", "deepinfer", "phased", PUBLISHED_VOTE), ("### From vLLM V1", "vllm", "unified", {})],
)
def test_differences_are_those_of_the_preset(heading: str, preset: str, policy: str, published_vote: Record) -> None:
    engine, vote = turned_back(heading)
    assert EngineConfig(policy=policy, **engine) == EngineConfig(preset=preset).model_copy(update={"preset": None})
    assert all(plain(EngineConfig(policy=policy), name) != value for name, value in engine.items())
    assert vote == published_vote


def test_unclipped_drafts_are_refused_where_the_whole_length_is_reserved() -> None:
    """They would be written behind the reserved blocks."""
    with pytest.raises(ValidationError, match="needs clip_drafts"):
        EngineConfig(admission="full", clip_drafts=False, num_draft_tokens=3)
