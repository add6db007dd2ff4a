"""Drafts in the scheduler: how many are allowed, what is kept of them, and what they reserve."""

from typing import Any

import pytest

from tests.scheduler_world import EOS, WRONG, World, expected, prompt_of

POLICIES = pytest.mark.parametrize("policy", ["phased", "unified"])


def drafting(right: int, prompts: tuple[int, ...] = (6,), max_tokens: int = 20, **config: Any) -> World:
    """Requests 1, 2, ... have said their first token; of their drafts the first `right` are right."""
    world = World(**({"num_draft_tokens": 4, "block_size": 4} | config))
    world.guess(right)
    for request_id, prompt in enumerate(prompts, 1):
        world.add(request_id, prompt, max_tokens)
    world.step()
    return world


# ---- settlement


@POLICIES
@pytest.mark.parametrize("right", [0, 1, 3, 4, 9])
def test_accepted_are_the_drafts_before_the_first_wrong_one(right: int, policy: str) -> None:
    world = drafting(right, policy=policy)
    assert world.scheduled() == [(1, 5)]
    kept = 1 + min(right, 4)
    assert world.outputs[1] == expected(prompt_of(1, 6), 1 + kept)
    assert world.computed(1) == 6 + kept and world.scheduler.resources.length(world.seq(1)) == 7 + kept
    counters = world.scheduler.counters
    assert (counters.draft_tokens, counters.accepted_draft_tokens) == (4, kept - 1)
    assert counters.generated_tokens == 1 + kept
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 6), 20)


@POLICIES
def test_a_batch_carries_the_drafts_behind_the_last_token(policy: str) -> None:
    world = drafting(1, policy=policy)
    batch = world.step()
    assert batch is not None
    last, right, *_ = world.outputs[1]
    assert batch.input_ids.tolist() == [last, right, WRONG, WRONG, WRONG]
    assert batch.positions.tolist() == [6, 7, 8, 9, 10]
    assert (batch.num_drafts.tolist(), batch.seqlens_k.tolist(), batch.num_outputs) == ([4], [11], 5)
    assert batch.sampling.position.tolist() == [7]  # of the first token that is drawn


@POLICIES
@pytest.mark.parametrize(
    ("answer", "sampling", "reason", "count"),
    [
        ({9: EOS}, {}, "stop", 4),  # an accepted draft; the first step drew the token at 6, the second those from 7 on
        ({9: 7}, {"stop_token_ids": (7,)}, "stop", 4),
        ({9: EOS}, {"ignore_eos": True}, None, 6),
        ({}, {"max_tokens": 3}, "length", 3),
        ({8: EOS}, {"max_tokens": 3}, "stop", 3),
        ({11: EOS}, {}, "stop", 6),  # drawn after the last draft
        ({12: EOS}, {}, None, 6),
    ],
)
def test_a_stop_drops_the_accepted_drafts_behind_it(
    answer: dict[int, int], sampling: dict[str, Any], reason: str | None, count: int, policy: str
) -> None:
    world = World(policy=policy, num_draft_tokens=4, clip_drafts=False)
    world.answer = lambda context: answer.get(len(context), 50)  # type: ignore[method-assign]
    world.guess(4)
    sampling = {"max_tokens": 20} | sampling
    world.add(1, 6, **sampling)
    world.step()
    world.step()
    assert (len(world.outputs[1]), world.finished.get(1)) == (count, reason)
    if reason is None:
        world.scheduler.abort(1)
    world.check_drained()


@POLICIES
def test_an_output_may_name_a_request_several_times(policy: str) -> None:
    world = drafting(2, prompts=(6, 9), policy=policy)
    (first, _), (second, _) = world.scheduled()
    assert world.noted[-1].request_ids == [first] * 3 + [second] * 3


@POLICIES
def test_several_tokens_at_once_are_one_first_token(policy: str) -> None:
    """Those of a fork, whose first step may have drafts."""
    world = World(policy=policy, num_draft_tokens=4)
    world.guess(4)
    world.add(1, 6, max_tokens=20)
    world.step()
    world.add(2, prompt_of(1, 6), max_tokens=20, parent=1)
    world.run()
    assert [len(output.first_token_s) for output in world.noted if output.first_token_s] == [1, 1]
    assert world.outputs[2] == expected(prompt_of(1, 6), 20)


# ---- how many


@pytest.mark.parametrize("budget", [3, 4, 7, 8, 11, 64])
def test_drafts_never_push_a_decode_batch_over_the_token_budget(budget: int) -> None:
    world = World(num_draft_tokens=4, max_num_batched_tokens=budget, max_num_seqs=3)
    world.guess(2)
    for request_id in (1, 2, 3):
        world.add(request_id, 4, max_tokens=30)
    while world.scheduler.num_unfinished:
        batch = world.step()
        assert batch is not None and batch.num_tokens <= budget
    for request_id in (1, 2, 3):
        assert world.outputs[request_id] == expected(prompt_of(request_id, 4), 30)


def test_what_is_left_of_the_budget_goes_to_the_first_in_order() -> None:
    world = drafting(0, prompts=(4, 5, 6), max_num_batched_tokens=20)
    assert sorted(world.decode()) == [(1, 5), (2, 5), (3, 5)]
    world = World(num_draft_tokens=4, max_num_batched_tokens=9, max_num_seqs=3)
    world.guess(0)
    for request_id, length in ((1, 2), (2, 3), (3, 4)):
        world.add(request_id, length, max_tokens=20)
    world.step()
    assert sorted(length for _, length in world.decode()) == [1, 3, 5]


@POLICIES
@pytest.mark.parametrize(("max_tokens", "drafts"), [(2, 0), (3, 1), (5, 3), (6, 4), (7, 4)])
def test_no_draft_beyond_the_end_of_the_sequence(max_tokens: int, drafts: int, policy: str) -> None:
    """The last token is drawn in any case: a draft in its place would be of no use."""
    world = drafting(4, max_tokens=max_tokens, policy=policy)
    assert world.scheduled() == [(1, 1 + drafts)]


@POLICIES
@pytest.mark.parametrize(("prompt", "drafts"), [(24, 4), (26, 4), (27, 3), (29, 1), (30, 0)])
def test_no_draft_beyond_the_model_length(prompt: int, drafts: int, policy: str) -> None:
    world = drafting(4, prompts=(prompt,), max_model_len=32, policy=policy)
    assert world.scheduled() == [(1, 1 + drafts)]
    world.run()
    assert len(world.outputs[1]) == min(32 - prompt, 20)


@pytest.mark.parametrize(("clip", "widths"), [(True, [4, 2]), (False, [5, 5])])
def test_unclipped_drafts(clip: bool, widths: list[int]) -> None:
    """DeepInfer always issues full width."""
    world = drafting(1, max_tokens=5, clip_drafts=clip)
    assert [world.decode()[0][1] for _ in widths] == widths
    assert world.outputs[1] == expected(prompt_of(1, 6), 5)


@POLICIES
def test_no_drafts_while_a_prompt_is_computed(policy: str) -> None:
    world = World(policy=policy, num_draft_tokens=4, max_num_batched_tokens=8)
    world.guess(4)
    world.add(1, 20, max_tokens=9)
    assert [world.scheduled()[0][1] for _ in range(4)] == [8, 8, 4, 5]


@POLICIES
def test_a_proposer_may_find_less(policy: str) -> None:
    """Prompt lookup: nothing repeats in a prompt of all different tokens."""
    world = World(policy=policy, num_draft_tokens=4, draft_ngram_min=1)
    world.add(1, 6, max_tokens=30)
    world.answer = lambda context: (7, 8, 9)[len(context) % 3]  # type: ignore[method-assign]
    widths = [world.scheduled()[0][1] for _ in range(6)]
    assert widths == [6, 1, 1, 1, 4, 4]  # three tokens until the text repeats
    world.run()
    counters = world.scheduler.counters
    assert counters.draft_tokens == counters.accepted_draft_tokens > 0
    assert world.outputs[1] == [(7, 8, 9)[(6 + i) % 3] for i in range(30)]


# ---- blocks


def test_drafts_reserve_blocks_and_rejected_ones_give_them_back() -> None:
    """ceil((L + I + D) / P); a table shrinks with the next decode step."""
    world = drafting(0, prompts=(7,), max_tokens=14, num_draft_tokens=4, block_size=4)
    assert len(world.blocks(1)) == 2
    world.decode()
    assert len(world.blocks(1)) == 3  # 8 + 4 tokens
    world.scheduler.propose = lambda ledgers, rows, limits: 0 * limits
    world.decode()
    assert len(world.blocks(1)) == 3  # 9 tokens
    world.guess(0)
    world.decode()
    assert len(world.blocks(1)) == 4  # 10 + 4
    world.scheduler.propose = lambda ledgers, rows, limits: 0 * limits
    world.decode()
    assert len(world.blocks(1)) == 3  # 11
    assert world.scheduler.pool.num_used == 3


@POLICIES
def test_a_full_pool_never_needs_more_than_the_sequence_itself(policy: str) -> None:
    """Drafts are clipped at its end, so they ask for no block that `add` did not count."""
    world = World(num_blocks=7, block_size=4, policy=policy, num_draft_tokens=4, kv_watermark=1.0)
    world.guess(0)
    world.add(1, 6, max_tokens=18)  # 6 of 6 blocks
    world.run()
    assert world.finished == {1: "length"} and world.scheduler.counters.preemptions == 0


@POLICIES
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_change_no_token_when_blocks_are_short(right: int, policy: str) -> None:
    world = World(
        num_blocks=13, block_size=4, policy=policy, num_draft_tokens=3, kv_watermark=1.0, preemption="recompute"
    )
    world.guess(right)
    for request_id in (1, 2, 3):
        world.add(request_id, 12, max_tokens=20)
    world.run()
    assert world.scheduler.counters.preemptions > 0
    for request_id in (1, 2, 3):
        assert world.outputs[request_id] == expected(prompt_of(request_id, 12), 20)


@POLICIES
@pytest.mark.parametrize(
    "clip",
    [
        True,
        False,
    ],
)
def test_a_table_has_room_for_drafts_behind_drafts_in_flight(clip: bool, policy: str) -> None:
    world = World(policy=policy, overlap=True, clip_drafts=clip, num_draft_tokens=4, block_size=1, max_model_len=32)
    world.guess(right=0)
    world.add(1, 6, max_tokens=100)
    world.run()
    assert world.outputs[1] == expected(prompt_of(1, 6), 26)


# ---- unified budgets


def test_drafts_are_charged_to_the_input_budget_only() -> None:
    """8 tokens may be scheduled; 13 may enter the model, drafts included."""
    world = World(policy="unified", num_draft_tokens=4, max_num_scheduled_tokens=8, max_num_batched_tokens=13)
    world.guess(2)
    world.add(1, 4, max_tokens=9)
    world.step()
    world.add(2, 20)
    assert world.scheduled() == [(1, 5), (2, 7)]


@pytest.mark.parametrize(("inputs", "wanted"), [(9, [(1, 5), (2, 4)]), (5, [(1, 5)]), (4, [(1, 4)]), (1, [(1, 1)])])
def test_drafts_leave_less_of_the_input_budget_for_prompts(inputs: int, wanted: list[tuple[int, int]]) -> None:
    world = World(policy="unified", num_draft_tokens=4, max_num_batched_tokens=inputs)
    world.guess(4)
    world.add(1, 1, max_tokens=9)
    world.step()
    world.add(2, 20)
    assert world.scheduled() == wanted
