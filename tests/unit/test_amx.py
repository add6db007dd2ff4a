"""The AMX kernels against torch, and what happens where they cannot be had."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kernels import amx, native
from kernels.experts import ExpertWeights, GroupedExperts, make_experts
from kernels.linear import PackedLinear, make_linear


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


needs_amx = pytest.mark.skipif(native.amx() is None, reason="no AMX or no C compiler on this machine")


@needs_amx
@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 33, 200])
@pytest.mark.parametrize(("n", "k"), [(32, 32), (96, 64), (960, 576)])
def test_linear(rows: int, n: int, k: int) -> None:
    torch.manual_seed(rows)
    weight, wide = torch.randn(n, k).bfloat16(), torch.randn(rows, k + 8).bfloat16()
    x, other = wide[:, :k], torch.randn(rows, n).bfloat16()  # rows of x do not touch each other
    layer = make_linear(weight)
    assert isinstance(layer, amx.AmxLinear)
    exact = x.float() @ weight.float().T
    torch.testing.assert_close(layer(x), exact.bfloat16(), rtol=0.01, atol=0.02)
    torch.testing.assert_close(layer.add(x, other), (exact + other.float()).bfloat16(), rtol=0.01, atol=0.02)


@needs_amx
@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 5, 0], [1, 0, 2], [16, 17, 40]])
def test_experts(counts: list[int]) -> None:
    torch.manual_seed(sum(counts))
    shapes = ((96, 64), (96, 64), (64, 96))
    weights = [tuple((torch.randn(shape) / 8).bfloat16() for shape in shapes) for _ in counts]
    rows = (3 * torch.randn(sum(counts), 64)).bfloat16()
    experts = make_experts([ExpertWeights(*three) for three in weights])
    assert isinstance(experts, amx.AmxExperts)
    expected = []
    for (gate, up, down), some in zip(weights, rows.split(counts), strict=True):
        inner = (F.silu(some.float() @ gate.float().T) * (some.float() @ up.float().T)).bfloat16()
        expected.append(inner.float() @ down.float().T)
    torch.testing.assert_close(experts(rows, counts), torch.cat(expected).bfloat16(), rtol=0.02, atol=0.02)


@needs_amx
def test_silu_is_right_far_out() -> None:
    """The exponential has no holes: gates from -120 to 120."""
    gates = torch.linspace(-120, 120, 32 * 9).view(9, 32)
    eye = torch.eye(32).bfloat16()
    experts = make_experts([ExpertWeights(eye, torch.ones(32, 32).bfloat16() / 32, eye)])
    rows = gates.bfloat16()
    up = rows.float().mean(1, keepdim=True)
    expected = (F.silu(rows.float()) * up).bfloat16()
    torch.testing.assert_close(experts(rows, [9]), expected, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize(
    "weight", [torch.randn(32, 32), torch.randn(40, 32).bfloat16(), torch.randn(32, 24).bfloat16()]
)
def test_other_weights_take_another_way(weight: torch.Tensor) -> None:
    assert isinstance(make_linear(weight), PackedLinear)


def test_several_threads_take_another_way() -> None:
    torch.set_num_threads(2)
    assert isinstance(make_linear(torch.randn(32, 32).bfloat16()), PackedLinear)


def test_a_rank_without_experts() -> None:
    assert isinstance(make_experts([]), GroupedExperts)
    assert make_experts([])(torch.empty(0, 64).bfloat16(), []).shape == (0, 64)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache and a fitting CPU."""
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_unfit", lambda: None)
    native.amx.cache_clear()
    yield tmp_path
    native.amx.cache_clear()


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.amx() is None
    assert "there is no C compiler" in caplog.text


def test_a_compiler_that_fails(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "false")
    assert native.amx() is None
    assert "false: exit code 1" in caplog.text
    assert not list((fresh / "kernels").iterdir()), "nothing half-made stays"


@needs_amx
def test_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.amx() is not None
    native.amx.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("compiled again"))
    assert native.amx() is not None
