"""Which rows of a batch yield tokens, and copies of KV blocks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dp_engine.config import EngineConfig
from dp_engine.kv_cache import KVCache
from dp_engine.model_config import ModelConfig
from dp_engine.runner import output_rows
from tests.checkpoints import write_mixtral


@pytest.mark.parametrize(
    ("seqlens_q", "num_drafts", "expected"),
    [
        ([], [], []),
        ([1, 1, 1], [0, 0, 0], [0, 1, 2]),
        ([5, 1, 3], [0, 0, 0], [4, 5, 8]),
        ([4], [3], [0, 1, 2, 3]),
        ([1, 4, 7, 3], [0, 3, 0, 1], [0, 1, 2, 3, 4, 11, 13, 14]),
        ([6, 2], [2, 0], [3, 4, 5, 7]),
    ],
)
def test_output_rows(seqlens_q: list[int], num_drafts: list[int], expected: list[int]) -> None:
    rows = output_rows(np.array(seqlens_q, np.int32), np.array(num_drafts, np.int32))
    assert rows.dtype == np.int64
    assert rows.tolist() == expected


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory: Path = write_mixtral(tmp_path_factory.mktemp("model"), layers=3)
    return ModelConfig.load(directory, EngineConfig())


@pytest.mark.parametrize(
    ("copies", "blocks"),
    [
        ([], [0, 1, 2, 3, 4]),
        ([(1, 4)], [0, 1, 2, 3, 1]),
        ([(1, 2), (2, 3)], [0, 1, 1, 2, 4]),  # what block 2 held before this step
        ([(1, 2), (2, 1)], [0, 2, 1, 3, 4]),
        ([(1, 2), (1, 3)], [0, 1, 1, 1, 4]),
    ],
    ids=["none", "one", "chain", "exchange", "two of one"],
)
def test_blocks_are_copied_in_every_layer(
    config: ModelConfig, copies: list[tuple[int, int]], blocks: list[int]
) -> None:
    cache = KVCache(config, EngineConfig(block_size=4), 5, torch.device("cpu"))
    for layer in cache.layers:
        layer.normal_()
    before = [layer.clone() for layer in cache.layers]
    cache.copy_blocks(np.array(copies, np.int64).reshape(-1, 2))
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer, old[blocks])
