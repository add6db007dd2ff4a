"""Queues of waiting sequences, and what a long one costs: nothing."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dp_engine.messages import Add, Sampling
from dp_engine.sequence import Sequence
from dp_engine.waiting import FifoQueue, PriorityQueue
from tests.scheduler_world import World


def sequence(number: int, priority: int = 0) -> Sequence:
    tokens = np.arange(4, dtype=np.int32)
    return Sequence(100 + number, tokens, 4, 8, Sampling(4), number=number, priority=priority)


def numbers(queue: FifoQueue | PriorityQueue) -> list[int]:
    return [seq.number for seq in queue]


# ---- in order of arrival


def test_fifo_is_in_order_of_arrival() -> None:
    queue = FifoQueue()
    for number in (3, 1, 2):
        queue.push(sequence(number, priority=number))
    assert numbers(queue) == [3, 1, 2] and [seq.number for seq in reversed(queue)] == [2, 1, 3]
    assert queue.head.number == 3 and len(queue) == 3


def test_who_has_to_go_again_is_put_before_all_others() -> None:
    queue = FifoQueue()
    for number in (1, 2):
        queue.push(sequence(number))
    for number in (5, 4):
        queue.push_front(sequence(number))
    assert numbers(queue) == [4, 5, 1, 2]


# ---- by priority


def test_priority_before_arrival() -> None:
    queue = PriorityQueue()
    for number, priority in ((1, 5), (2, 0), (3, 5), (4, 0), (5, -1)):
        queue.push(sequence(number, priority))
    assert numbers(queue) == [5, 2, 4, 1, 3] and [seq.number for seq in reversed(queue)] == [3, 1, 4, 2, 5]
    order = []
    while queue:
        order.append(queue.head.number)
        queue.remove(queue.head)
    assert order == [5, 2, 4, 1, 3]


def test_who_has_to_go_again_keeps_its_place_in_the_order() -> None:
    queue = PriorityQueue()
    queue.push(sequence(2, 1))
    queue.push_front(sequence(1, 1))
    queue.push_front(sequence(3, 0))
    queue.push_front(sequence(4, 9))
    assert numbers(queue) == [3, 1, 2, 4] and queue.head.number == 3


def test_removed_and_pushed_again() -> None:
    """Its old entry in the heap has not come up yet."""
    queue = PriorityQueue()
    seqs = [sequence(number) for number in (1, 2)]
    for seq in seqs:
        queue.push(seq)
    for _ in range(3):
        queue.remove(seqs[0])
        assert queue.head is seqs[1]
        queue.push(seqs[0])
        queue.push(seqs[0])
        assert queue.head is seqs[0] and len(queue) == 2 and numbers(queue) == [1, 2]


def test_the_heap_is_cleaned_up_lazily() -> None:
    """Members that were removed from the middle stay in it, but never as many as to matter."""
    queue = PriorityQueue()
    seqs = [sequence(number, number % 7) for number in range(1, 1001)]
    for seq in seqs:
        queue.push(seq)
    for seq in seqs[10:]:
        queue.remove(seq)
        assert len(queue._heap) <= 2 * len(queue) + 64 or len(queue._heap) <= 1000
    assert len(queue._heap) <= 2 * 10 + 64 and len(queue) == 10
    assert numbers(queue) == [seq.number for seq in sorted(seqs[:10], key=lambda seq: (seq.priority, seq.number))]


# ---- both


QUEUES = pytest.mark.parametrize("kind", [FifoQueue, PriorityQueue])


@QUEUES
def test_any_member_can_be_removed(kind: type[Any]) -> None:
    queue = kind()
    seqs = [sequence(number) for number in range(1, 6)]
    for seq in seqs:
        queue.push(seq)
    queue.remove(seqs[2])
    queue.remove(seqs[0])
    assert numbers(queue) == [2, 4, 5] and queue.head is seqs[1] and len(queue) == 3
    assert seqs[0] not in queue and seqs[1] in queue
    with pytest.raises(KeyError):
        queue.remove(seqs[0])


@QUEUES
def test_an_empty_queue_has_no_head(kind: type[Any]) -> None:
    queue = kind()
    assert not queue and list(queue) == []
    with pytest.raises((StopIteration, IndexError)):
        _ = queue.head


# ---- 20 000 waiting


class Unwalked(FifoQueue):
    """Whoever looks at more than the head of it fails."""

    def __iter__(self) -> Any:
        raise AssertionError("the queue is walked")

    __reversed__ = __iter__


class UnwalkedByPriority(PriorityQueue):
    __iter__ = __reversed__ = Unwalked.__iter__


def crowded(count: int, **config: Any) -> World:
    """Four run in a rank that can run no more, and `count` wait."""
    world = World(num_blocks=65, block_size=4, max_num_seqs=4, kv_watermark=1.0, **config)
    waiting = world.scheduler.waiting
    waiting.__class__ = Unwalked if isinstance(waiting, FifoQueue) else UnwalkedByPriority  # type: ignore[assignment]
    for request_id in range(1, count + 5):
        world.add(request_id, PROMPT, max_tokens=40)
    while world.scheduler.num_running < 4:
        world.step()
    assert len(waiting) == count
    return world


def operations(action: Callable[[], object]) -> int:
    """Lines run and functions called, so that every turn of a loop counts; garbage collection is not counted."""
    count = 0

    def traced(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event in ("line", "call", "c_call")
        return traced

    gc.disable()
    sys.settrace(traced)
    sys.setprofile(traced)
    try:
        action()
    finally:
        sys.setprofile(None)
        sys.settrace(None)
        gc.enable()
    return count


PROMPT = list(range(50, 58))
CONFIGS: list[dict[str, Any]] = [
    {},
    {"want": "head", "overlap": True},
    {"num_draft_tokens": 2},
    {"preset": "deepinfer"},
    {"policy": "unified", "long_prefill_token_threshold": 4},
    {"policy": "unified", "order": "priority", "overlap": True},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_with_20000_waiting_a_step_and_an_abort_cost_what_they_cost_with_20(config: dict[str, Any]) -> None:
    costs = []
    for count in (20, 20_000):
        world = crowded(count, **config)
        steps = [operations(world.step) for _ in range(6)]
        last = count + 4
        aborts = [operations(lambda: world.scheduler.abort(i)) for i in (last, last - 7, 5, last - 3)]  # noqa: B023
        if config.get("preset") != "deepinfer":  # which sweeps the whole queue for what has ended
            steps += [operations(world.step) for _ in range(3)]
            assert world.scheduler.num_unfinished == count
        costs.append((steps, aborts))
    assert costs[0] == costs[1]


def test_operations_are_counted_in_every_loop() -> None:
    assert operations(lambda: [number + 1 for number in range(500)]) > 500


def test_a_waiting_request_takes_about_a_kilobyte_and_four_bytes_per_token() -> None:
    sizes = []
    for length in (8, 500):
        world = World()
        tracemalloc.start()
        for request_id in range(500):
            world.scheduler.add(Add(1, request_id, [7] * length, Sampling(4)))
        sizes.append(tracemalloc.get_traced_memory()[0] / 500)
        tracemalloc.stop()
    assert sizes[0] < 1100 and sizes[1] - sizes[0] < 1.1 * 4 * (500 - 8)
