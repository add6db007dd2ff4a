"""The C kernels in all their variants against torch, and what happens where they cannot be had.

Without AMX that variant runs on tiles emulated in C, if the CPU has the rest.
"""

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native, strips
from kernels.expert_weights import Activation
from kernels.experts import ExpertWeights, GroupedExperts, make_experts
from kernels.linear import InvariantLinear, PackedLinear, make_linear


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=native.VARIANTS, ids=lambda variant: variant.name)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    variant: native.Variant = request.param
    target = tmp_path_factory.mktemp("kernels") / f"{variant.name}.so"
    missing = native.missing_flags(variant)
    emulated = bool(missing) and all(flag.startswith("amx") for flag in missing)
    if missing and not emulated:
        pytest.skip(f"the CPU lacks {', '.join(missing)}")
    try:
        native.compile_to(target, variant, *(["-include", str(EMULATED_TILES)] if emulated else []))
    except OSError as error:
        pytest.skip(str(error))
    library = native.load(target)
    if not emulated and library.phalanx_init() != 0:
        pytest.skip("the system does not grant AMX tiles")
    return library


@pytest.fixture
def library(compiled: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: compiled)


EMULATED_TILES = Path(__file__).with_name("emulated_tiles.h")
needs_kernels = pytest.mark.skipif(native.kernels() is None, reason="no fitting CPU or no C compiler on this machine")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("rows", [0, 1, 2, 11, 12, 13, 16, 17, 33])
@pytest.mark.parametrize(("n", "k"), [(32, 32), (96, 64), (64, 576)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rows: int, n: int, k: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    weight, wide = torch.randn(n, k).bfloat16(), torch.randn(rows, k + 8).bfloat16()
    x, other = wide[:, :k], torch.randn(rows, n).bfloat16()  # rows of x do not touch each other
    bias = torch.randn(n).bfloat16() if with_bias else None
    layer = make_linear(weight, bias)
    assert isinstance(layer, strips.StripLinear)
    assert torch.equal(layer.plain(), weight)
    exact = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(layer(x), exact.bfloat16(), rtol=0.01, atol=0.02)
    torch.testing.assert_close(layer.add(x, other), (exact + other.float()).bfloat16(), rtol=0.01, atol=0.02)
    if rows:
        assert torch.equal(layer(x[-1:]), layer(x)[-1:]), "a row's bits are its own"


def some_experts(count: int, biases: bool) -> list[ExpertWeights]:
    shapes = ((96, 64), (96, 64), (64, 96), *(((96,), (96,), (64,)) if biases else ()))
    return [ExpertWeights(*((torch.randn(shape) / 8).bfloat16() for shape in shapes)) for _ in range(count)]


def by_hand(rows: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """In fp32, rounded where the kernel rounds."""
    gate, up, down, *biases = (tensor.float() for tensor in weights.tensors())
    gate_bias, up_bias, down_bias = biases or (None, None, None)
    gated, opened = F.linear(rows.float(), gate, gate_bias), F.linear(rows.float(), up, up_bias)
    if activation == "silu":
        inner = F.silu(gated) * opened
    else:
        gated = gated.clamp(max=7)
        inner = gated * torch.sigmoid(1.702 * gated) * (opened.clamp(-7, 7) + 1)
    return F.linear(inner.bfloat16().float(), down, down_bias)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 5, 0], [1, 0, 2], [16, 17, 40]])
@pytest.mark.parametrize(("activation", "biases"), [("silu", False), ("silu", True), ("swiglu_oai", True)])
def test_experts(counts: list[int], activation: Activation, biases: bool) -> None:
    torch.manual_seed(sum(counts))
    weights, rows = some_experts(len(counts), biases), (5 * torch.randn(sum(counts), 64)).bfloat16()
    experts = make_experts(weights, activation)
    assert isinstance(experts, strips.StripExperts)
    pairs = zip(rows.split(counts), weights, strict=True)
    expected = torch.cat([by_hand(some, expert, activation) for some, expert in pairs])
    torch.testing.assert_close(experts(rows, counts), expected.bfloat16(), rtol=0.02, atol=0.1)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("biases", [False, True])
def test_experts_give_back_their_weights_and_move(biases: bool) -> None:
    first, second, third = weights = some_experts(3, biases)
    experts = make_experts(weights[:2], "swiglu_oai")
    for slot, original in enumerate(weights[:2]):
        pairs = zip(experts.weights(slot).tensors(), original.tensors(), strict=True)
        assert all(torch.equal(back, put) for back, put in pairs)
    rows, counts = torch.randn(12, 64).bfloat16(), [3, 4, 5]
    moved = experts.rearranged([1, third, 0])
    assert torch.equal(moved(rows, counts), make_experts([second, third, first], "swiglu_oai")(rows, counts))
    assert isinstance(moved, strips.StripExperts) and isinstance(experts, strips.StripExperts)
    assert moved._packed[0] is experts._packed[1], "not packed again"
    assert torch.equal(experts(rows, [6, 6]), make_experts(weights[:2], "swiglu_oai")(rows, [6, 6]))
    empty = moved.rearranged([])
    assert empty(rows[:0], []).shape == (0, 64)
    assert torch.equal(empty.rearranged([third])(rows, [12]), make_experts([third], "swiglu_oai")(rows, [12]))


@pytest.mark.usefixtures("library")
def test_packing_is_the_order_of_use() -> None:
    """Line r of a tile: inputs 2r and 2r + 1 of its 16 outputs."""
    weight = torch.arange(64 * 96, dtype=torch.int16).view(torch.bfloat16).view(64, 96)
    expected = [
        weight[strip + half + column, inputs + 2 * line : inputs + 2 * line + 2]
        for strip in (0, 32)
        for inputs in (0, 32, 64)
        for half in (0, 16)
        for line in range(16)
        for column in range(16)
    ]
    packed = strips.pack(weight)
    assert packed.data_ptr() % 64 == 0
    assert torch.equal(packed[: weight.numel()].view(torch.int16), torch.cat(expected).view(torch.int16))
    assert torch.equal(strips.unpack(packed, 64, 96).view(torch.int16), weight.view(torch.int16))


def every_second_row(weight: Tensor) -> Tensor:
    return weight.repeat_interleave(2, 0)[::2]


def columns_apart(weight: Tensor) -> Tensor:
    return weight.T.contiguous().T


def at_an_odd_place(weight: Tensor) -> Tensor:
    """As files have them: aligned to the number, not to the line."""
    return torch.cat((weight.new_zeros(1), weight.flatten()))[1:].view(weight.shape)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("lay_out", [every_second_row, columns_apart, at_an_odd_place])
def test_weights_may_lie_anyhow(lay_out: Callable[[Tensor], Tensor]) -> None:
    gate, up = torch.randn(2, 96, 64).bfloat16()
    size = gate.numel()
    assert torch.equal(strips.pack(lay_out(gate))[:size], strips.pack(gate)[:size])
    both = strips.pack(strips.interleave(gate, up))[: 2 * size]
    for left, right in ((gate, up), (lay_out(gate), lay_out(up)), (gate, lay_out(up))):
        assert torch.equal(strips.pack_interleaved(left, right)[: 2 * size], both)
    for back, put in zip(strips.separate(strips.interleave(gate, up)), (gate, up), strict=True):
        assert torch.equal(back, put)


@pytest.mark.usefixtures("library")
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
    assert isinstance(make_linear(weight, invariant=True), InvariantLinear)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_share_strips(threads: int) -> None:
    """More of them than strips, too. Bits stay."""
    torch.manual_seed(threads)
    weight, bias, x = torch.randn(160, 64).bfloat16(), torch.randn(160).bfloat16(), torch.randn(30, 64).bfloat16()
    weights, rows, counts = some_experts(3, True), torch.randn(30, 64).bfloat16(), [17, 0, 13]
    packed, linear, experts = strips.pack(weight), make_linear(weight, bias), make_experts(weights)
    expected = linear(x), experts(rows, counts)
    torch.set_num_threads(threads)
    assert torch.equal(strips.pack(weight)[: weight.numel()], packed[: weight.numel()])
    for _ in range(20):
        assert torch.equal(linear(x), expected[0]) and torch.equal(experts(rows, counts), expected[1])


def test_a_rank_without_experts() -> None:
    assert isinstance(make_experts([]), GroupedExperts)
    assert make_experts([])(torch.empty(0, 64).bfloat16(), []).shape == (0, 64)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache and a fitting CPU."""
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_unfit", lambda variant: None)
    native.kernels.cache_clear()
    yield tmp_path
    native.kernels.cache_clear()


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.kernels() is None
    assert "there is no C compiler" in caplog.text


def test_a_compiler_that_fails(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "false")
    assert native.kernels() is None
    assert "false: exit code 1" in caplog.text
    assert not list((fresh / "kernels").iterdir()), "nothing half-made stays"


@needs_kernels
def test_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.kernels() is not None
    native.kernels.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("compiled again"))
    assert native.kernels() is not None
