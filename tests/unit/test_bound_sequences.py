"""Log-probabilities and grammars through the scheduler: with drafts, overlap, chunks and preemption; from any cut."""

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from dp_engine.admission import Refused
from dp_engine.batch import Batch
from dp_engine.messages import Add, Grammar, Sampling, TokenLogprobs
from dp_engine.output import StepOutput
from dp_engine.sequence import Status
from tests.scheduler_world import World, expected, prompt_of
from tests.unit.test_grammar import EOS, PERSON, ids, tokenizer, vocabulary

ENGINES = [
    {"policy": policy, "overlap": overlap, "num_draft_tokens": drafts}
    for policy, overlap, drafts in product(("phased", "unified"), (False, True), (0, 3))
]
every_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: "-".join(map(str, engine.values())))
PROMPT = ids('{"name": "ab", "age": 12} {"name": "cd", "age": 1')  # drafts are found in it


def logprobs_of(context: list[int], token: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token), [(sum(context) % 97, -1.0)])


class BoundWorld(World):
    """A model that draws what it wants of what is allowed, by the whole context, and tells log-probabilities.

    `wilful`: it does not look at the masks.
    """

    def __init__(self, *, wilful: bool = False, **config: Any) -> None:
        super().__init__(eos_token_ids=(EOS,), **({"block_size": 4, "num_blocks": 600} | config))
        self.wilful = wilful
        self.logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.masked: list[int] = []  # rows of masks by step
        self._told: dict[int, TokenLogprobs] = {}

    def ask(self, request_id: int, prompt: list[int], emitted: list[int], **sampling: Any) -> None:
        grammar = sampling.get("grammar")
        matcher = vocabulary().matcher(grammar, emitted) if grammar is not None else None
        ask = Sampling(**({"max_tokens": 200} | sampling))
        self.scheduler.add(Add(1, request_id, prompt + emitted, ask, num_emitted=len(emitted)), matcher)

    def model(self, batch: Batch) -> np.ndarray:
        tokens = super().model(batch)
        contexts = list(self.contexts(batch))
        if batch.masks is not None:
            self.masked.append(len(batch.masks.rows))
            for row, mask in zip(batch.masks.rows.tolist(), batch.masks.allowed, strict=True):
                if not self.wilful:
                    may = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                    tokens[row] = may[sum((i + 1) * t for i, t in enumerate(contexts[row])) % len(may)]
        wanted = [] if batch.logprobs is None else np.repeat(batch.logprobs, batch.num_drafts + 1).tolist()
        self._told = {
            row: logprobs_of(contexts[row], int(tokens[row])) for row, count in enumerate(wanted) if count >= 0
        }
        return tokens

    def contexts(self, batch: Batch) -> Iterator[list[int]]:
        """What each output follows."""
        lengths = zip(batch.seqlens_k.tolist(), batch.num_drafts.tolist(), strict=True)
        for index, (length, drafts) in enumerate(lengths):
            context = self.context(batch.block_tables[index], length)
            yield from (context[: length - drafts + number] for number in range(drafts + 1))

    def settle(self) -> None:
        if self.pending is not None:
            tokens, self.pending = self.pending, None
            self.note(self.scheduler.settle(tokens, self._told or None))

    def note(self, output: StepOutput) -> None:
        super().note(output)
        if output.logprobs is not None:
            for request_id, logprobs in zip(output.request_ids, output.logprobs, strict=True):
                self.logprobs[request_id] += [] if logprobs is None else [logprobs]


def undisturbed(grammar: Grammar | None = PERSON) -> list[int]:
    world = BoundWorld()
    world.ask(1, PROMPT, [], grammar=grammar)
    world.run()
    return world.outputs[1]


# ---- grammars


@every_engine
def test_the_same_output_in_every_engine_and_it_fits(engine: dict[str, Any]) -> None:
    world = BoundWorld(**engine)
    world.ask(1, PROMPT, [], grammar=PERSON)
    world.ask(2, PROMPT + ids(" and"), [])
    world.ask(3, PROMPT, [], grammar=Grammar("choice", '["Paris", "Rome"]'))
    world.run()
    assert world.outputs[1] == undisturbed()
    assert list(json.loads(tokenizer().decode(world.outputs[1][:-1]))) == ["name", "age"]
    assert tokenizer().decode(world.outputs[3][:-1]) in ("Paris", "Rome")
    assert world.outputs[2] == expected(PROMPT + ids(" and"), 200)
    assert world.finished == {1: "stop", 2: "length", 3: "stop"}
    assert world.scheduler.ledgers.num_bound == 0


@pytest.mark.parametrize("engine", ENGINES[1::2], ids=lambda engine: "-".join(map(str, engine.values())))
def test_from_every_cut_it_goes_on_as_if_nothing_had_been(engine: dict[str, Any]) -> None:
    whole = undisturbed()
    world = BoundWorld(**engine, max_num_seqs=64, num_blocks=2500)
    for cut in range(len(whole)):
        world.ask(1 + cut, PROMPT, whole[:cut], grammar=PERSON)
    world.run()
    assert [world.outputs[1 + cut] for cut in range(len(whole))] == [whole[cut:] for cut in range(len(whole))]


def test_drafts_are_accepted_and_only_bound_rows_are_masked() -> None:
    world = BoundWorld(num_draft_tokens=3)
    world.ask(1, PROMPT, [], grammar=Grammar("regex", r'\d \{"name": "cd", "age": 12\}'))
    world.ask(2, prompt_of(2, 9), [], max_tokens=20)
    world.run()
    counters = world.scheduler.counters
    assert counters.draft_tokens > 0 and counters.accepted_draft_tokens > 0
    assert max(world.masked) > 1, "a draft has a mask behind it"
    assert world.finished[1] == "stop"


@every_engine
def test_a_token_that_is_refused_is_not_told_and_ends_its_request_alone(engine: dict[str, Any]) -> None:
    world = BoundWorld(wilful=True, **engine)
    world.guess(right=3)
    world.ask(1, PROMPT, [], grammar=PERSON, logprobs=0)
    world.ask(2, prompt_of(2, 9), [], max_tokens=9)
    world.run()
    assert world.finished == {1: "structured_output_failed", 2: "length"}
    assert world.outputs[1] == [] and world.logprobs[1] == []
    assert world.outputs[2] == expected(prompt_of(2, 9), 9)
    assert world.scheduler.counters.generated_tokens == 9


def test_emitted_tokens_that_do_not_fit_end_the_request() -> None:
    world = BoundWorld()
    world.ask(1, PROMPT, ids("{ nonsense"), grammar=PERSON)
    world.run()
    assert world.finished == {1: "structured_output_failed"} and world.outputs[1] == []


@pytest.mark.parametrize("policy", ["phased", "unified"])
def test_it_is_never_computed_again_after_a_preemption(policy: str) -> None:
    world = BoundWorld(policy=policy, preemption="recompute", num_blocks=22, kv_watermark=1.0)
    world.ask(1, prompt_of(1, 20), [], max_tokens=40, grammar=Grammar("regex", "a{20,39}b"))
    world.ask(2, prompt_of(2, 20), [], max_tokens=40)
    world.run()
    assert world.scheduler.counters.preemptions > 0
    ends = set(world.finished.items())
    assert ends in ({(1, "insufficient_system_resource"), (2, "length")}, {(1, "stop"), (2, "length")})


def test_what_is_refused() -> None:
    world = BoundWorld()
    with pytest.raises(Refused, match="ignore_eos"):
        world.ask(1, PROMPT, [], grammar=PERSON, ignore_eos=True)
    with pytest.raises(Refused, match="no grammars"):
        world.scheduler.add(Add(1, 1, PROMPT, Sampling(5, grammar=PERSON)))
    assert world.scheduler.num_unfinished == 0


def test_an_abort_between_steps_leaves_nothing() -> None:
    world = BoundWorld(overlap=True, num_draft_tokens=3)
    world.ask(1, PROMPT, [], grammar=PERSON)
    world.ask(2, PROMPT, [], grammar=PERSON)
    for _ in range(4):
        world.step()
    world.scheduler.abort(1, Status.ABORTED)
    world.run()
    assert world.outputs[2] == undisturbed()
    assert world.scheduler.ledgers.num_bound == 0


# ---- log-probabilities


@every_engine
def test_each_token_has_its_own_and_nobody_gets_some_unasked(engine: dict[str, Any]) -> None:
    world = BoundWorld(max_num_batched_tokens=24, **engine)
    world.guess(right=2)
    prompts = {request_id: prompt_of(request_id, 10 * request_id) for request_id in (1, 2, 3, 4)}
    for request_id, prompt in prompts.items():
        world.ask(request_id, prompt, [], max_tokens=15, logprobs=request_id if request_id % 2 else None)
    world.run()
    for request_id, prompt in prompts.items():
        tokens = expected(prompt, 15)
        assert world.outputs[request_id] == tokens
        wanted = [logprobs_of(prompt + tokens[:at], token) for at, token in enumerate(tokens)]
        assert world.logprobs[request_id] == (wanted if request_id % 2 else [])


@pytest.mark.parametrize("engine", [{"policy": "phased"}, {"policy": "unified", "overlap": True}], ids=str)
def test_a_preempted_request_tells_no_token_twice(engine: dict[str, Any]) -> None:
    world = BoundWorld(num_blocks=13, kv_watermark=1.0, preemption="recompute", **engine)
    for request_id in (1, 2, 3):
        world.ask(request_id, prompt_of(request_id, 12), [], max_tokens=20, logprobs=2)
    world.run()
    assert world.scheduler.counters.preemptions > 0
    for request_id in (1, 2, 3):
        tokens = expected(prompt_of(request_id, 12), 20)
        assert [-int(values.logprob) for values in world.logprobs[request_id]] == tokens


def test_nothing_is_carried_when_nobody_asks() -> None:
    world = BoundWorld()
    world.ask(1, prompt_of(1, 9), [])
    batch = world.step()
    assert batch is not None and batch.logprobs is None and batch.masks is None
    assert all(output.logprobs is None for output in world.noted)
