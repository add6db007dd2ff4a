"""The phased scheduler: a table per rule."""

import pytest

from dp_engine.messages import Add, Sampling
from dp_engine.scheduler import Refused
from tests.scheduler_world import EOS, World, expected
from vote.decision import StepType


def lengths(world: World, step_type: StepType | None = None) -> list[int]:
    """Query lengths of one step."""
    batch = world.step(step_type)
    return [] if batch is None else batch.seqlens_q.tolist()


# ---- prefill limits


def test_token_budget_splits_a_prompt_over_steps() -> None:
    world = World(max_num_batched_tokens=16, block_size=4)
    world.add(1, 40, max_tokens=2)
    assert [lengths(world) for _ in range(4)] == [[16], [16], [8], [1]]
    assert world.finished == {1: "length"}
    assert world.outputs[1] == expected([107 + i for i in range(40)], 2)


def test_a_chunk_ends_the_batch_and_returns_to_the_head() -> None:
    world = World(max_num_batched_tokens=16, block_size=4)
    for request_id, length in ((1, 10), (2, 20), (3, 4)):
        world.add(request_id, length)
    assert lengths(world, StepType.PREFILL) == [10, 6]
    assert lengths(world, StepType.PREFILL) == [14, 2]  # 2 is finished first; 3 gets what is left
    assert lengths(world, StepType.PREFILL) == [2]


@pytest.mark.parametrize(("prompt", "chunks"), [(15, [15]), (16, [16]), (17, [16, 1]), (32, [16, 16])])
def test_prompt_at_the_budget(prompt: int, chunks: list[int]) -> None:
    world = World(max_num_batched_tokens=16, block_size=4)
    world.add(1, prompt, max_tokens=1)
    world.run()
    assert [lengths for _, lengths in world.steps] == [[chunk] for chunk in chunks]
    assert world.outputs[1] == expected([107 + i for i in range(prompt)], 1)


def test_sequence_limit_counts_running_and_admitted() -> None:
    world = World(max_num_seqs=3)
    for request_id in range(5):
        world.add(request_id, 4)
    assert len(lengths(world, StepType.PREFILL)) == 3
    assert not world.scheduler.facts().wants_prefill
    assert len(lengths(world, StepType.PREFILL)) == 3  # nothing admissible: becomes a decode step


def test_head_of_line_blocks_later_requests() -> None:
    world = World(num_blocks=11, block_size=4, kv_watermark=1.0)
    world.add(1, 24, max_tokens=4)
    world.step()
    world.add(2, 30, max_tokens=2)  # 8 blocks, 4 are free
    world.add(3, 4, max_tokens=4)  # would fit
    assert not world.scheduler.facts().wants_prefill
    world.run()
    assert set(world.finished.values()) == {"length"}


def test_watermark_stops_new_prompts_but_not_a_rank_without_decode_work() -> None:
    """REQUIREMENTS of a published rule gone wrong: half-prefilled above 90 % with nothing running, for ever."""
    world = World(num_blocks=21, block_size=16, max_num_batched_tokens=64)
    world.add(1, 310, max_tokens=4)  # 20 of 20 blocks
    world.run()
    assert world.finished == {1: "length"}

    world = World(num_blocks=11, block_size=4)
    world.add(1, 37, max_tokens=3)  # 10 of 10 blocks
    world.step()
    world.add(2, 4)
    assert not world.scheduler.facts().wants_prefill
    world.run()


# ---- what is refused


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "config", "words"),
    [
        ([], 4, {}, "empty"),
        (512, 4, {}, "leaves no room"),
        (600, 4, {}, "leaves no room"),
        (4, 0, {}, "leaves no room"),
        (40, 4, {"max_num_batched_tokens": 32, "chunked_prefill": False}, "chunked prefill is off"),
        (30, 500, {"block_size": 1}, "512 tokens need 512 KV blocks, a rank has 256"),
    ],
)
def test_refused_at_once(prompt: int | list[int], max_tokens: int, config: dict[str, object], words: str) -> None:
    world = World(**config)  # type: ignore[arg-type]
    with pytest.raises(Refused, match=words):
        world.add(1, prompt, max_tokens)
    assert world.scheduler.num_unfinished == 0


def test_duplicate_id_is_refused_and_the_first_lives() -> None:
    world = World()
    world.add(1, 4)
    with pytest.raises(Refused, match="in use"):
        world.add(1, 5)
    world.run()
    assert world.outputs[1] == expected([107, 108, 109, 110], 4)


def test_max_tokens_that_end_exactly_at_the_model_length() -> None:
    world = World(max_model_len=20, block_size=4)
    world.add(1, 12, max_tokens=8)
    world.add(2, 19, max_tokens=8)  # capped to 1
    world.run()
    assert (len(world.outputs[1]), len(world.outputs[2])) == (8, 1)
    assert world.finished == {1: "length", 2: "length"}


# ---- the end of a sequence


def stop_world(**sampling: object) -> World:
    world = World()
    world.add(1, 4, max_tokens=6, **sampling)
    world.answer = lambda context: EOS if len(context) == 6 else 50  # type: ignore[method-assign]
    world.run()
    return world


def test_eos_stops() -> None:
    world = stop_world()
    assert world.outputs[1] == [50, 50, EOS] and world.finished == {1: "stop"}


def test_ignore_eos() -> None:
    world = stop_world(ignore_eos=True)
    assert len(world.outputs[1]) == 6 and world.finished == {1: "length"}


def test_stop_token_ids() -> None:
    world = stop_world(stop_token_ids=(50,))
    assert world.outputs[1] == [50] and world.finished == {1: "stop"}


def test_emitted_tokens_count_as_output() -> None:
    """A request of an earlier gang goes on where it was."""
    world = World()
    prompt = [101, 102, 103]
    world.scheduler.add(Add(1, 9, prompt + expected(prompt, 2), Sampling(5), num_emitted=2))
    batch = world.step()
    assert batch.sampling.position.tolist() == [5]
    world.run()
    assert world.outputs[9] == expected(prompt, 5)[2:]


# ---- abort


def test_abort_everywhere_gives_everything_back() -> None:
    world = World(max_num_batched_tokens=16, block_size=4)
    for request_id in range(4):
        world.add(request_id, 12, max_tokens=50)
    world.step(StepType.PREFILL)  # 0 runs, 1 is half prefilled, 2 and 3 wait
    for request_id in (1, 0, 3, 2, 2, 77):
        world.scheduler.abort(request_id)
    assert world.scheduler.num_unfinished == 0
    assert world.scheduler.pool.num_used == 0
    facts = world.scheduler.facts()
    assert not (facts.wants_prefill or facts.has_decode or facts.unfinished)


def test_dead_head_does_not_veto() -> None:
    world = World()
    world.add(1, 4)
    world.add(2, 4)
    world.scheduler.abort(1)
    assert world.scheduler.facts().wants_prefill
    world.run()
    assert list(world.finished) == [2]


# ---- preemption


def test_terminate_sacrifices_the_oldest() -> None:
    world = World(num_blocks=9, block_size=4, kv_watermark=1.0)
    world.add(1, 12, max_tokens=20)
    world.step()
    world.step()
    world.add(2, 12, max_tokens=20)
    world.run()
    assert world.finished == {1: "insufficient_system_resource", 2: "length"}
    assert world.scheduler.counters.preemptions == 1


def test_recompute_changes_no_token() -> None:
    """Two requests of 20 + 20 tokens in 12 blocks of 4 both finish with at most 3 preemptions each."""
    world = World(num_blocks=13, block_size=4, preemption="recompute", kv_watermark=1.0)
    world.add(1, 20, max_tokens=20)
    world.add(2, 20, max_tokens=20)
    seqs = dict(world.scheduler._by_id)
    world.run()
    assert world.finished == {1: "length", 2: "length"}
    assert world.scheduler.counters.preemptions >= 1
    assert all(seq.preemptions <= 3 for seq in seqs.values())
    for request_id in (1, 2):
        assert world.outputs[request_id] == expected([100 + 7 * request_id + i for i in range(20)], 20)


def test_no_sequence_ends_while_none_needs_a_block() -> None:
    """Two sequences of 51 tokens in 4 blocks of 16 each: the pool is full, nobody lacks anything."""
    world = World(num_blocks=9, block_size=16, kv_watermark=1.0)
    world.add(1, 51, max_tokens=8)
    world.add(2, 51, max_tokens=8)
    world.run()
    assert world.finished == {1: "length", 2: "length"}


def test_preemptions_are_bounded() -> None:
    world = World(num_blocks=9, block_size=4, preemption="recompute", max_preemptions=0, kv_watermark=1.0)
    world.add(1, 12, max_tokens=20)
    world.add(2, 12, max_tokens=20)
    world.run()
    assert sorted(world.finished.values()) == ["insufficient_system_resource", "length"]
