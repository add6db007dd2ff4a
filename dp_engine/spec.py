"""What a rank is told when it starts. Free of torch, since the launcher builds it."""

from dataclasses import dataclass

from dp_engine.config import EngineConfig
from dp_engine.link import RankKeys
from ep.config import ExpertConfig
from vote.config import VoteConfig


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank is told. All but `rank`, `threads`, `host` and `gpu` is the same for the whole gang."""

    rank: int
    world_size: int
    epoch: int
    router_endpoint: str
    keys: RankKeys
    model_dir: str
    engine: EngineConfig
    vote: VoteConfig
    experts: ExpertConfig
    start_timeout_s: float
    threads: int
    host: str  # this rank's own address, for what listens beside it
    gpu: str = ""  # id of the GPU reserved for this rank; empty: it computes on the CPU
    chaos: bool = False  # faults on demand are obeyed
