"""Parameters of the OpenAI API that are not served: accepted where they mean "without it", else refused by name."""

from typing import Any

from launcher.front.errors import ApiError

BOTH: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "service_tier": (None, "auto", "default"),
}
COMPLETIONS = BOTH | {"best_of": (None, 1), "echo": (None, False), "suffix": (None, "")}
CHAT = BOTH | {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "store": (None, False),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
MESSAGE: dict[str, tuple[Any, ...]] = {  # what clients send back of an answer they got
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}


def drop_neutral(body: dict[str, Any], table: dict[str, tuple[Any, ...]], prefix: str = "") -> dict[str, Any]:
    """Return `body` without the parameters of `table`. Raises ApiError for one that asks for something."""
    for name, neutral in table.items():
        if name in body and not any(type(body[name]) is type(value) and body[name] == value for value in neutral):
            param = prefix + name
            raise ApiError(400, f"`{param}` is not supported by this server", param, "unsupported_parameter")
    return {name: value for name, value in body.items() if name not in table}
