"""What gangs are asked to do in the end-to-end tests of the scheduler. Turns, ranks: see `tests.scripted_link`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dp_engine.messages import Sampling
from tests.scripted_link import Script

VOCAB, MAX_NEW = 320, 12
LATER = 1000  # a turn at which the gang sleeps
LENGTHS = (1, 7, 8, 9, 23, 24, 25, 40, 57, 72)
_rng = np.random.default_rng(5)
PROMPTS = [_rng.integers(3, VOCAB, length).tolist() for length in LENGTHS]
REPETITIVE = [pattern * 5 for pattern in ([7, 9, 11], [30, 40, 50, 60], PROMPTS[1])] + PROMPTS[3:8]
RECOMPUTE = {"preemption": "recompute", "max_preemptions": None}
STORMS = (1, 2)
PREFIX_HITS = 5 * 16 + 24 + 2 * 40 + 2 * 16  # what `prefixes` has to find, on one rank or two


class Reference:
    """transformers' own greedy text, one prompt at a time, ends of sequence not obeyed."""

    def __init__(self, directory: Path) -> None:
        from transformers import MixtralForCausalLM

        self._model = MixtralForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._texts: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: list[int], count: int) -> list[int]:
        text = self._texts.get(tuple(prompt), [])
        if len(text) < count:
            ids = torch.tensor([prompt])
            settings = {"max_new_tokens": count, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            text = self._model.generate(ids, **settings)[0, len(prompt) :].tolist()
            self._texts[tuple(prompt)] = text
        return text[:count]


@dataclass(frozen=True)
class Ask:
    """A request. `more`: fields of Add."""

    request_id: int
    prompt: list[int]
    max_tokens: int = MAX_NEW
    turn: int = 0
    rank: int = 0
    stop: tuple[int, ...] = ()
    temperature: float = 0.0
    more: Mapping[str, Any] = field(default_factory=dict)

    def expected(self, reference: Reference) -> list[int]:
        """Its greedy text, up to the first stop token."""
        text = reference(self.prompt, self.max_tokens)
        ends = [at for at, token in enumerate(text) if token in self.stop]
        return text[: ends[0] + 1] if ends else text

    def put_into(self, script: Script) -> None:
        sampling = Sampling(
            self.max_tokens, temperature=self.temperature, top_p=0.95, seed=11 + self.request_id,
            stop_token_ids=self.stop, ignore_eos=True,
        )  # fmt: skip
        script.add(self.turn, self.request_id, self.prompt, sampling, rank=self.rank, **self.more)


@dataclass(frozen=True)
class Scenario:
    """Requests, what else the router says, settings; `least`: counters of the reports, summed over the ranks, that
    have to be reached for the scenario to show anything. `cut`: requests that end before their text does."""

    asks: list[Ask]
    engine: Mapping[str, Any] = field(default_factory=dict)
    vote: Mapping[str, Any] = field(default_factory=dict)
    orders: Callable[[Script], None] = lambda script: None
    least: Mapping[str, int] = field(default_factory=dict)
    cut: frozenset[int] = frozenset()

    def script(self, size: int) -> Script:
        script = Script(size)
        for ask in self.asks:
            ask.put_into(script)
        self.orders(script)
        return script


def at_once(prompts: list[list[int]] = PROMPTS, **more: Any) -> list[Ask]:
    return [Ask(number, prompt, rank=number, **more) for number, prompt in enumerate(prompts, 1)]


def arrivals(reference: Reference) -> Scenario:
    """One after the other, in the middle of others' texts and after sleeps; ended by stop tokens too."""
    ends = [reference(prompt, 9)[8:] if number % 3 else [] for number, prompt in enumerate(PROMPTS, 1)]
    asks = [
        Ask(number, prompt, turn=3 * number, rank=number // 2, stop=tuple(stop))
        for number, (prompt, stop) in enumerate(zip(PROMPTS, ends, strict=True), 1)
    ]
    asks += [Ask(20 + n, PROMPTS[n][::-1], 1 + n, turn=LATER * (1 + n // 2), rank=n) for n in range(1, 6)]
    return Scenario(asks, least={"idle_sleeps": 3})


def lonely(_: Reference) -> Scenario:
    """All on one rank."""
    return Scenario([Ask(number, prompt, turn=number) for number, prompt in enumerate(PROMPTS, 1)])


def chunks(_: Reference) -> Scenario:
    return Scenario(at_once(), {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 16})


def tight(_: Reference) -> Scenario:
    """The largest request needs 11 of the 14 blocks."""
    engine = {"num_blocks": 15} | RECOMPUTE
    return Scenario(at_once(PROMPTS + PROMPTS[3:7]), engine, least={"preemptions": 1})


def tight_chunks(_: Reference) -> Scenario:
    engine = {"num_blocks": 15, "max_num_batched_tokens": 24} | RECOMPUTE
    return Scenario(at_once(PROMPTS[::-1]), engine, least={"preemptions": 1})


def terminated(_: Reference) -> Scenario:
    engine = {"num_blocks": 15, "preemption": "terminate"}
    asks = at_once(PROMPTS[2:8] * 2)
    return Scenario(asks, engine, least={"preemptions": 1}, cut=frozenset(ask.request_id for ask in asks))


def reserved(_: Reference) -> Scenario:
    return Scenario(at_once(), {"num_blocks": 15, "admission": "full"})


def prefixes(_: Reference) -> Scenario:
    """A prefix of 19 tokens with different ends, whole prompts again, and one that must not share."""
    stem = PROMPTS[8][:19]
    first = [Ask(1 + rank, stem + PROMPTS[4], rank=rank) for rank in (0, 1)]
    ends = [Ask(10 + n, stem + PROMPTS[n][:9], turn=6 + n, rank=n) for n in range(6)]
    again = [Ask(20 + n, stem + PROMPTS[4], turn=LATER, rank=n, more={"cache_salt": "x" * (n > 1)}) for n in range(4)]
    aligned = [Ask(30 + n, PROMPTS[5], turn=LATER * (2 + n // 2), rank=n) for n in range(4)]  # three blocks exactly
    return Scenario([*first, *ends, *again, *aligned], least={"prefix_hit_tokens": PREFIX_HITS})


def forks(reference: Reference) -> Scenario:
    """n = 3; branches that go on differently, begin late, share next to nothing, or whose parent has gone."""
    asks = []
    for rank in (0, 1):
        parent, prompt = 1 + 100 * rank, PROMPTS[4 + rank]
        text = reference(prompt, MAX_NEW)
        late = prompt + text[:3]
        branches: list[tuple[list[int], dict[str, Any]]] = [
            (prompt, {}),
            (prompt, {}),
            (prompt[:19] + PROMPTS[3], {}),
            (prompt[:12], {}),
            (PROMPTS[7], {}),
            ([*late, (text[3] + 1) % VOCAB], {"turn": 9}),
            (late, {"turn": 11}),
            ([*prompt, 5, 6], {"turn": LATER}),
        ]
        asks.append(Ask(parent, prompt, rank=rank))
        asks += [
            Ask(parent + n, own, rank=rank, more={"parent": parent}, **when)
            for n, (own, when) in enumerate(branches, 1)
        ]
    return Scenario(asks, least={"forks": 8})


def drafts(_: Reference) -> Scenario:
    """Texts that repeat themselves; prompts of patterns."""
    least = {"draft_tokens": 20, "accepted_draft_tokens": 10}
    return Scenario(at_once(REPETITIVE, max_tokens=40), {"num_draft_tokens": 3, "draft_ngram_min": 1}, least=least)


def aborts(_: Reference) -> Scenario:
    """While prefilled in chunks, while decoding, while waiting, twice, and of somebody unknown."""

    def orders(script: Script) -> None:
        for turn, request_id in ((3, 10), (5, 9), (9, 4), (9, 3), (10, 4)):
            script.abort(turn, [request_id, 999], rank=request_id)

    engine = {"max_num_batched_tokens": 24, "max_num_seqs": 3}
    return Scenario(at_once(), engine, orders=orders, cut=frozenset((3, 4, 9, 10)))


def pauses(_: Reference) -> Scenario:
    """Nothing new for a while, then nothing at all until long after everybody fell asleep; and a head that waits for
    its pictures."""

    def orders(script: Script) -> None:
        script.pause(4, "new")
        script.pause(9, "all")
        script.reset_prefix_cache(LATER - 1)
        script.pause(LATER, "none")
        script.ready(LATER + 5, 21)
        script.ready(LATER + 9, 22)

    held = [Ask(21 + n, PROMPTS[7 + n], turn=6, rank=n, more={"schedulable": False}) for n in (0, 1)]
    behind = [Ask(31 + n, PROMPTS[6 + n], turn=7, rank=n) for n in (0, 1)]
    return Scenario([*at_once(), *held, *behind], orders=orders, least={"idle_sleeps": 2})


def priorities(_: Reference) -> Scenario:
    asks = [
        Ask(number, prompt, turn=2 * number, rank=number // 2, more={"priority": -number})
        for number, prompt in enumerate(PROMPTS, 1)
    ]  # fmt: skip
    engine = {"order": "priority", "num_blocks": 15} | RECOMPUTE
    return Scenario(asks, engine, least={"preemptions": 1})


def sampled(_: Reference) -> Scenario:
    return Scenario(at_once(REPETITIVE, max_tokens=32, temperature=0.6))


def sampled_drafts(_: Reference) -> Scenario:
    engine = {"num_draft_tokens": 3, "draft_ngram_min": 1, "num_blocks": 20, "max_num_batched_tokens": 24}
    least = {"draft_tokens": 20, "accepted_draft_tokens": 1, "preemptions": 1}
    return Scenario(at_once(REPETITIVE, max_tokens=32, temperature=0.6), engine | RECOMPUTE, least=least)


def storm(reference: Reference, seed: int) -> Scenario:
    """Everything at once, at random."""
    rng = np.random.default_rng(seed)
    asks: list[Ask] = []
    for number in range(1, 31):
        asks.append(_storm_ask(rng, reference, number, asks))
    cut = {ask.request_id: ask for ask in asks[::5]}

    def orders(script: Script) -> None:
        for ask in cut.values():
            script.abort(ask.turn + ask.request_id % 9, [ask.request_id], rank=ask.rank)
        script.pause(30, "new")
        script.pause(45, "none")
        script.reset_prefix_cache(50)

    def draw(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    engine = {
        "num_blocks": draw(13, 16, 24),
        "max_num_batched_tokens": draw(16, 24, 64),
        "max_num_seqs": draw(3, 64),
        "num_draft_tokens": draw(0, 1, 3),
        "draft_ngram_min": 1,
        "admission": draw("current", "current", "full"),
        "order": draw("fcfs", "priority"),
        "prefix_share": draw("computed", "scheduled"),
        "decode_headroom": draw(0, 1),
        "readmission_margin": draw(0, 1, 8),
        "want": draw("admissible", "head"),
        "kv_watermark": draw(0.5, 0.9),
        "long_prefill_token_threshold": draw(0, 16),
        "lookahead_tokens": draw(0, 4),
    }
    vote = {"decision": draw("cadence", "adaptive"), "all_interval": 3, "any_interval": 5}
    return Scenario(asks, engine | RECOMPUTE, vote, orders, cut=frozenset(cut))


def _storm_ask(rng: np.random.Generator, reference: Reference, number: int, before: list[Ask]) -> Ask:
    """A prompt as it is, one with a common beginning, a fork, or one that repeats itself and shares with its like."""

    def below(limit: int) -> int:
        return int(rng.integers(limit))

    prompt, turn, rank = PROMPTS[below(len(PROMPTS))], below(40) + LATER * (number > 24), below(2)
    more: dict[str, Any] = {"priority": below(3)}
    kind = below(4)
    if kind == 1:
        prompt = PROMPTS[9][: 1 + below(30)] + PROMPTS[1]
    if kind == 2 and before:
        parent = before[-1 - below(min(4, len(before)))]
        grown = parent.prompt + reference(parent.prompt, MAX_NEW)[: below(6)]
        prompt = grown if below(2) else [*grown[: len(grown) // 2 + 1], 77]
        rank, turn = parent.rank, parent.turn + below(2) * below(9)
        more["parent"] = parent.request_id
    if kind == 3:
        prompt = prompt[:3] * 9
        more["cache_salt"] = "own"
    return Ask(number, prompt, 4 + below(MAX_NEW - 4), turn, rank, more=more)


SCENARIOS: Mapping[str, Callable[[Reference], Scenario]] = {
    scenario.__name__: scenario
    for scenario in (
        arrivals, lonely, chunks, tight, tight_chunks, terminated, reserved, prefixes, forks, drafts, aborts, pauses,
        priorities, sampled, sampled_drafts,
    )
} | {f"storm_{seed}": partial(storm, seed=seed) for seed in STORMS}  # fmt: skip
