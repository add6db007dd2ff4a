"""Routing against the router modules of transformers, family by family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig

from dp_engine.families import FAMILIES
from ep.routing import Router, Routing, route
from kernels import native
from tests.unit.test_model_config import json_file

HIDDEN, EXPERTS, TOP_K = 16, 12, 4


@dataclass(frozen=True)
class Case:
    """A router of transformers and the keys of its config that matter."""

    model_type: str
    module: str
    config: Mapping[str, Any] = field(default_factory=dict)


def _groups(num_groups: int, topk_groups: int, **more: Any) -> dict[str, Any]:
    return {"n_group": num_groups, "topk_group": topk_groups, **more}


CASES = {
    "mixtral": Case("mixtral", "MixtralTopKRouter"),
    "qwen2": Case("qwen2_moe", "Qwen2MoeTopKRouter"),
    "qwen2-normed": Case("qwen2_moe", "Qwen2MoeTopKRouter", {"norm_topk_prob": True}),
    "qwen3": Case("qwen3_moe", "Qwen3MoeTopKRouter"),
    "qwen3-normed": Case("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}),
    "olmoe": Case("olmoe", "OlmoeTopKRouter"),
    "olmoe-normed": Case("olmoe", "OlmoeTopKRouter", {"norm_topk_prob": True}),
    "v2-greedy": Case("deepseek_v2", "DeepseekV2TopkRouter", {"routed_scaling_factor": 2.5, **_groups(3, 1)}),
    "v2-groups": Case("deepseek_v2", "DeepseekV2TopkRouter", {"topk_method": "group_limited_greedy", **_groups(4, 2)}),
    "v2-scaled": Case(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, **_groups(2, 1)},
    ),
    "v3": Case("deepseek_v3", "DeepseekV3TopkRouter", _groups(4, 2)),
    "v3-one-group": Case("deepseek_v3", "DeepseekV3TopkRouter", _groups(1, 1, routed_scaling_factor=1.0)),
    "v3-as-they-are": Case("deepseek_v3", "DeepseekV3TopkRouter", _groups(6, 3, norm_topk_prob=False)),
    "glm4": Case("glm4_moe", "Glm4MoeTopkRouter", _groups(1, 1)),
    "glm4-groups": Case(
        "glm4_moe", "Glm4MoeTopkRouter", _groups(3, 2, norm_topk_prob=False, routed_scaling_factor=2.5)
    ),
    "gpt-oss": Case("gpt_oss", "GptOssTopKRouter"),
}


def routers(case: Case, coarse: bool) -> tuple[Any, Router]:
    """Theirs and ours with the same random weights. Coarse ones are small integers, so that many logits are equal."""
    from importlib import import_module

    count = "num_experts" if case.model_type in ("qwen2_moe", "olmoe") else "num_local_experts"
    count = "n_routed_experts" if FAMILIES[case.model_type].shared == "shared_experts" else count
    keys = {"hidden_size": HIDDEN, count: EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 8}
    config = AutoConfig.for_model(case.model_type, num_attention_heads=4, **keys | dict(case.config))
    module = import_module(f"transformers.models.{case.model_type}.modeling_{case.model_type}")
    theirs = getattr(module, case.module)(config)
    named = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    with torch.no_grad():
        for name, tensor in named.items():
            if coarse:
                tensor.copy_(torch.randint(-1, 2, tensor.shape))
            else:
                tensor.normal_(std=0.3 if name == "e_score_correction_bias" else 1.0)
    family, values = FAMILIES[case.model_type], keys | dict(case.config)
    file = json_file(values, family.defaults)
    assert family.routing is not None
    tensors = [named.get(name) for name in ("bias", "e_score_correction_bias")]
    return theirs, Router(family.routing(file), theirs.weight.detach(), *tensors)


def by_expert(weights: Tensor, topk_ids: Tensor) -> Tensor:
    """fp32 [T, E], zeros where an expert was not chosen."""
    assert all(len(set(row)) == len(row) for row in topk_ids.tolist())
    return torch.zeros(len(topk_ids), EXPERTS).scatter_(1, topk_ids, weights)


@pytest.mark.parametrize("in_c", [False, True], ids=["torch", "c"])
@pytest.mark.parametrize("coarse", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("name", CASES)
def test_routing_is_as_in_transformers(name: str, coarse: bool, in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equals C takes the first and torch any, so there only what they count is the same."""
    if not in_c:
        monkeypatch.setattr(native, "kernels", lambda: None)
    torch.manual_seed(3)
    theirs, ours = routers(CASES[name], coarse)
    for rows in (1, 50):
        x = torch.randint(-1, 2, (rows, HIDDEN)).float() if coarse else torch.randn(rows, HIDDEN)
        with torch.inference_mode():
            _, scores, chosen = theirs(x)
            weights, topk_ids = ours(x)
        assert weights.dtype == torch.float32 and topk_ids.dtype == torch.int64
        found, expected = by_expert(weights, topk_ids), by_expert(scores, chosen)
        if coarse and in_c:
            found, expected = found.sort().values, expected.sort().values
        torch.testing.assert_close(found, expected, rtol=3e-6 if in_c else 1e-6, atol=1e-7)
    assert ours(x[:0])[1].shape == (0, TOP_K)


RULES = st.builds(
    Routing,
    top_k=st.integers(1, 4),
    scoring=st.sampled_from(["softmax", "sigmoid", "topk_softmax"]),
    normalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    num_groups=st.sampled_from([1, 2, 3]),
    topk_groups=st.sampled_from([1, 2, 3]),
)


@settings(max_examples=60, deadline=None)
@given(routing=RULES, seed=st.integers(0, 1000), rows=st.integers(1, 9))
def test_a_row_is_routed_by_itself_within_its_groups(routing: Routing, seed: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, EXPERTS, generator=generator)
    correction = torch.randn(EXPERTS, generator=generator) if routing.scoring == "sigmoid" else None
    weights, topk_ids = route(logits, routing, correction)
    for row in range(rows):
        alone = route(logits[row : row + 1], routing, correction)
        assert torch.equal(alone[0][0], weights[row]) and torch.equal(alone[1][0], topk_ids[row])
    if routing.normalize:
        torch.testing.assert_close(weights.sum(1), torch.full((rows,), routing.scale))
    if routing.scoring != "topk_softmax" and routing.topk_groups < routing.num_groups:
        used = topk_ids // (EXPERTS // routing.num_groups)
        assert all(len(set(groups)) <= routing.topk_groups for groups in used.tolist())


def test_router_is_in_fp32_in_bf16_models() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(EXPERTS, HIDDEN).bfloat16(), torch.randn(5, HIDDEN).bfloat16()
    weights, topk_ids = Router(Routing(2), weight)(x)
    expected = route(x.float() @ weight.float().T, Routing(2))
    assert torch.equal(topk_ids, expected[1])
    torch.testing.assert_close(weights, expected[0])
