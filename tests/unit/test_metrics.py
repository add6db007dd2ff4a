"""What /metrics says of the router and of the ranks' reports."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dp_engine.messages import BALLOT_BUCKETS_S, FIRST_TOKEN_BUCKETS_S, ExpertReport, Histogram, Output, Report
from launcher.metrics import RouterCollector
from tests.fake_gang import StubGang
from tests.front_server import MODEL, FrontServer

REPORT = Report(
    running=1,
    waiting=2,
    used_blocks=3,
    num_blocks=12,
    prefill_steps=5,
    decode_steps=6,
    idle_sleeps=7,
    placeholder_steps=8,
    mixed_steps=9,
    prompt_tokens=10,
    generated_tokens=11,
    preemptions=12,
    aborted=20,
    prefix_query_tokens=13,
    prefix_hit_tokens=14,
    draft_tokens=15,
    accepted_draft_tokens=16,
    forks=17,
    cached_blocks=18,
    batched_tokens=21,
    sum_qk=22,
    max_seqlen_k=23,
    min_seqlen_k=24,
    bad_messages=19,
    ballots=Histogram(2, 0.5, [0] * len(BALLOT_BUCKETS_S) + [2]),
    first_tokens=Histogram(3, 0.5, [1, *[0] * (len(FIRST_TOKEN_BUCKETS_S) - 1), 2]),
    experts=ExpertReport(
        recent_rows=[30, 0],
        rows=31,
        rebalances=32,
        layers_placed=33,
        received=34,
        received_bytes=35,
        held_s=0.5,
        longest_held_s=0.25,
    ),
)


def samples(stub: StubGang) -> dict[str, float]:
    """Value by name and labels, as a scrape shows them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RouterCollector(stub.router))
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("phalanx_requests_running", 1),
        ("phalanx_requests_waiting", 2),
        ("phalanx_kv_blocks_used", 3),
        ("phalanx_kv_blocks", 12),
        ("phalanx_kv_use_ratio", 0.25),
        ("phalanx_idle_sleeps_total", 7),
        ("phalanx_placeholder_steps_total", 8),
        ("phalanx_prompt_tokens_total", 10),
        ("phalanx_generated_tokens_total", 11),
        ("phalanx_preemptions_total", 12),
        ("phalanx_prefix_query_tokens_total", 13),
        ("phalanx_prefix_hit_tokens_total", 14),
        ("phalanx_draft_tokens_total", 15),
        ("phalanx_accepted_draft_tokens_total", 16),
        ("phalanx_forks_total", 17),
        ("phalanx_cached_blocks", 18),
        ("phalanx_rank_bad_messages_total", 19),
        ("phalanx_aborts_total", 20),
        ("phalanx_batched_tokens_total", 21),
        ("phalanx_attention_pairs_total", 22),
        ("phalanx_max_seqlen_k", 23),
        ("phalanx_min_seqlen_k", 24),
        ("phalanx_ballot_seconds_count", 2),
        ("phalanx_first_token_seconds_count", 3),
        ("phalanx_expert_rows_total", 31),
        ("phalanx_expert_rebalances_total", 32),
        ("phalanx_expert_layers_placed_total", 33),
        ("phalanx_expert_moves_total", 34),
        ("phalanx_expert_moved_bytes_total", 35),
        ("phalanx_expert_rebalance_seconds_total", 0.5),
        ("phalanx_expert_rebalance_longest_seconds", 0.25),
    ],
)
def test_a_report_is_shown(name: str, value: float) -> None:
    stub = StubGang(2)
    stub.say(1, Output(1, [], [], [], REPORT))
    assert {key: shown for key, shown in samples(stub).items() if key.startswith(name + "{")} == {
        f'{name}{{gang="0",rank="1"}}': value
    }


def test_imbalance_is_shown_by_layer_when_all_ranks_have_reported() -> None:
    stub = StubGang(2)
    stub.say(1, Output(1, [], [], [], REPORT))
    shown = samples(stub)
    assert shown['phalanx_expert_recent_rows{gang="0",layer="0",rank="1"}'] == 30
    assert not [name for name in shown if name.startswith("phalanx_expert_imbalance")]
    assert REPORT.experts is not None
    other = msgspec.structs.replace(REPORT.experts, recent_rows=[10, 0])
    stub.say(0, Output(1, [], [], [], msgspec.structs.replace(REPORT, experts=other)))
    shown = samples(stub)
    uneven = {name: value for name, value in shown.items() if name.startswith("phalanx_expert_imbalance")}
    assert uneven == {'phalanx_expert_imbalance{gang="0",layer="0"}': 1.5}  # nobody has computed layer 1


def test_steps_are_shown_by_type() -> None:
    stub = StubGang(1)
    stub.say(0, Output(1, [], [], [], REPORT))
    name = 'phalanx_steps_total{{gang="0",rank="0",type="{}"}}'
    steps = {kind: samples(stub)[name.format(kind)] for kind in ("prefill", "decode")}
    assert steps == {"prefill": 5, "decode": 6}
    assert samples(stub)['phalanx_steps_total{gang="0",rank="0",type="mixed"}'] == 9


@pytest.mark.parametrize("mode", ["none", "new", "all"])
def test_the_pause_mode_is_shown(mode: Any) -> None:
    stub = StubGang(1)
    stub.router.pause(mode)
    shown = {kind: samples(stub)[f'phalanx_paused{{mode="{kind}"}}'] for kind in ("new", "all")}
    assert shown == {"new": mode == "new", "all": mode == "all"}


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with FrontServer() as server:
        yield server


def test_over_http(server: FrontServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        for _ in range(4):
            reply = client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 3})
            assert reply.status_code == 200
        text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    started = {s.labels["rank"]: s.value for s in families["phalanx_requests_started"].samples}
    assert started == {str(rank): count for rank, count in enumerate(server.router.replicas[0].started)}
    assert sum(started.values()) == 4
    finished = families["phalanx_requests_finished"].samples
    assert sum(s.value for s in finished if s.labels["reason"] == "length") == 4
    ballots = [s for s in families["phalanx_ballot_seconds"].samples if s.labels["rank"] == "0"]
    buckets = [s for s in ballots if s.name.endswith("_bucket")]
    assert buckets[-1].labels["le"] == "+Inf"
    assert [s.value for s in buckets] == sorted(s.value for s in buckets)
    count = next(s for s in ballots if s.name.endswith("_count"))
    assert buckets[-1].value == count.value > 0
    for name, family in families.items():
        assert re.fullmatch(r"phalanx_[a-z_]+", name)
        assert family.documentation.endswith(".")
        assert family.samples
