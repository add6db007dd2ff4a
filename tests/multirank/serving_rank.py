"""A whole rank, as the launcher starts it, and one whose model fails at one token."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from dp_engine.batch import Batch, Drawn
from dp_engine.chaos import ChaosError
from dp_engine.rank import run_rank
from dp_engine.runner import ModelRunner
from dp_engine.spec import RankSpec
from vote.errors import LockstepBroken

POISON = 13


@dataclass(frozen=True)
class End:
    """How a rank's life ended. `culprits`, `report`: of the others, if that was it."""

    error: str = ""
    culprits: dict[int, str] | None = None
    report: str = ""


def serve(rank: int, store: dist.Store, specs: list[RankSpec]) -> End:
    """Until shut down, or until a request with the token `POISON` is computed."""
    run = ModelRunner.run

    def run_or_fail(self: Any, batch: Batch) -> Drawn:
        if POISON in batch.input_ids:
            raise ValueError("this token is poison")
        return run(self, batch)

    with patch.object(ModelRunner, "run", run_or_fail):
        return live(rank, store, specs)


def live(rank: int, store: dist.Store, specs: list[RankSpec]) -> End:
    """Until shut down, or until something goes wrong."""
    try:
        run_rank(specs[rank], store)
    except LockstepBroken as error:
        return End(str(error), error.culprits, error.report)
    except (ValueError, ChaosError) as error:
        return End(str(error))
    return End()
