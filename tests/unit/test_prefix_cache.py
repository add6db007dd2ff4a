"""The prefix cache: what is shared, when, between whom, and for how long."""

from typing import Any

import numpy as np
import pytest

from dp_engine.prefix import KEY_BYTES, extend_keys, root_key
from tests.scheduler_world import World, expected, prompt_of
from vote.decision import StepType

POLICIES = pytest.mark.parametrize("policy", ["phased", "unified"])


def world_with(prompt: list[int], max_tokens: int = 1, **config: Any) -> World:
    """Blocks of 4, a pool of 32; request 1 with this prompt has run and ended."""
    world = World(**({"num_blocks": 33, "block_size": 4} | config))
    world.add(1, prompt, max_tokens)
    world.run()
    return world


def hits(world: World, request_id: int, prompt: list[int], max_tokens: int = 1, **marks: Any) -> int:
    """Tokens of a prompt that are not computed; checks that its first step skips them and that its output is right."""
    before = world.scheduler.resources.hit_tokens
    world.add(request_id, prompt, max_tokens, **marks)
    batch = world.step()
    assert batch is not None
    first = dict(world.ran[-1])[request_id]
    world.run()
    assert world.outputs[request_id] == expected(prompt, max_tokens)
    found = world.scheduler.resources.hit_tokens - before
    assert first == min(len(prompt) - found, world.config.max_num_batched_tokens)
    assert batch.num_cached_tokens == found
    return found


SHARED = prompt_of(7, 40)

# ---- names


def keys_of(tokens: list[int], num_blocks: int, salt: str = "", generation: int = 0) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(generation, salt), np.array(tokens, np.int32), num_blocks, 4)
    return keys


def test_a_name_stands_for_everything_before_it() -> None:
    one, other = keys_of(SHARED[:12], 3), keys_of([5, *SHARED[1:12]], 3)
    assert len(set(one + other)) == 6 and all(len(key) == KEY_BYTES for key in one)
    assert keys_of([*SHARED[:8], 1, 2, 3, 4], 3)[:2] == one[:2]


def test_names_are_extended_not_computed_again() -> None:
    keys = keys_of(SHARED, 2)
    extend_keys(keys, b"not used any more", np.array(SHARED, np.int32), 5, 4)
    assert keys == keys_of(SHARED, 5)


def test_salt_and_generation_change_every_name() -> None:
    names = [keys_of(SHARED, 2, salt, generation) for salt in ("", "a", "b") for generation in (0, 1)]
    assert len({key for keys in names for key in keys}) == 12


# ---- what is shared


@POLICIES
@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ([*SHARED[:16], 1, 2, 3], 16),
        ([*SHARED[:14], 1, 2, 3], 12),  # whole blocks only
        ([*SHARED[:3], 1, 2, 3], 0),
        ([1, *SHARED[1:16]], 0),  # nothing behind a difference
        (SHARED[:19], 16),
        (SHARED[:20], 16),  # fully cached: the last token is computed all the same
        (SHARED[:21], 20),
        (SHARED[:4], 0),
        (SHARED[:5], 4),
        (SHARED, 20),
    ],
)
def test_a_prefix_of_whole_blocks_is_shared(prompt: list[int], wanted: int, policy: str) -> None:
    world = world_with(SHARED[:22], policy=policy)
    assert hits(world, 2, prompt) == wanted


@POLICIES
def test_output_is_shared_too(policy: str) -> None:
    world = world_with(SHARED[:6], max_tokens=11, policy=policy)
    said = expected(SHARED[:6], 11)
    assert hits(world, 2, SHARED[:6] + said) == 16  # 17 tokens, the last of which was never computed


@POLICIES
def test_blocks_are_the_same_while_both_run(policy: str) -> None:
    world = World(policy=policy, block_size=4)
    world.add(1, SHARED[:14], max_tokens=9)
    world.step()
    world.add(2, [*SHARED[:12], 1, 2, 3], max_tokens=9)
    world.step(StepType.PREFILL)
    assert world.blocks(1)[:3] == world.blocks(2)[:3] and not set(world.blocks(1)[3:]) & set(world.blocks(2)[3:])
    assert world.scheduler.pool.references[world.blocks(1)[:3]].tolist() == [2, 2, 2]
    world.run()


@POLICIES
def test_off_means_off(policy: str) -> None:
    world = world_with(SHARED[:22], prefix_cache=False, policy=policy)
    assert hits(world, 2, SHARED[:22]) == 0
    assert world.scheduler.pool.num_cached == 0 and world.scheduler.resources.queried_tokens == 0


@POLICIES
def test_salt_separates(policy: str) -> None:
    world = world_with(SHARED[:22], policy=policy)
    assert hits(world, 2, SHARED[:22], cache_salt="a") == 0
    assert hits(world, 3, SHARED[:22], cache_salt="b") == 0
    assert hits(world, 4, SHARED[:22], cache_salt="a") == 20
    assert hits(world, 5, SHARED[:22]) == 20


@POLICIES
def test_figures_count_the_prompts_that_started(policy: str) -> None:
    world = world_with(SHARED[:22], policy=policy)
    resources = world.scheduler.resources
    assert (resources.queried_tokens, resources.hit_tokens) == (22, 0)
    hits(world, 2, SHARED[:22])
    hits(world, 3, prompt_of(3, 9))
    assert (resources.queried_tokens, resources.hit_tokens) == (22 + 22 + 9, 20)


# ---- when


@pytest.mark.parametrize(("share", "second"), [("computed", 14), ("scheduled", 2)])
def test_shared_once_computed_or_as_soon_as_scheduled(share: str, second: int) -> None:
    """vLLM shares what is computed in the same step; by default nobody relies on a step that has not run."""
    world = World(policy="unified", block_size=4, prefix_share=share)
    world.add(1, SHARED[:14])
    world.add(2, SHARED[:14])
    assert world.scheduled() == [(1, 14), (2, second)]
    world.run()
    assert world.outputs[1] == world.outputs[2] == expected(SHARED[:14], 4)


@POLICIES
def test_nothing_of_a_step_in_flight_is_found(policy: str) -> None:
    world = World(policy=policy, block_size=4, overlap=True)
    world.add(1, SHARED[:14], max_tokens=8)
    world.step()  # in flight
    world.add(2, SHARED[:14], max_tokens=8)
    assert dict(world.scheduled(StepType.PREFILL))[2] == 14
    world.add(3, SHARED[:14], max_tokens=8)
    assert dict(world.scheduled(StepType.PREFILL))[3] == 2
    world.run()


@POLICIES
def test_a_chunk_is_shared_before_its_prompt_is_complete(policy: str) -> None:
    world = World(policy=policy, block_size=4, max_num_batched_tokens=16)
    world.add(1, SHARED[:20], max_tokens=1)
    world.step()
    world.add(2, [*SHARED[:12], 1, 2], max_tokens=1)
    assert world.scheduled(StepType.PREFILL) == [(1, 4), (2, 2)]
    world.run()


@POLICIES
def test_the_same_prompt_twice_in_a_step_is_computed_twice_and_kept_once_each(policy: str) -> None:
    world = World(policy=policy, block_size=4, num_blocks=33)
    for request_id in (1, 2):
        world.add(request_id, SHARED[:14], max_tokens=1)
    world.run()
    assert world.scheduler.pool.num_cached == 6  # copies of three blocks
    assert hits(world, 3, SHARED[:14]) == 12


# ---- for how long


@POLICIES
def test_cached_blocks_count_as_free(policy: str) -> None:
    world = world_with(SHARED[:22], policy=policy)
    pool = world.scheduler.pool
    assert (pool.num_used, pool.num_free, pool.num_cached) == (0, 32, 5)
    world.add(2, prompt_of(2, 128 - 2), max_tokens=2)  # all 32 blocks
    world.run()
    assert world.finished[2] == "length" and pool.num_cached == 31  # the last block is not full


@POLICIES
def test_the_longest_unused_prefix_is_evicted_first(policy: str) -> None:
    world = world_with(prompt_of(1, 32), policy=policy)  # 8 blocks
    for request_id in (2, 3):
        hits(world, request_id, prompt_of(request_id, 32))
    assert hits(world, 4, prompt_of(1, 32)) == 28  # 1 has been used again
    hits(world, 5, prompt_of(5, 46))  # 12 blocks, of which 32 - 3 * 8 - 1 are without a name
    assert hits(world, 6, prompt_of(3, 32)) == 28
    assert hits(world, 7, prompt_of(1, 32)) == 28
    assert hits(world, 8, prompt_of(2, 32)) < 28


@POLICIES
def test_of_a_prefix_the_end_is_evicted_first(policy: str) -> None:
    """What is left can still be found from the start."""
    world = world_with(prompt_of(1, 33), policy=policy, num_blocks=11)  # 8 named blocks of 10
    assert world.scheduler.pool.num_cached == 8
    hits(world, 2, prompt_of(2, 14))  # 4 blocks: two without a name, two of 1
    assert hits(world, 3, prompt_of(1, 33)) == 24


@POLICIES
def test_reset_forgets_everything(policy: str) -> None:
    world = world_with(SHARED[:22], policy=policy)
    world.scheduler.reset_prefix_cache()
    assert world.scheduler.pool.num_cached == 0 and world.scheduler.pool.num_free == 32
    assert hits(world, 2, SHARED[:22]) == 0
    assert hits(world, 3, SHARED[:22]) == 20


@POLICIES
def test_what_a_sequence_from_before_a_reset_computes_later_is_never_found(policy: str) -> None:
    """Its KV rests on blocks that were forgotten, perhaps because the weights have changed."""
    world = World(policy=policy, block_size=4)
    world.add(1, SHARED[:14], max_tokens=12)
    world.step()
    world.scheduler.reset_prefix_cache()
    world.run()
    text = SHARED[:14] + expected(SHARED[:14], 12)
    assert hits(world, 2, text[:15]) == 0  # computes the first three blocks anew
    assert hits(world, 3, text) == 12


@POLICIES
def test_a_chunk_from_before_a_reset_is_not_found_either(policy: str) -> None:
    world = World(policy=policy, block_size=4, max_num_batched_tokens=8)
    world.add(1, SHARED[:20], max_tokens=1)
    world.step()
    world.scheduler.reset_prefix_cache()
    world.run()
    assert hits(world, 2, SHARED[:9]) == 0
    assert hits(world, 3, SHARED[:20]) == 8


@POLICIES
def test_what_a_fork_of_a_sequence_from_before_a_reset_computes_is_never_found(policy: str) -> None:
    world = World(policy=policy, block_size=4)
    world.add(1, SHARED[:10], max_tokens=12)
    world.step()
    world.scheduler.reset_prefix_cache()
    world.add(2, SHARED[:20], max_tokens=1, parent=1)
    world.run()
    assert hits(world, 3, SHARED[:9]) == 0
    assert hits(world, 4, SHARED[:20]) == 8


@POLICIES
def test_a_request_that_waited_during_a_reset_finds_only_what_came_after(policy: str) -> None:
    world = World(policy=policy, block_size=4, num_blocks=13, kv_watermark=1.0)
    world.add(1, prompt_of(1, 30), max_tokens=3)
    world.step()
    world.add(2, SHARED[:20], max_tokens=1)  # five blocks, four are free: its prefix is looked up
    world.step()
    assert world.seq(2).keys
    world.scheduler.reset_prefix_cache()
    world.run()
    assert hits(world, 3, SHARED[:20]) == 16, "2 named its blocks by the new generation"


# ---- with preemption, fork, drafts


@POLICIES
def test_a_preempted_sequence_finds_its_own_blocks_again(policy: str) -> None:
    """But for those that somebody has taken meanwhile."""
    world = World(policy=policy, num_blocks=17, block_size=4, preemption="recompute", kv_watermark=1.0)
    for request_id in (1, 2):
        world.add(request_id, prompt_of(request_id, 24), max_tokens=30)
    while not world.scheduler.counters.preemptions:
        world.step()
    (stays,) = world.running()
    (gone,) = world.waiting()
    world.scheduler.abort(stays)
    length = world.scheduler.resources.length(world.seq(gone))
    assert length >= 32 and world.scheduled() == [(gone, length - 28)]  # of 8 full blocks the last one was taken
    world.run()
    assert world.outputs[gone] == expected(prompt_of(gone, 24), 30)


@POLICIES
def test_a_fork_names_its_own_blocks(policy: str) -> None:
    world = World(policy=policy, block_size=4)
    world.add(1, SHARED[:10], max_tokens=9)
    world.step()
    world.add(2, [*SHARED[:10], 1, 2, 3, 4, 5], max_tokens=1, parent=1)
    world.run()
    assert hits(world, 3, [*SHARED[:10], 1, 2, 3, 4, 5, 6]) == 12
    assert hits(world, 4, SHARED[:12]) == 8


@POLICIES
def test_a_rejected_draft_is_in_no_name(policy: str) -> None:
    world = World(policy=policy, block_size=4, num_draft_tokens=4)
    world.guess(1)
    world.add(1, SHARED[:6], max_tokens=12)
    world.run()
    text = SHARED[:6] + expected(SHARED[:6], 12)
    assert hits(world, 2, text) == 16


@POLICIES
@pytest.mark.parametrize("num_blocks", [12, 14, 20])
def test_shared_prefixes_change_no_token_when_blocks_are_short(num_blocks: int, policy: str) -> None:
    world = World(policy=policy, num_blocks=num_blocks, block_size=4, preemption="recompute", kv_watermark=1.0)
    prompts = {i: prompt_of(i % 2, 13) + prompt_of(i, i) for i in range(1, 8)}
    for request_id, prompt in prompts.items():
        world.add(request_id, prompt, max_tokens=14)
    world.run()
    for request_id, prompt in prompts.items():
        assert world.outputs[request_id] == expected(prompt, 14)
    assert world.scheduler.resources.hit_tokens > 0
