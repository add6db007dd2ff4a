"""When a fork starts, and what becomes of it when its parent goes."""

import pytest

from tests.forks import PROMPT, check, parent, prefilled_tokens
from tests.scheduler_world import World, expected, prompt_of
from vote.decision import StepType

POLICIES = pytest.mark.parametrize("policy", ["phased", "unified"])

# ---- admission


@POLICIES
def test_a_fork_is_admitted_with_one_block(policy: str) -> None:
    """Of two, the second one waits until a running one has ended."""
    world = parent(policy, max_tokens=3, num_blocks=5)
    for request_id in (2, 3):
        world.add(request_id, PROMPT, 3, parent=1)
    assert world.scheduler.pool.num_free == 1
    world.step(StepType.DECODE)
    assert sorted(world.running()) == [1, 2] and [seq.request_id for seq in world.scheduler.prompted] == [3]
    check(world, {1: PROMPT, 2: PROMPT, 3: PROMPT}, max_tokens=3)
    assert prefilled_tokens(world) == 10


@POLICIES
def test_a_fork_waits_for_a_place_among_the_running(policy: str) -> None:
    world = parent(policy, max_num_seqs=2)
    for request_id in (2, 3):
        world.add(request_id, PROMPT, 12, parent=1)
    world.step()
    assert sorted(world.running()) == [1, 2] and len(world.scheduler.prompted) == 1
    check(world, {1: PROMPT, 2: PROMPT, 3: PROMPT})


@POLICIES
@pytest.mark.parametrize("num_blocks", [7, 8, 9, 12])
def test_forks_in_a_small_pool(num_blocks: int, policy: str) -> None:
    """Six of them, each of 6 blocks in the end; who waits with shared blocks gives them back if it has to."""
    world = parent(policy, num_blocks=num_blocks, preemption="recompute", kv_watermark=1.0, max_preemptions=None)
    for request_id in range(2, 7):
        world.add(request_id, PROMPT, 12, parent=request_id - 1)
    check(world, dict.fromkeys(range(1, 7), PROMPT))


@POLICIES
def test_full_admission_reserves_a_forks_whole_length(policy: str) -> None:
    world = parent(policy, admission="full", num_blocks=13)
    for request_id in (2, 3, 4):
        world.add(request_id, PROMPT, 12, parent=1)
    check(world, dict.fromkeys(range(1, 5), PROMPT))
    assert world.scheduler.counters.preemptions == 0


@pytest.mark.parametrize(
    ("policy", "overlap"),
    [
        ("phased", False),
        ("phased", True),
        ("unified", False),
        ("unified", True),
    ],
)
def test_a_fork_that_is_in_its_own_way_starts_anew(policy: str, overlap: bool) -> None:
    """Its parent has gone, so the half-written block that it shares is nobody else's, but not free."""
    prompt = prompt_of(1, 16)
    config = {"admission": "full", "num_blocks": 9, "overlap": overlap, "kv_watermark": 1.0}
    world = parent(policy, prompt, max_tokens=1, prefilled=False, **config)
    world.add(2, prompt, 16, parent=1)  # shares 4 of 8 blocks, and needs 5 beside the 3 full ones
    world.add(3, 3, 4)
    world.run(100)
    assert world.outputs[2] == expected(prompt, 16)


@POLICIES
def test_who_waits_with_shared_blocks_gives_them_back_to_the_head(policy: str) -> None:
    """Nothing runs, and nothing else could ever become free."""
    world = parent(policy, num_blocks=9, kv_watermark=1.0)
    short, long = [*PROMPT, 5, 6], [*PROMPT, *range(20)]
    world.add(2, short, 2, parent=1)
    world.add(3, long, 2, parent=1)
    world.scheduler.abort(1)
    assert world.waiting() == [3, 2] and world.blocks(2) == world.blocks(3)
    check(world, {2: short, 3: long}, max_tokens=2)


# ---- the parent goes


@POLICIES
def test_forks_outlive_their_parent(policy: str) -> None:
    world = parent(policy)
    for request_id in (2, 3):
        world.add(request_id, PROMPT, 12, parent=1)
    world.scheduler.abort(1)
    check(world, {2: PROMPT, 3: PROMPT})
    assert prefilled_tokens(world) == 10


@POLICIES
@pytest.mark.parametrize("overlap", [False, True])
def test_a_parent_that_ends_with_its_first_token_is_forked_all_the_same(overlap: bool, policy: str) -> None:
    """As n > 1 with max_tokens 1. While the step that computes its prompt is in flight there is work to come."""
    world = World(policy=policy, block_size=4, prefix_cache=False, overlap=overlap)
    world.add(1, PROMPT, max_tokens=1)
    for request_id in (2, 3):
        world.add(request_id, PROMPT, max_tokens=1, parent=1)
    world.step()
    assert world.scheduler.facts().unfinished
    check(world, {1: PROMPT, 2: PROMPT, 3: PROMPT}, max_tokens=1)
    assert prefilled_tokens(world) == 10 and world.scheduler.counters.forks == 2


@POLICIES
@pytest.mark.parametrize("started", [False, True])
def test_the_first_orphan_takes_the_parents_place(started: bool, policy: str) -> None:
    """It runs on its own, and the others fork from it."""
    world = parent(policy, prefilled=started, max_num_batched_tokens=8)
    for request_id in (2, 3, 4):
        world.add(request_id, PROMPT, 12, parent=1)
    world.scheduler.abort(2)
    world.scheduler.abort(1)
    assert world.waiting() == [3]
    check(world, {3: PROMPT, 4: PROMPT})
    assert world.scheduler.counters.forks == 1


@POLICIES
def test_orphans_of_an_orphan(policy: str) -> None:
    world = parent(policy, prefilled=False)
    world.add(2, PROMPT, 12, parent=1)
    world.add(3, PROMPT, 12, parent=2)
    world.add(4, PROMPT, 12, parent=2)
    for request_id in (1, 2, 3):
        world.scheduler.abort(request_id)
    assert world.waiting() == [4]
    check(world, {4: PROMPT})


@POLICIES
def test_a_preempted_parent_computes_its_prompt_again_for_its_forks(policy: str) -> None:
    config = {"num_blocks": 12, "preemption": "recompute", "kv_watermark": 1.0, "prefix_cache": False, "block_size": 4}
    world = World(policy=policy, **config)  # type: ignore[arg-type]
    for request_id in (1, 2):
        world.add(request_id, prompt_of(request_id, 10), max_tokens=16)
    while not world.scheduler.counters.preemptions:
        world.step()
    (gone,) = world.waiting()
    world.add(3, prompt_of(gone, 10), 16, parent=gone)
    assert world.waiting() == [gone] and not world.scheduler.prompted
    check(world, {1: prompt_of(1, 10), 2: prompt_of(2, 10), 3: prompt_of(gone, 10)}, max_tokens=16)


@POLICIES
@pytest.mark.parametrize("overlap", [False, True])
def test_a_parent_that_ends_while_its_prompt_is_in_flight(overlap: bool, policy: str) -> None:
    world = parent(policy, overlap=overlap)
    world.add(2, PROMPT, 12, parent=1)
    assert len(world.scheduler.prompted) == (0 if overlap else 1)
    world.scheduler.abort(1)
    check(world, {2: PROMPT})


@POLICIES
def test_abort_of_attached_forks(policy: str) -> None:
    world = parent(policy, prefilled=False)
    for request_id in (2, 3):
        world.add(request_id, PROMPT, 12, parent=1)
    world.scheduler.abort(2)
    world.step()
    world.scheduler.abort(3)
    check(world, {1: PROMPT})
    assert world.scheduler.counters.aborted == 2


# ---- roles


def test_forks_end_on_a_prefill_engine_too() -> None:
    world = World(role="prefill", block_size=4, prefix_cache=False)
    world.add(1, PROMPT, 12)
    world.add(2, PROMPT, 12, parent=1)
    for _ in range(5):
        world.step()
    assert world.finished == {1: "prefilled", 2: "prefilled"}
