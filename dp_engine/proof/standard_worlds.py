"""The standard worlds of the explorer."""

from collections.abc import Callable
from typing import Any

from dp_engine.config import EngineConfig
from dp_engine.proof.worlds import Router, World
from vote.config import VoteConfig

Story = Callable[[Router], object]

TINY: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 3, "prefix_cache": False}
CADENCE: dict[str, Any] = {"decision": "cadence", "all_interval": 2, "any_interval": 3}
ADAPTIVE: dict[str, Any] = {
    "decode_steps_per_prefill": 3, "decode_steps_per_shared_prefill": 2, "decode_steps_per_urgent_prefill": 1,
    "saved_prefills": 1,
}  # fmt: skip
PUBLISHED = CADENCE | {"fast_path": False}


def world(
    name: str,
    about: str,
    story: Story,
    *,
    ranks: int = 2,
    vote: dict[str, Any] | None = None,
    num_blocks: int = 9,
    bounded: bool = True,
    rebalance_interval: int = 0,
    **engine: Any,
) -> World:
    """A world from what differs from the usual: two ranks, the default decision, eight blocks of four tokens."""
    router = Router(ranks)
    story(router)
    return World(
        name, about, ranks, tuple(router.events), EngineConfig(**(TINY | engine)), VoteConfig(**(vote or ADAPTIVE)),
        num_blocks, aborted=frozenset(router.aborted), bounded=bounded,
        rebalance_interval=rebalance_interval,
    )  # fmt: skip


# ---- what the router does


def a_request_each(router: Router) -> None:
    for rank in range(router.ranks):
        router.add(rank, 3, 3)
    router.add(0, 5, 4)
    if router.ranks == 2:
        router.add(1, 2, 2)


def lonely(router: Router) -> None:
    router.add(0, 3, 6)
    router.add(0, 6, 2)
    router.add(0, 3, 3)


def lonely_prompt(router: Router) -> None:
    """Everybody else decodes while one rank has a prompt of three chunks."""
    for rank in range(1, router.ranks):
        router.add(rank, 2, 8)
    router.add(0, 21, 2)


def chunked(router: Router) -> None:
    router.add(0, 3, 5)
    router.add(1, 19, 2)
    router.add(0, 9, 2)
    router.add(1, 4, 2)


def crowded(router: Router) -> None:
    """More than the pool of a rank can hold at full length."""
    router.add(0, 6, 8)
    router.add(0, 7, 6)
    router.add(1, 3, 3)
    router.add(0, 2, 3)


def two_halves(router: Router) -> None:
    """A sequence is preempted while a prompt behind it is half computed; then it is half computed, too."""
    router.add(0, 10, 8)
    router.add(0, 18, 2)
    router.add(1, 3, 4)


def aborts(router: Router) -> None:
    """Before, while and after they run, as messages happen to arrive."""
    first = router.add(0, 5, 4)
    second = router.add(1, 17, 3)
    router.abort(0, first)
    router.add(0, 3, 3)
    router.abort(1, second)


def aborted_heads(router: Router) -> None:
    """What is aborted is the head of `waiting`, and others are behind it."""
    first = router.add(0, 17, 3)
    router.add(0, 3, 2)
    router.abort(0, first)
    router.add(1, 3, 3)


def pauses(router: Router) -> None:
    router.add(0, 3, 4)
    router.pause("new")
    router.add(1, 9, 3)
    router.pause("all")
    router.pause("none")


def wake_ups(router: Router) -> None:
    """Requests so short that the gang is about to sleep whenever one comes."""
    for number in range(5):
        router.add(number % router.ranks, 2, 1)


def not_ready(router: Router) -> None:
    first = router.add(0, 3, 2, schedulable=False)
    second = router.add(1, 3, 3, schedulable=False)
    router.add(1, 2, 2)
    router.ready(1, second)
    router.ready(0, first, "no such image")


def same_prompts(router: Router) -> None:
    """Prefixes that are shared, forgotten, and shared again; a fork."""
    parent = router.add(0, 9, 3)
    router.add(0, 9, 3, parent=parent)
    router.reset_prefix_cache()
    router.add(1, 3, 2)
    router.add(0, 9, 2)


def stopped(router: Router) -> None:
    router.add(0, 9, 4)
    router.add(1, 3, 5)
    router.shut_down()


# ---- the worlds

FULL: dict[str, Any] = {"num_blocks": 6, "kv_watermark": 1.0}
UNIFIED: dict[str, Any] = {"policy": "unified"}
RECOMPUTE: dict[str, Any] = {"preemption": "recompute"}
PREFIX: dict[str, Any] = {"prefix_cache": True}
OVERLAP: dict[str, Any] = {"overlap": True}


def standard_worlds() -> dict[str, World]:
    """By name."""
    worlds = [
        world("cadence", "a few requests, cadence as published", a_request_each, vote=PUBLISHED),
        world("cadence-fast-path", "the same with the fast path", a_request_each, vote=CADENCE),
        world("adaptive", "the same, adaptive", a_request_each),
        world("adaptive-overlap", "the same, adaptive and with overlap", a_request_each, **OVERLAP),
        world("unified", "the same, unified", a_request_each, **UNIFIED),
        world("unified-overlap", "the same, unified and with overlap", a_request_each, **UNIFIED, **OVERLAP),
        world("three-cadence", "three ranks, cadence", a_request_each, ranks=3, vote=PUBLISHED),
        world("three-adaptive", "three ranks, adaptive", a_request_each, ranks=3),
        world("lonely", "one of three ranks has all the work", lonely, ranks=3, vote=PUBLISHED),
        world("lonely-prompt", "a lonely prompt among ranks that decode", lonely_prompt, ranks=3),
        world("chunked", "prompts of several chunks", chunked, vote=CADENCE),
        world("chunked-unified", "prompts of several chunks, unified", chunked, **UNIFIED, **OVERLAP),
        world("full-recompute", "a full pool, preemption by recompute", crowded, vote=CADENCE, **FULL, **RECOMPUTE,
              **OVERLAP),
        world("full-terminate", "a full pool, the oldest are ended", crowded, vote=CADENCE, **FULL),
        world("full-unified", "a full pool, unified", crowded, **FULL, **UNIFIED, **OVERLAP),
        world("two-halves", "two half-computed prompts above the watermark", two_halves, num_blocks=8,
              kv_watermark=0.5, vote=CADENCE, **RECOMPUTE),
        world("aborts", "aborts before, in and after a request's life", aborts, vote=CADENCE, **OVERLAP),
        world("aborted-heads", "aborted heads of queues, swept out as published", aborted_heads,
              release="next_decode", want="head", vote=PUBLISHED),
        world("aborts-unified", "the same, unified", aborts, **UNIFIED, **OVERLAP),
        world("pauses", "pause and resume", pauses, **OVERLAP),
        world("pauses-unified", "pause and resume, unified", pauses, **UNIFIED),
        world("wake-ups", "wake-ups that cross the gang's falling asleep", wake_ups, ranks=3),
        world("not-ready", "requests that wait to be ready", not_ready, vote=PUBLISHED),
        world("prefixes", "shared prefixes, a fork, and a reset", same_prompts, vote=CADENCE, **PREFIX, **OVERLAP),
        world("prefixes-unified", "the same, unified", same_prompts, **PREFIX, **UNIFIED),
        world("rebalance", "experts move while requests run", wake_ups, rebalance_interval=2),
        world("rebalance-overlap", "the same with overlap", wake_ups, rebalance_interval=2, **OVERLAP),
        world("stopped", "stopped in the middle of work", stopped, ranks=3, **OVERLAP),
    ]  # fmt: skip
    return {world.name: world for world in worlds}
