"""Who may enter: what is refused on arrival or when its turn comes, blocks and slot together, whole reservations."""

from typing import Any

import pytest

from dp_engine.admission import Refused
from dp_engine.blocks import Admission
from dp_engine.messages import Add, Sampling
from tests.scheduler_world import World, expected, prompt_of

# ---- refused at once


@pytest.mark.parametrize("policy", ["phased", "unified"])
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "config", "words"),
    [
        ([], 4, {}, "the prompt is empty"),
        (512, 4, {}, "leaves no room"),
        (600, 4, {}, "leaves no room"),
        (4, 0, {}, "leaves no room"),
        (4, -3, {}, "leaves no room"),
        (40, 4, {"max_num_batched_tokens": 32, "chunked_prefill": False}, "chunked prefill is off"),
        (30, 500, {"block_size": 1}, "512 tokens need 512 KV blocks, a rank has 256"),
        (30, 227, {"block_size": 1}, "257 tokens need 257 KV blocks, a rank has 256"),
    ],
)
def test_refused_at_once(
    prompt: int | list[int], max_tokens: int, config: dict[str, Any], words: str, policy: str
) -> None:
    world = World(policy=policy, **config)
    with pytest.raises(Refused, match=words):
        world.add(1, prompt, max_tokens)
    assert world.scheduler.num_unfinished == 0
    assert world.step() is None


@pytest.mark.parametrize("policy", ["phased", "unified"])
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "config"),
    [
        (511, 4, {}),
        (32, 4, {"max_num_batched_tokens": 32, "chunked_prefill": False}),
        (30, 226, {"block_size": 1}),  # every block of the rank
        (255, 1, {"block_size": 1}),
    ],
)
def test_accepted_at_the_limit(prompt: int, max_tokens: int, config: dict[str, Any], policy: str) -> None:
    world = World(policy=policy, **config)
    world.add(1, prompt, max_tokens)
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, prompt), min(max_tokens, 512 - prompt))
    assert world.finished == {1: "length"}


def test_more_than_sum_k_is_refused_at_once() -> None:
    """A preempted sequence has to be prefilled at its full length."""
    world = World(prefill_max_sum_seqlen_k=20)
    with pytest.raises(Refused, match=r"21 tokens exceed prefill_max_sum_seqlen_k \(20\)"):
        world.add(1, 12, max_tokens=9)
    world.add(2, 12, max_tokens=8)
    world.run()


@pytest.mark.parametrize("policy", ["phased", "unified"])
def test_max_tokens_that_end_exactly_at_the_model_length(policy: str) -> None:
    world = World(max_model_len=20, block_size=4, policy=policy)
    world.add(1, 12, max_tokens=8)
    world.add(2, 19, max_tokens=8)  # capped to 1
    world.add(3, 12, max_tokens=9)  # capped to 8
    world.run()
    assert [len(world.outputs[request_id]) for request_id in (1, 2, 3)] == [8, 1, 8]
    assert set(world.finished.values()) == {"length"}


def test_duplicate_id_is_refused_and_the_first_lives() -> None:
    world = World()
    world.add(1, 4)
    with pytest.raises(Refused, match="request id 1 is in use"):
        world.add(1, 5)
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 4), 4)
    world.add(1, 5)  # it has ended: the id is free
    world.finished.clear()
    world.run()
    assert world.finished == {1: "length"}


@pytest.mark.parametrize(
    ("marks", "config", "words"),
    [
        ({"spans": ((4, 2),)}, {}, r"span \[4, 2\) is out of order or outside the prompt"),
        ({"spans": ((4, 4),)}, {}, "out of order"),
        ({"spans": ((6, 9), (2, 5))}, {}, "out of order"),
        ({"spans": ((2, 6), (5, 9))}, {}, "out of order"),
        ({"spans": ((8, 13),)}, {}, "outside the prompt"),
        ({"spans": ((-1, 3),)}, {}, "outside the prompt"),
        ({"spans": ((1, 12),)}, {"max_num_batched_tokens": 10}, r"exceeds the token budget of a step \(10\)"),
        ({"spans": ((1, 11),)}, {"max_num_batched_tokens": 10, "cp_size": 2}, r"token budget of a step \(8\)"),
        ({"spans": ((1, 2),)}, {"policy": "unified"}, "spans need the phased policy"),
        ({"chunk_checkpoints": (3,)}, {"policy": "unified"}, "need the phased policy"),
        ({"chunk_checkpoints": (3,)}, {"chunked_prefill": False}, "chunk_checkpoints need chunked prefill"),
    ],
)
def test_marks_that_no_chunk_can_keep_are_refused(marks: dict[str, Any], config: dict[str, Any], words: str) -> None:
    world = World(**config)
    with pytest.raises(Refused, match=words):
        world.add(1, 12, **marks)


# ---- refused when its turn comes


@pytest.mark.parametrize(
    ("length", "config"),
    [
        (41, {"max_num_batched_tokens": 40, "chunked_prefill": False}),
        (512 + 1, {}),
        (129, {"num_blocks": 33, "block_size": 4}),  # 33 of 32 blocks: NEVER
    ],
)
def test_ignored_with_its_reason_when_its_turn_comes(length: int, config: dict[str, Any]) -> None:
    """DeepInfer's rule, kept by its preset."""
    world = World(refusal="at_prefill", **config)
    world.add(1, 4, max_tokens=1)
    world.add(2, length)
    world.add(3, 4, max_tokens=1)
    assert world.finished == {} and world.scheduler.num_unfinished == 3
    assert world.prefill() == [(1, 4), (3, 4)]
    assert world.finished == {1: "length", 2: "prompt_length_exceeded", 3: "length"}
    world.check_drained()


def test_an_ignored_request_alone_makes_a_prefill_step() -> None:
    """It has to be reported: the second ballot says so."""
    world = World(refusal="at_prefill", num_blocks=3, block_size=4)
    world.add(1, 20)
    scheduler = world.scheduler
    assert scheduler.facts().wants_prefill and scheduler.try_prefill()
    world = World(refusal="at_prefill", num_blocks=3, block_size=4)
    world.add(1, 20)
    assert world.step() is not None
    assert world.finished == {1: "prompt_length_exceeded"} and world.outputs == {}


def test_at_prefill_an_empty_prompt_is_refused_all_the_same() -> None:
    with pytest.raises(Refused, match="empty"):
        World(refusal="at_prefill").add(1, [])


def test_an_unschedulable_request_is_not_ignored_before_it_is_ready() -> None:
    world = World(refusal="at_prefill", num_blocks=3, block_size=4)
    world.add(1, 4, max_tokens=1)
    world.add(2, 20, schedulable=False)
    assert world.prefill() == [(1, 4)]
    assert world.step() is None and world.finished == {1: "length"}
    world.scheduler.ready(2)
    world.run()
    assert world.finished[2] == "prompt_length_exceeded"


# ---- blocks and slot together


def admission(world: World, request_id: int) -> Admission:
    return world.scheduler.resources.can_start(world.seq(request_id))


@pytest.mark.parametrize(
    ("free_blocks", "free_slots", "length", "wanted"),
    [
        (4, 1, 16, Admission.OK),
        (3, 1, 16, Admission.LATER),
        (4, 0, 16, Admission.LATER),  # a missing slot makes OK into LATER
        (3, 0, 16, Admission.LATER),
        (4, 1, 36, Admission.NEVER),  # 9 of 8 blocks
        (4, 0, 36, Admission.NEVER),
    ],
)
def test_blocks_and_slot_are_admitted_together(
    free_blocks: int, free_slots: int, length: int, wanted: Admission
) -> None:
    world = World(num_blocks=9, block_size=4, num_state_slots=3, prefix_cache=False, refusal="at_prefill")
    pool, slots = world.scheduler.pool, world.scheduler.resources.slots
    assert slots is not None
    pool.allocate(8 - free_blocks)
    slots.allocate(2 - free_slots)
    world.add(1, length)
    assert admission(world, 1) is wanted
    assert (pool.num_free, slots.num_free) == (free_blocks, free_slots)


def test_a_missing_slot_keeps_the_head_waiting_without_a_block() -> None:
    world = World(num_state_slots=2, prefix_cache=False)
    world.add(1, 4, max_tokens=3)
    world.add(2, 4)
    assert world.prefill() == [(1, 4)]
    assert not world.scheduler.facts().wants_prefill
    assert world.waiting() == [2] and world.blocks(2) == []
    world.run()
    assert world.finished == {1: "length", 2: "length"}


def test_every_running_sequence_has_a_slot_of_its_own() -> None:
    world = World(num_state_slots=4, prefix_cache=False, max_num_batched_tokens=12)
    for request_id in range(1, 8):
        world.add(request_id, 5, max_tokens=3)
    while world.scheduler.num_unfinished:
        batch = world.step()
        assert batch is not None
        slots = batch.state_slots.tolist()
        assert len(set(slots)) == len(slots) <= 3 and 0 not in slots
    world.check_drained()


def test_all_tests_pass_before_anything_changes() -> None:
    """A head that some later limit stops has taken nothing."""
    for limit in ({"max_num_seqs": 1}, {"prefill_max_sum_seqlen_k": 30}, {"lookahead_tokens": 8}, {"num_blocks": 4}):
        world = World(max_num_batched_tokens=20, block_size=8, **limit)  # type: ignore[arg-type]
        world.add(1, 15, max_tokens=2)
        world.add(2, 16, max_tokens=2)
        assert world.prefill() == [(1, 15)], limit
        assert world.scheduler.pool.num_used == 2 and world.computed(2) == 0
        world.run()


# ---- whole lengths reserved


@pytest.mark.parametrize("policy", ["phased", "unified"])
def test_a_whole_length_is_reserved_at_the_start(policy: str) -> None:
    world = World(policy=policy, admission="full", block_size=4)
    world.add(1, 6, max_tokens=9)
    world.add(2, 6, max_tokens=600)
    world.step()
    assert [len(world.blocks(request_id)) for request_id in (1, 2)] == [4, 128]
    world.scheduler.abort(2)
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 6), 9)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("policy", ["phased", "unified"])
def test_full_admission_never_preempts(policy: str, drafts: int, overlap: bool) -> None:
    """The pool holds four of ten requests at their end."""
    config = {"num_draft_tokens": drafts, "draft_ngram_min": 1, "overlap": overlap, "max_num_batched_tokens": 16}
    world = World(num_blocks=33, block_size=4, policy=policy, admission="full", kv_watermark=1.0, **config)
    most = 0
    for request_id in range(1, 11):
        world.add(request_id, 12, max_tokens=20)
    while world.scheduler.num_unfinished:
        world.step()
        most = max(most, world.scheduler.num_running)
    world.run()
    assert world.scheduler.counters.preemptions == 0 and most == 4
    for request_id in range(1, 11):
        assert world.outputs[request_id] == expected(prompt_of(request_id, 12), 20)


def test_current_admission_preempts_in_the_same_case() -> None:
    world = World(num_blocks=33, block_size=4, kv_watermark=1.0, preemption="recompute")
    for request_id in range(1, 11):
        world.add(request_id, 12, max_tokens=20)
    world.run()
    assert world.scheduler.counters.preemptions > 0
    assert set(world.finished.values()) == {"length"}


def test_full_admission_needs_no_headroom() -> None:
    world = World(num_blocks=9, block_size=4, admission="full", decode_headroom=1, kv_watermark=1.0)
    world.add(1, 12, max_tokens=4)
    world.add(2, 12, max_tokens=4)
    world.run()
    assert world.finished == {1: "length", 2: "length"}


# ---- a request of an earlier gang


@pytest.mark.parametrize("policy", ["phased", "unified"])
def test_emitted_tokens_count_as_output(policy: str) -> None:
    """A request of an earlier gang goes on where it was."""
    world = World(policy=policy)
    prompt = prompt_of(9, 3)
    world.scheduler.add(Add(1, 9, prompt + expected(prompt, 2), Sampling(5), num_emitted=2))
    batch = world.step()
    assert batch is not None and batch.sampling.position.tolist() == [5]
    world.run()
    assert world.outputs[9] == expected(prompt, 5)[2:]


def test_emitted_tokens_that_leave_nothing_to_say_are_refused() -> None:
    world = World()
    with pytest.raises(Refused, match="leaves no room"):
        world.scheduler.add(Add(1, 9, [5, 6, 7, 8], Sampling(2), num_emitted=2))
    with pytest.raises(Refused, match="empty"):
        world.scheduler.add(Add(1, 9, [5, 6], Sampling(4), num_emitted=2))
