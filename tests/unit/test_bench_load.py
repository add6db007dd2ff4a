"""What the load benchmark writes, reads and says."""

from pathlib import Path

import pytest

from bench import load, load_checkpoint, load_ranks
from bench.load import Figures, figures, holds
from bench.load_ranks import Outcome, Peak
from dp_engine.checkpoint import INDEX, Checkpoint

GB = 1_000_000_000


def test_figures_are_of_the_slowest_rank_and_the_largest_surplus() -> None:
    reads = [[Outcome(10, 11, 1, 4 * GB, 0), Outcome(10, 12, 1, 2 * GB, 0)], [Outcome(0, 4, 1, 4 * GB, 0)]]
    loads = [
        [Outcome(20, 23, 1, 4 * GB, 5 * GB), Outcome(20.5, 22, 1, 2 * GB, 2 * GB)],
        [Outcome(0, 4, 4, 4 * GB, 4 * GB)],
    ]
    assert figures("cold", reads, loads) == Figures("cold", 6.0, 3.0, 3.5, 3.0, 1.25, 1.0)


@pytest.mark.parametrize(
    ("cache", "ratio", "surplus", "expected"),
    [("cold", 1.5, 1.0, True), ("cold", 1.6, 0.1, False), ("warm", 9.0, 0.1, True), ("warm", 1.0, 1.1, False)],
)
def test_what_must_hold(cache: str, ratio: float, surplus: float, expected: bool) -> None:
    assert holds(Figures(cache, 1.0, 1.0, 1.0, 1.0, ratio, surplus)) is expected


def test_the_size_is_what_was_asked_for() -> None:
    assert [load_checkpoint.num_layers(gb, "bfloat16") for gb in (0.1, 1, 10)] == [1, 1, 13]
    assert load_checkpoint.num_layers(10, "float32") == 7


def test_the_peak_is_the_most_that_was_seen_above_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_ranks.anonymous_bytes() > 1 << 20
    monkeypatch.setattr(load_ranks, "SAMPLE_S", 60)
    seen = iter([100, 150, 400, 90, 120])
    monkeypatch.setattr(load_ranks, "anonymous_bytes", lambda: next(seen))
    with Peak() as peak:
        for _ in range(3):
            peak.look()
    assert peak.bytes == 300


def test_a_small_checkpoint_is_written_read_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"HIDDEN": 64, "INNER": 96, "VOCAB": 128, "SHARD_BYTES": 300_000, "HEAD_DIM": 16}.items():
        monkeypatch.setattr(load_checkpoint, name, value)
    load_checkpoint.write_checkpoint(tmp_path, 0.0)
    checkpoint = Checkpoint(tmp_path)
    assert len(list(checkpoint.names())) == 3 + 24 + 7
    assert (tmp_path / INDEX).exists()
    load.main(["--dir", str(tmp_path), "--dp", "2", "--rounds", "1", "--no-warm"])
    assert '"owned_gb": 0.0' in capsys.readouterr().out
