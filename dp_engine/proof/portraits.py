"""What of a scheduler can influence its future: portraits for `vote.fingerprint`, with the reason for what they omit.

Rows and blocks are names: nothing asks which is the greater one. So a row is called after its sequence, and blocks are
numbered as they are come across; free blocks without a name are all alike.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from dp_engine.batch import Batch
from dp_engine.ledger import Ledgers, Step
from dp_engine.output import Counters
from dp_engine.resources import Resources
from dp_engine.scheduler import Scheduler
from dp_engine.sequence import Sequence

# Equal in the whole world, or only reported, or a second way to what `resources` has, or written for whoever records a
# plan and never read. (The unified policy reads `counters` to see how many preemptions one call of it has added.)
_SCHEDULER = (
    "_config", "_chunker", "_eos", "_prompt_limit", "max_model_len", "propose", "counters", "pool", "ledgers", "cleared"
)  # fmt: skip
_STEPS = ("_planned", "_attempt", "_in_flight")
_COLUMNS = ("length", "num_tokens", "inflight", "output_len", "num_named", "state_slot")
# Not here: what came with the Add; `keys`, which follow from the tokens; `arrival`, from which a latency is reported.
_REQUEST = ("request_id", "number", "status", "preemptions", "schedulable", "forked", "checkpoints", "keys_generation")


def _scheduler(scheduler: Scheduler) -> dict[str, Any]:
    led = scheduler.ledgers
    portrait = {name: value for name, value in vars(scheduler).items() if name not in _SCHEDULER}
    portrait["running"] = _names(led, scheduler.running)
    for name in _STEPS:
        step: Step | None = portrait.get(name)
        if step is not None:
            arrays = (step.seqlens_q, step.num_drafts, step.outputs)
            portrait[name] = [step.step_type, _names(led, step.rows), *arrays, step.drafts_due]
    return portrait


def _names(ledgers: Ledgers, rows: np.ndarray) -> list[int]:
    """Rows by the arrival numbers of their sequences."""
    return [ledgers.seq_of(row).number for row in rows.tolist()]


def _resources(resources: Resources) -> list[Any]:
    """Of the ledgers only rows in use, and of their tokens and blocks only what is there: `open` and `append_blocks`
    write before anything is read. Of the prefix cache not the figures, which are only reported."""
    led, pool = resources.ledgers, resources.pool
    named: dict[int, int] = defaultdict(lambda: len(named))
    rows = []
    for row, seq in enumerate(led.owner):
        if seq is not None:
            length = max(int(led.length[row]), int(led.num_tokens[row]))  # drafts in flight are counted there
            numbers = [int(getattr(led, name)[row]) for name in _COLUMNS]
            rows.append([seq.number, numbers, led.tokens[row, :length], led.blocks_of(row).tolist()])
    rows.sort(key=lambda entry: entry[0])
    for entry in rows:
        entry[-1] = [named[block] for block in entry[-1]]
    cache = [
        [named[block] for block in pool._cached],
        sorted((named[block], key) for block, key in pool._key_of.items()),
        sorted((key, named[block]) for key, block in pool._block_of.items()),
        sorted((key, [named[block] for block in blocks]) for key, blocks in pool._copies_of.items()),
    ]
    sources = [
        [([named[block] for block in blocks.tolist()], slots) for blocks, slots in some]
        for some in (resources._sources, resources._sources_in_flight)
    ]
    copies = [(named[source], named[target]) for source, target in resources._block_copies]
    held = np.flatnonzero(pool.references).tolist()
    references = sorted((named[block], int(pool.references[block])) for block in held)
    rest = (resources.slots, resources._state_copies, resources._generation, len(led.owner))
    return [rows, pool.num_free, references, cache, sources, copies, *rest]


def _sequence(seq: Sequence) -> dict[str, Any]:
    """Tokens only while the ledgers do not have them."""
    portrait = {name: getattr(seq, name) for name in _REQUEST}
    return portrait | {"tokens": None if seq.has_row else seq.tokens}


def _batch(batch: Batch) -> list[Any]:
    """Of a step in flight only what the explorer's model looks at."""
    return [batch.step_type, batch.seqlens_q, batch.num_drafts, batch.sampling.position]


PORTRAITS: dict[type, Callable[[Any], Any]] = {
    Scheduler: _scheduler,
    Resources: _resources,
    Sequence: _sequence,
    Batch: _batch,
    Counters: lambda counters: (),
}
