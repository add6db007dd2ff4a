"""A phased rank in the middle of its work."""

from typing import Any

from tests.scheduler_world import World

PREEMPTED = "insufficient_system_resource"
FULL = {"block_size": 4, "kv_watermark": 1.0}  # small pools, used to the last block


def running(*prompts: int, max_tokens: int = 20, **config: Any) -> World:
    """Requests 1, 2, ... are prefilled one after the other, with a decode step in between."""
    world = World(**(FULL | config))
    for request_id, prompt in enumerate(prompts, 1):
        world.add(request_id, prompt, max_tokens)
        world.prefill()
        if request_id < len(prompts):
            world.decode()
    return world
