"""A request inside a rank, and the words for how it stands."""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from dp_engine.grammar import Matcher
from dp_engine.messages import Sampling


class Status(IntEnum):
    """Finished statuses come last, so that one comparison tells them."""

    WAITING = 0
    RUNNING = 1
    STOPPED = 2
    LENGTH = 3
    ABORTED = 4
    IGNORED = 5
    PREEMPTED = 6
    STRUCTURED_OUTPUT_FAILED = 7
    PREPROCESS_FAILED = 8
    PREFILLED = 9

    @property
    def finished(self) -> bool:
        return self >= Status.STOPPED

    @property
    def reason(self) -> str:
        """The finish reason as clients read it."""
        return FINISH_REASONS[self]


FINISH_REASONS = {
    Status.STOPPED: "stop",
    Status.LENGTH: "length",
    Status.ABORTED: "abort",
    Status.IGNORED: "prompt_length_exceeded",
    Status.PREEMPTED: "insufficient_system_resource",
    Status.STRUCTURED_OUTPUT_FAILED: "structured_output_failed",
    Status.PREPROCESS_FAILED: "preprocess_failed",
    Status.PREFILLED: "prefilled",  # a prefill-only engine has done its part
}


@dataclass(slots=True, eq=False)
class Sequence:
    """A request. While it holds blocks, its ledgers live in row `row` of `Ledgers` and `tokens` is stale.

    tokens: int32, prompt and what was generated until the sequence last lost its row.
    prompt_len: length of the original prompt; tokens beyond it were generated, here or in an earlier gang.
    stop_len: the length at which it ends with LENGTH.
    number: order of arrival at this rank; arrival: time.monotonic() of it.
    forked: its blocks and slot are another sequence's too, and the last block has to be copied before it is written.
    matcher: where its committed output stands in its grammar, if one binds it.
    keys: names of its full blocks so far (dp_engine.prefix), of cache generation `keys_generation`.
    """

    request_id: int
    tokens: np.ndarray
    prompt_len: int
    stop_len: int
    sampling: Sampling
    number: int = 0
    arrival: float = 0.0
    priority: int = 0
    status: Status = Status.WAITING
    row: int = -1
    preemptions: int = 0
    schedulable: bool = True
    structured: bool = False
    forked: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    checkpoints: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    salt: str = ""
    matcher: Matcher | None = None
    keys: list[bytes] = field(default_factory=list)
    keys_generation: int = -1

    @property
    def has_row(self) -> bool:
        return self.row >= 0
