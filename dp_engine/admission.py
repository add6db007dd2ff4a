"""Reading a request: what can never run is refused here, with the reason."""

import numpy as np

from dp_engine.config import EngineConfig
from dp_engine.grammar import Matcher
from dp_engine.ledger import blocks_for
from dp_engine.messages import Add, Sampling
from dp_engine.sequence import Sequence


class Refused(ValueError):
    """A request this rank can never run; the message says why."""


def read_request(
    request: Add, config: EngineConfig, max_model_len: int, num_blocks: int, matcher: Matcher | None = None
) -> Sequence:
    """The sequence of a request. `num_blocks`: blocks of the rank, without the null block; `matcher`: of its grammar,
    where the tokens emitted so far have led. Raises Refused.

    With `refusal` at_prefill only what makes no sense at all is refused; the rest is ignored when its turn comes.
    """
    length = len(request.prompt)
    prompt_len = length - request.num_emitted
    late = config.refusal == "at_prefill"
    stop_len = min(prompt_len + request.sampling.max_tokens, max_model_len + late)
    if prompt_len < 1:
        raise Refused("the prompt is empty")
    _check_marks(request, config)
    _check_grammar(request.sampling, matcher)
    if not late:
        _check_length(length, stop_len, request.sampling.max_tokens, config, max_model_len)
        needed = int(blocks_for(stop_len, config.block_size))
        if needed > num_blocks:
            raise Refused(f"{stop_len} tokens need {needed} KV blocks, a rank has {num_blocks}")
    return Sequence(
        request_id=request.request_id,
        tokens=np.array(request.prompt, np.int32),
        prompt_len=prompt_len,
        stop_len=stop_len,
        sampling=request.sampling,
        priority=request.priority,
        schedulable=request.schedulable,
        structured=request.structured or request.sampling.grammar is not None,
        stop_token_ids=frozenset(request.sampling.stop_token_ids),
        checkpoints=request.chunk_checkpoints,
        spans=request.spans,
        salt=request.cache_salt,
        matcher=matcher,
    )


def prompt_limit(config: EngineConfig, max_model_len: int) -> int:
    """Longest prompt: a step has to take it whole unless it may be split (DeepInfer's rule)."""
    return max_model_len if config.chunked_prefill else min(max_model_len, step_budget(config))


def step_budget(config: EngineConfig) -> int:
    """Most prompt tokens of one step."""
    if config.policy == "unified":
        return min(config.max_num_scheduled_tokens or config.max_num_batched_tokens, config.max_num_batched_tokens)
    return config.max_num_batched_tokens // config.cp_alignment * config.cp_alignment


def _check_length(length: int, stop_len: int, max_tokens: int, config: EngineConfig, max_model_len: int) -> None:
    if stop_len <= length:
        raise Refused(
            f"a prompt of {length} tokens leaves no room for a new token: "
            f"the model takes {max_model_len}, the request asks for {max_tokens}"
        )
    if length > prompt_limit(config, max_model_len):
        raise Refused(
            f"a prompt of {length} tokens exceeds the token budget of a step "
            f"({step_budget(config)}) and chunked prefill is off"
        )
    limit = config.prefill_max_sum_seqlen_k
    if limit is not None and config.policy == "phased" and stop_len > limit:
        raise Refused(f"{stop_len} tokens exceed prefill_max_sum_seqlen_k ({limit})")


def _check_grammar(sampling: Sampling, matcher: Matcher | None) -> None:
    if sampling.grammar is not None and matcher is None:
        raise Refused("this rank has no grammars")
    if sampling.grammar is not None and sampling.ignore_eos:
        raise Refused("ignore_eos and a grammar exclude each other: the end of the grammar is the end of the output")


def _check_marks(request: Add, config: EngineConfig) -> None:
    """Checkpoints and spans say where a chunk may end."""
    if (request.chunk_checkpoints or request.spans) and config.policy != "phased":
        raise Refused("chunk_checkpoints and spans need the phased policy")
    if request.chunk_checkpoints and not config.chunked_prefill:
        raise Refused("chunk_checkpoints need chunked prefill")
    end, budget = 0, step_budget(config)
    for start, stop in request.spans:
        if not end <= start < stop <= len(request.prompt):
            raise Refused(f"span [{start}, {stop}) is out of order or outside the prompt")
        if stop - start > budget:
            raise Refused(f"span [{start}, {stop}) exceeds the token budget of a step ({budget})")
        end = stop
