"""Random worlds: whatever arrives, leaves, forks or is paused in whatever pool, every request ends with the right
tokens, every block comes home, and nobody starves.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from dp_engine.admission import Refused
from tests.scheduler_world import World, expected, prompt_of
from vote.decision import StepType

PATIENCE = 4000  # steps in which all that is there at the end has to be done


@st.composite
def configs(draw: Any, policy: str, overlap: bool) -> dict[str, Any]:
    chunked = draw(st.booleans()) or draw(st.booleans())
    config: dict[str, Any] = {
        "policy": policy,
        "overlap": overlap,
        "num_blocks": draw(st.integers(8, 40)),
        "block_size": draw(st.sampled_from([1, 3, 4, 8])),
        "max_num_batched_tokens": draw(st.sampled_from([5, 9, 16, 64] if chunked else [21, 64])),
        "chunked_prefill": chunked,
        "max_num_seqs": draw(st.integers(1, 6)),
        "prefix_cache": draw(st.booleans()),
        "admission": draw(st.sampled_from(["current", "current", "full"])),
        "preemption": draw(st.sampled_from(["terminate", "recompute"])),
        "max_preemptions": draw(st.sampled_from([0, 2, 8])),
        "num_draft_tokens": draw(st.sampled_from([0, 0, 1, 3])),
        "draft_ngram_min": 1,
        "num_state_slots": draw(st.sampled_from([None, None, 3, 8])),
    }
    if config["num_state_slots"]:
        config["prefix_cache"] = False
    if policy == "unified":
        config["order"] = draw(st.sampled_from(["fcfs", "priority"]))
        config["long_prefill_token_threshold"] = draw(st.sampled_from([0, 4]))
        config["prefix_share"] = draw(st.sampled_from(["computed", "computed", "scheduled"]))
    else:
        config["kv_watermark"] = draw(st.sampled_from([0.5, 0.9, 1.0]))
        config["lookahead_tokens"] = draw(st.sampled_from([0, 0, 3]))
        config["cp_size"] = draw(st.sampled_from([1, 1, 2]))
        if not overlap:
            config["release"] = draw(st.sampled_from(["settlement", "settlement", "next_decode"]))
            config["decode_headroom"] = draw(st.sampled_from([0, 0, 1]))
    return config


class SchedulerMachine(RuleBasedStateMachine):
    policy = "phased"
    overlap = False

    @initialize(data=st.data())
    def start(self, data: Any) -> None:
        self.settings = data.draw(configs(self.policy, self.overlap))
        self.world = World(max_model_len=96, **self.settings)
        self.prompts: dict[int, tuple[list[int], int]] = {}  # accepted requests: prompt, max_tokens
        self.aborted: set[int] = set()
        self.failed: set[int] = set()
        self.held: set[int] = set()  # not schedulable yet
        self.next_id = 1

    @rule(
        length=st.integers(1, 40),
        group=st.integers(0, 4),
        max_tokens=st.integers(1, 20),
        salt=st.sampled_from(["", "", "s"]),
        priority=st.integers(0, 3),
        held=st.sampled_from([False, False, False, True]),
        structured=st.booleans(),
        marks=st.booleans(),
    )
    def add(self, length: int, group: int, max_tokens: int, held: bool, marks: bool, **more: Any) -> None:
        prompt = prompt_of(group, length // 2) + prompt_of(self.next_id, length - length // 2)
        if group == 0:
            prompt = prompt_of(0, length)
        salt = more.pop("salt")
        if marks and self.policy == "phased" and self.settings["chunked_prefill"]:
            more["chunk_checkpoints"] = (max(length // 3, 1), length // 2 + 1)
            more["spans"] = ((length // 4, min(length // 4 + 3, length)),)
        self.submit(prompt, max_tokens, schedulable=not held, cache_salt=salt, **more)

    def submit(self, prompt: list[int], max_tokens: int, **more: Any) -> None:
        request_id = self.next_id
        self.next_id += 1
        try:
            self.world.add(request_id, prompt, max_tokens, **more)
        except Refused:
            return
        self.prompts[request_id] = prompt, max_tokens
        if not more.get("schedulable", True):
            self.held.add(request_id)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), cut=st.integers(0, 6), extra=st.integers(0, 6), max_tokens=st.integers(1, 12))
    def fork(self, data: Any, cut: int, extra: int, max_tokens: int) -> None:
        """A branch of a request: the same prompt, or one that leaves it somewhere, with what the parent has said."""
        parent = data.draw(st.sampled_from(sorted(self.prompts)[-6:]))
        text = self.prompts[parent][0] + self.world.outputs[parent][: data.draw(st.integers(0, 4))]
        kept = text[: max(len(text) - cut, 1)]
        self.submit(kept + prompt_of(self.next_id, extra), max_tokens, parent=parent)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.prompts)))
        self.world.scheduler.abort(request_id)
        if request_id not in self.world.finished:
            self.aborted.add(request_id)
        self.held.discard(request_id)

    @precondition(lambda self: self.held)
    @rule(fails=st.booleans())
    def ready(self, fails: bool) -> None:
        request_id = self.held.pop()
        self.world.scheduler.ready(request_id, "no picture" if fails else "")
        if fails:
            self.failed.add(request_id)

    @rule(mode=st.sampled_from(["none", "none", "new", "all"]))
    def pause(self, mode: Any) -> None:
        self.world.scheduler.pause(mode)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.world.scheduler.reset_prefix_cache()

    @rule(count=st.integers(1, 12), decode=st.booleans())
    def steps(self, count: int, decode: bool) -> None:
        """`decode`: the gang does not grant the first wish for prefill."""
        first = StepType.DECODE if decode and self.policy == "phased" else None
        for index in range(count):
            self.world.step(first if index == 0 else None)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        scheduler = self.world.scheduler
        scheduler.pause("none")
        for request_id in self.held:
            scheduler.ready(request_id)
        self.world.run(PATIENCE)
        for request_id, (prompt, max_tokens) in self.prompts.items():
            output = self.world.outputs[request_id]
            assert output == expected(prompt, len(output)), request_id
            if request_id in self.aborted and request_id not in self.world.finished:
                continue
            self.check_end(request_id, len(output), min(max_tokens, 96 - len(prompt)))

    def check_end(self, request_id: int, count: int, wanted: int) -> None:
        reason = self.world.finished[request_id]
        if reason == "length":
            assert count == wanted
        elif reason == "insufficient_system_resource":
            assert self.settings["admission"] == "current", "preempted in spite of its reservation"
        elif reason == "preprocess_failed":
            assert request_id in self.failed
        else:
            assert reason == "abort" and request_id in self.aborted


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("policy", ["phased", "unified"])
def test_random_worlds(policy: str, overlap: bool) -> None:
    machine = type("Machine", (SchedulerMachine,), {"policy": policy, "overlap": overlap})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150,
            stateful_step_count=30,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        ),
    )
