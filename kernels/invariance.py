"""Batch invariance: a row's result has the same bits whatever rows are computed with it.

A library is free to sum a row's products in another order when there are more rows. So products are computed in fixed
numbers of rows only, those that were seen to give the same bits, for a row in any place: `prove` tries them, on this
machine and in this process, on sums that cancel, where another order shows.

Elementwise functions need care too: torch's fp32 `sigmoid` and `silu` round otherwise where a vector register is not
filled. `exp`, softmax over the last dimension, sums over it, and what IEEE arithmetic defines do not (tests say so).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

REFERENCE = 16
COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

# Rows tried have other places than in the reference by this.
SHIFT = 5
SAMPLES = COUNTS[-1] + SHIFT

# Results compared: with so many, another order of summing shows in some.
LEAST_RESULTS = 8192

# Larger products are not tried with more rows: multiplications of one call, unless REFERENCE rows have more.
MOST_WORK = 1 << 31


class NotInvariant(RuntimeError):
    """This machine's libraries cannot give what batch invariance promises."""


@dataclass(frozen=True, slots=True)
class FixedRows:
    """Runs functions of rows in one of `counts` (ascending) at a time."""

    counts: tuple[int, ...]

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """function(*inputs), where inputs and result have as many rows [N, ...], N at least 1."""
        rows, results, start = len(inputs[0]), [], 0
        for count in self.pieces(rows):
            number = min(rows - start, count)
            results.append(function(*(_piece(x, start, number, count) for x in inputs))[:number])
            start += number
        return results[0] if len(results) == 1 else torch.cat(results)

    def pieces(self, rows: int) -> list[int]:
        """The numbers of rows in which `rows` are computed; only the last may have rows to spare."""
        whole, rest = divmod(rows, self.counts[-1])
        last = [next(count for count in self.counts if count >= rest)] if rest else []
        return [self.counts[-1]] * whole + last


def prove(function: Callable[..., Tensor], *samples: Tensor, most: int = COUNTS[-1]) -> FixedRows:
    """The numbers of rows, up to `most`, in which `function` may be run. samples: its inputs, each [SAMPLES, ...].

    Raises NotInvariant when not even REFERENCE rows keep their bits in other places.
    """
    most = max(most, REFERENCE)
    expected = FixedRows((REFERENCE,))(function, *(x[: most + SHIFT] for x in samples))
    counts = [count for count in COUNTS if count <= most and _agrees(function, samples, count, expected)]
    if REFERENCE not in counts:
        raise NotInvariant(
            "engine.batch_invariant: on this machine the result of a matrix product depends on a row's place among "
            f"{REFERENCE}; leave it out, or set OMP_NUM_THREADS=1 if there are several threads"
        )
    return FixedRows(tuple(counts))


def cancelling(inner: int, outer: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [SAMPLES, inner] and weight [outer, inner] whose products nearly cancel, in a random order."""
    generator = torch.Generator().manual_seed(inner * 7919 + outer)
    order = torch.randperm(inner, generator=generator)
    half = inner // 2
    x, weight = torch.randn(SAMPLES, inner, generator=generator), torch.randn(outer, inner, generator=generator)
    x, weight = x.to(dtype), weight.to(dtype)
    x[:, half : 2 * half] = -x[:, :half]
    weight[:, half : 2 * half] = weight[:, :half]
    x[:, half] *= 1.0625
    return x[:, order].to(device), weight[:, order].to(device)


def sigmoid(x: Tensor) -> Tensor:
    """In fp32, an element's bits the same in any place."""
    return x.float().neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), an element's bits the same in any place."""
    return (x * sigmoid(x)).to(x.dtype)


def _agrees(function: Callable[..., Tensor], samples: tuple[Tensor, ...], count: int, expected: Tensor) -> bool:
    """Do rows computed `count` at a time, and in other places than those of `expected`, have its bits?"""
    enough = LEAST_RESULTS // expected[0].numel()
    end = min(SHIFT + max(REFERENCE, count, enough), len(expected))
    found = FixedRows((count,))(function, *(x[SHIFT:end] for x in samples))
    return torch.equal(found, expected[SHIFT:end])


def _piece(x: Tensor, start: int, number: int, count: int) -> Tensor:
    """`number` rows from `start`, zeros up to `count`; aligned like any fresh tensor, as libraries look at that too."""
    piece = x[start : start + number]
    if number < count:
        return F.pad(piece, (0, 0) * (x.ndim - 1) + (0, count - number))
    aligned = piece.is_contiguous() and piece.data_ptr() % 64 == 0
    return piece if aligned else piece.clone(memory_format=torch.contiguous_format)
