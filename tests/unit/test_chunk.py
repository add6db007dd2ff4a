"""How much of a prompt the next chunk takes: context-parallel alignment, checkpoints, spans, smallest chunk."""

from typing import Any

import numpy as np
import pytest

from dp_engine.admission import Refused
from dp_engine.chunk import Chunker
from dp_engine.config import EngineConfig
from dp_engine.messages import Sampling
from dp_engine.sequence import Sequence
from tests.scheduler_world import World, expected, prompt_of


def chunk(
    rest: int,
    *,
    done: int = 0,
    used: int = 0,
    budget: int = 16,
    cp_size: int = 1,
    lookahead: int = 0,
    checkpoints: tuple[int, ...] = (),
    spans: tuple[tuple[int, int], ...] = (),
) -> int:
    """Tokens that a prompt gets, alone in its step if nothing of the budget is used."""
    config = EngineConfig(max_num_batched_tokens=budget, cp_size=cp_size, lookahead_tokens=lookahead)
    tokens = np.zeros(done + rest, np.int32)
    seq = Sequence(1, tokens, len(tokens), len(tokens) + 1, Sampling(1), checkpoints=checkpoints, spans=spans)
    return Chunker(config).seqlen_q(seq, done, rest, used, first=used == 0)


def chunks(prompt: int, **config: Any) -> list[int]:
    """Lengths of the chunks in which a prompt is computed, alone; its tokens are right."""
    marks = {name: config.pop(name) for name in ("chunk_checkpoints", "spans") if name in config}
    world = World(**config)
    world.add(1, prompt, max_tokens=2, **marks)
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, prompt), 2)
    return [pairs[0][1] for pairs in world.ran[:-1]]


# ---- budget and context parallelism


@pytest.mark.parametrize(
    ("cp_size", "budget", "used", "rest", "wanted"),
    [
        (1, 16, 0, 20, 16),
        (1, 17, 0, 20, 17),
        (1, 16, 13, 20, 3),
        (1, 16, 16, 20, 0),
        (2, 16, 0, 20, 16),
        (2, 17, 0, 20, 16),  # cut to a multiple of 2 * cp_size
        (2, 19, 0, 20, 16),
        (2, 17, 4, 20, 12),
        (2, 16, 4, 5, 5),  # a rest needs no multiple
        (2, 18, 16, 5, 0),  # 2 are left, which is no multiple of 4
        (4, 30, 8, 40, 16),
    ],
)
def test_budget_is_floored_to_the_alignment(cp_size: int, budget: int, used: int, rest: int, wanted: int) -> None:
    assert chunk(rest, used=used, budget=budget, cp_size=cp_size) == wanted


@pytest.mark.parametrize(
    ("cp_size", "seqlen_q", "charge"), [(1, 5, 5), (2, 5, 8), (2, 8, 8), (2, 9, 12), (4, 1, 8), (3, 7, 12)]
)
def test_chunks_are_charged_in_multiples_of_the_alignment(cp_size: int, seqlen_q: int, charge: int) -> None:
    assert Chunker(EngineConfig(cp_size=cp_size)).charge(seqlen_q) == charge


def test_charge_of_the_ones_before_leaves_less_for_the_next() -> None:
    world = World(max_num_batched_tokens=16, cp_size=2)
    for request_id in (1, 2, 3):
        world.add(request_id, 5)  # charged 8 each
    assert world.prefill() == [(1, 5), (2, 5)]
    world = World(max_num_batched_tokens=18, cp_size=2)
    for request_id in (1, 2):
        world.add(request_id, 9)  # charged 12, which leaves 6, of which 4 can be used
    assert world.prefill() == [(1, 9), (2, 4)]


# ---- checkpoints


@pytest.mark.parametrize(
    ("done", "rest", "checkpoints", "lookahead", "wanted"),
    [
        (0, 20, (5,), 0, 5),
        (0, 20, (5, 9), 0, 5),
        (5, 15, (5, 9), 0, 4),  # the one that has been reached counts no more
        (0, 20, (16,), 0, 16),
        (0, 20, (17,), 0, 16),  # beyond the budget
        (0, 10, (10,), 0, 10),  # at the prompt's end
        (0, 10, (11, 30), 0, 10),
        (0, 20, (3,), 4, 16),  # closer than the smallest chunk: skipped
        (0, 20, (4,), 4, 4),
        (0, 20, (3, 7), 4, 7),
        (8, 3, (9,), 4, 3),  # the rest is the smallest chunk
        (8, 3, (11,), 4, 3),
    ],
)
def test_checkpoints_end_a_chunk(
    done: int, rest: int, checkpoints: tuple[int, ...], lookahead: int, wanted: int
) -> None:
    assert chunk(rest, done=done, checkpoints=checkpoints, lookahead=lookahead) == wanted


@pytest.mark.parametrize("marks", [(3, 8, 9), (4, 8, 12), (1, 19), (16,)])
@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_every_checkpoint_ends_a_chunk(marks: tuple[int, ...], block_size: int) -> None:
    """On a block's edge or not."""
    edges = np.cumsum(chunks(20, chunk_checkpoints=marks, block_size=block_size, max_num_batched_tokens=16)).tolist()
    assert set(marks) < set(edges) and edges[-1] == 20


def test_checkpoints_that_a_chunk_skipped_are_consumed() -> None:
    assert chunks(20, chunk_checkpoints=(2, 6, 7), lookahead_tokens=5) == [6, 14]


def test_checkpoints_that_a_prefix_hit_covers_are_skipped() -> None:
    world = World(block_size=4)
    world.add(1, prompt_of(7, 12), max_tokens=1)
    world.run()
    world.add(2, prompt_of(7, 20), max_tokens=1, chunk_checkpoints=(6, 12, 15))
    assert [world.prefill() for _ in range(2)] == [[(2, 3)], [(2, 5)]]


# ---- spans


@pytest.mark.parametrize(
    ("done", "used", "rest", "spans", "lookahead", "wanted"),
    [
        (0, 0, 20, ((10, 14),), 0, 16),  # no boundary in it
        (0, 0, 20, ((10, 16),), 0, 16),  # ends at the boundary
        (0, 0, 20, ((16, 20),), 0, 16),  # starts at the boundary
        (0, 0, 20, ((10, 18),), 0, 10),  # shrink to before it
        (0, 0, 20, ((15, 17),), 0, 15),
        (0, 0, 20, ((2, 5), (12, 18)), 0, 12),
        (0, 0, 12, ((4, 12),), 0, 12),  # all of the rest fits
        (12, 0, 20, ((12, 28),), 0, 16),
        (4, 4, 20, ((4, 18),), 0, 0),  # not alone: it waits for a step of its own
        (4, 0, 20, ((4, 18),), 0, 16),  # alone
        (0, 4, 20, ((3, 14),), 0, 3),  # not alone, but what is before it is a chunk
        (0, 4, 20, ((3, 14),), 4, 0),  # if it is not smaller than the smallest
    ],
)
def test_no_boundary_cuts_a_span(
    done: int, used: int, rest: int, spans: tuple[tuple[int, int], ...], lookahead: int, wanted: int
) -> None:
    assert chunk(rest, done=done, used=used, spans=spans, lookahead=lookahead) == wanted


def test_alone_a_chunk_grows_over_the_whole_span() -> None:
    """What is before the span is less than the smallest chunk, and a checkpoint lies in it."""
    assert chunk(20, spans=((2, 12),), lookahead=4, checkpoints=(8,)) == 12
    assert chunk(20, spans=((0, 12),), checkpoints=(8,)) == 12
    assert chunk(20, spans=((1, 12),), checkpoints=(8,)) == 1
    assert chunk(20, spans=((0, 12),), checkpoints=(8,), used=2) == 0  # not alone, though it would fit


def test_a_prompt_of_spans_is_computed_span_by_span() -> None:
    spans = ((0, 10), (10, 20), (23, 39))
    assert chunks(40, spans=spans, max_num_batched_tokens=16, block_size=4) == [10, 13, 16, 1]


def test_a_span_waits_behind_others_for_a_step_of_its_own() -> None:
    world = World(max_num_batched_tokens=16)
    world.add(1, 6)
    world.add(2, 20, spans=((0, 16),))
    assert [world.prefill() for _ in range(3)] == [[(1, 6)], [(2, 16)], [(2, 4)]]


def test_a_prefix_hit_that_ends_in_a_span_is_continued_to_its_end() -> None:
    world = World(block_size=4, max_num_batched_tokens=16)
    world.add(1, prompt_of(7, 12), max_tokens=1)
    world.run()
    world.add(2, prompt_of(7, 40), max_tokens=1, spans=((10, 26),))
    assert [world.prefill() for _ in range(3)] == [[(2, 16)], [(2, 12)], []]
    world = World(block_size=4, max_num_batched_tokens=16)
    world.add(1, prompt_of(7, 12), max_tokens=1)
    world.run()
    world.add(2, prompt_of(7, 40), max_tokens=1, spans=((10, 24), (26, 30)))
    assert [world.prefill() for _ in range(3)] == [[(2, 14)], [(2, 14)], []]


def test_a_span_that_needs_a_larger_chunk_than_the_budget_does_not_stop_the_queue() -> None:
    """2 tokens, fewer than the smallest chunk, and then a span of a whole budget."""
    assert sum(chunks(20, spans=((2, 10),), max_num_batched_tokens=8, lookahead_tokens=3)) == 20


# ---- smallest chunk


@pytest.mark.parametrize(
    ("used", "rest", "lookahead", "wanted"),
    [
        (0, 20, 0, 16),
        (15, 20, 0, 1),
        (12, 20, 4, 4),
        (13, 20, 4, 0),
        (13, 3, 4, 3),  # a rest may be smaller
        (14, 3, 4, 0),
        (0, 20, 16, 16),
    ],
)
def test_no_chunk_is_smaller_than_the_lookahead(used: int, rest: int, lookahead: int, wanted: int) -> None:
    assert chunk(rest, used=used, lookahead=lookahead) == wanted


def test_a_rest_after_the_smallest_chunk_is_taken() -> None:
    assert chunks(17, max_num_batched_tokens=8, lookahead_tokens=8) == [8, 8, 1]


def test_too_small_a_chunk_ends_the_batch() -> None:
    world = World(max_num_batched_tokens=16, lookahead_tokens=4)
    for request_id, length in ((1, 14), (2, 8), (3, 2)):
        world.add(request_id, length)
    assert world.prefill() == [(1, 14)]
    assert world.prefill() == [(2, 8), (3, 2)]


def test_without_chunks_a_prompt_above_the_floored_budget_is_refused() -> None:
    world = World(cp_size=2, max_num_batched_tokens=7, chunked_prefill=False)
    with pytest.raises(Refused, match=r"token budget of a step \(4\)"):
        world.add(1, 5)
    world.add(2, 4)
    world.run()


# ---- all in one


@pytest.mark.parametrize("lookahead", [0, 1, 5])
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_any_prompt_is_computed_once_and_to_the_end(block_size: int, cp_size: int, lookahead: int) -> None:
    limits = {"block_size": block_size, "cp_size": cp_size, "lookahead_tokens": lookahead, "max_num_batched_tokens": 19}
    for prompt in (1, 15, 16, 17, 18, 19, 20, 35, 36, 37, 64):
        marks = {"chunk_checkpoints": (prompt // 3 + 1,), "spans": ((prompt // 2, min(prompt // 2 + 9, prompt)),)}
        taken = chunks(prompt, **limits, **(marks if prompt > 1 else {}))
        assert sum(taken) == prompt and all(0 < length <= 19 for length in taken)
