"""The device a rank computes on is the one it was given, or an error."""

from dataclasses import replace

import pytest
import torch

from dp_engine.config import EngineConfig
from dp_engine.link import RankKeys
from dp_engine.rank import choose_device
from dp_engine.spec import RankSpec
from ep.config import ExpertConfig
from vote.config import VoteConfig

SPEC = RankSpec(
    rank=3, world_size=4, epoch=1, router_endpoint="", keys=RankKeys("", "", "", ""), model_dir="",
    engine=EngineConfig(), vote=VoteConfig(), experts=ExpertConfig(), start_timeout_s=1, threads=1, host="127.0.0.1",
)  # fmt: skip


def test_a_rank_without_a_gpu_leaves_those_of_the_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(SPEC) == torch.device("cpu")


def test_a_reserved_gpu_that_torch_cannot_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(RuntimeError, match=r"GPU 5 is reserved for rank 3, .*CUDA_VISIBLE_DEVICES='5'"):
        choose_device(replace(SPEC, gpu="5"))


def test_the_one_visible_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device(replace(SPEC, gpu="5")) == torch.device("cuda", 0) and chosen == [0]
