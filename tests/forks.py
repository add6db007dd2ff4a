"""A parent and what its forks should say."""

from typing import Any

from tests.scheduler_world import World, expected, prompt_of

PROMPT = prompt_of(1, 10)  # two full blocks of 4 and a half one


def parent(
    policy: str, prompt: list[int] = PROMPT, max_tokens: int = 12, prefilled: bool = True, **config: Any
) -> World:
    """Request 1, prefilled or waiting; no prefix cache that could share anything beside the forks."""
    defaults = {"policy": policy, "block_size": 4, "prefix_cache": False, "num_blocks": 65}
    world = World(**(defaults | config))
    world.add(1, prompt, max_tokens)
    if prefilled:
        world.step()
    return world


def check(world: World, prompts: dict[int, list[int]], max_tokens: int = 12) -> None:
    """Everything runs to its end with the right tokens, and all is given back."""
    world.run()
    for request_id, prompt in prompts.items():
        assert world.outputs[request_id] == expected(prompt, max_tokens), request_id
        assert world.finished[request_id] == "length"


def prefilled_tokens(world: World) -> int:
    return world.scheduler.counters.prompt_tokens
