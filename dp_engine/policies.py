"""The scheduler that a configuration asks for."""

from collections.abc import Iterable

from dp_engine.config import EngineConfig
from dp_engine.phased import PhasedScheduler
from dp_engine.scheduler import Scheduler
from dp_engine.unified import UnifiedScheduler


def make_scheduler(
    config: EngineConfig, num_blocks: int, max_model_len: int, eos_token_ids: Iterable[int]
) -> Scheduler:
    """`num_blocks`: the rank's KV blocks, null block included."""
    policy = UnifiedScheduler if config.policy == "unified" else PhasedScheduler
    return policy(config, num_blocks, max_model_len, eos_token_ids)
