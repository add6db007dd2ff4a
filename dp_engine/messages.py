"""What router and ranks say to each other: msgpack with a schema, no pickle.

Every message is one ZMQ frame, its number before it (`dp_engine.numbering`). Structs are arrays on the wire, tagged by
name; what does not parse raises `msgspec.ValidationError` (or `DecodeError`), which the receiver counts and drops.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

PROTOCOL_VERSION = 5
MAX_MESSAGE_BYTES = 64 << 20

PauseMode: TypeAlias = Literal["none", "new", "all"]
Direction: TypeAlias = Literal["to_router", "to_rank"]
FaultKind: TypeAlias = Literal["kill", "stop", "raise", "hang", "slow", "drop", "full", "poison"]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What a request's whole output has to be. `text`: a JSON schema, nothing (json_object: any JSON object), a regular
    expression, a grammar in GBNF or Lark syntax, or a JSON list of strings.
    """

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "choice"]
    text: str = ""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How a request's tokens are drawn and when it ends.

    A token depends on the logits, `seed` and its position alone, so a preempted or resubmitted request repeats itself.
    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch these off. `logprobs`: how many of the likeliest tokens
    are told beside each token, with its own log-probability; None: no log-probabilities.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None


LEAST_LOGPROB = -9999.0  # stands for minus infinity, as OpenAI writes it: JSON has no infinity


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of a token's probability and of the likeliest tokens' (id, logprob), falling.

    Of the model's own distribution: before temperature, top_k, top_p and grammar. Never below LEAST_LOGPROB.
    """

    logprob: float
    top: list[tuple[int, float]]


class Histogram(msgspec.Struct, array_like=True):
    """Cumulative since the rank's start: count and sum of seconds, and counts per bucket, +Inf last."""

    count: int
    total: float
    buckets: list[int]

    def add(self, bounds: Sequence[float], seconds: float) -> None:
        """`bounds`: upper bounds of all buckets but the last."""
        self.count += 1
        self.total += seconds
        self.buckets[bisect_left(bounds, seconds)] += 1


BALLOT_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
FIRST_TOKEN_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


def empty_histogram(bounds: Sequence[float]) -> Histogram:
    return Histogram(0, 0.0, [0] * (len(bounds) + 1))


class ExpertReport(msgspec.Struct, frozen=True, array_like=True):
    """A rank's experts, and what moving them has cost. Counters are cumulative since the rank's start."""

    recent_rows: list[int]  # by MoE layer, computed in the last `experts.rebalance_window_steps` steps
    rows: int  # a row is a token for one of its experts
    rebalances: int  # times the load of all layers was looked at
    layers_placed: int  # anew
    received: int  # experts that came from other ranks
    received_bytes: int
    held_s: float  # that steps have waited for it, and the longest that one has
    longest_held_s: float


class Report(msgspec.Struct, frozen=True, array_like=True):
    """State and counters of a rank. Counters are cumulative since the rank's start."""

    running: int
    waiting: int
    used_blocks: int
    num_blocks: int  # without the null block
    prefill_steps: int
    decode_steps: int
    idle_sleeps: int
    placeholder_steps: int  # steps this rank ran with nothing scheduled
    mixed_steps: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    aborted: int
    prefix_query_tokens: int  # prompt tokens looked up in the prefix cache
    prefix_hit_tokens: int  # of these, tokens whose KV was there
    draft_tokens: int  # guessed tokens that were verified
    accepted_draft_tokens: int
    forks: int  # requests that started from another one's KV
    cached_blocks: int  # free blocks that still hold a named prefix
    batched_tokens: int  # tokens that entered the model
    sum_qk: int  # query times key length over all sequences and steps
    max_seqlen_k: int  # longest and shortest KV of the last step
    min_seqlen_k: int
    bad_messages: int
    ballots: Histogram  # BALLOT_BUCKETS_S
    first_tokens: Histogram  # FIRST_TOKEN_BUCKETS_S: from a request's arrival at the rank to its first token
    experts: ExpertReport | None = None  # None: the model has none


# ---- rank -> router


class Hello(Message, frozen=True):
    """First message of a rank, sent when it is loaded and in the gang. Nothing is sent to a rank before its Hello."""

    protocol: int
    launch_id: str
    epoch: int
    rank: int
    world_size: int
    pid: int
    num_blocks: int  # without the null block
    max_model_len: int
    observer: str  # address of the process that can be asked about this rank


class Output(Message, frozen=True):
    """Tokens of one step: `tokens[i]` belongs to `request_ids[i]`; one with accepted drafts has several, in order.
    A request that ends is in `finished` once, with its last token (if any) in the same message. Reasons:
    `dp_engine.sequence.FINISH_REASONS`.
    """

    step: int
    request_ids: list[int]
    tokens: list[int]
    finished: list[tuple[int, str]]
    report: Report | None = None
    logprobs: list[TokenLogprobs | None] | None = None  # parallel to tokens; None: no request asked for them


class Rejected(Message, frozen=True):
    """A request the rank can never run, with the reason."""

    request_id: int
    reason: str


class LogLine(Message, frozen=True):
    """A line of the rank's log for the launcher's terminal."""

    rank: int
    level: int
    text: str


class Loading(Message, frozen=True):
    """How much of its share of the checkpoint a rank has loaded; sent before its Hello, a few times a second."""

    rank: int
    done_bytes: int
    total_bytes: int


class Diagnosis(Message, frozen=True):
    """What the gang's flight recorders say of its end: the same from every rank that lives to tell.

    culprits: the ranks that left; innocent: they were stopped or are out of reach, which no step can cause.
    """

    rank: int
    text: str
    culprits: list[int]
    innocent: bool

    @property
    def title(self) -> str:
        """The first line, which says the most."""
        return self.text.partition("\n")[0]


class Goodbye(Message, frozen=True):
    """Last message of a rank. `error` is empty after an orderly stop."""

    rank: int
    error: str


# ---- router -> rank


class Welcome(Message, frozen=True):
    """Answer to Hello: the router counts on this rank from now on."""

    launch_id: str


class Add(Message, frozen=True):
    """A new request. `request_id` is the router's own and unique for the life of the gang.

    `wake` numbers the router's wake-ups: whoever hands work to one rank sends the same number to all others (`Wake`).
    `prompt` are token ids; the last `num_emitted` of them were generated in an earlier life of the request.
    `parent`: id of a request at the same rank whose KV is shared as far as both have the same tokens (a fork); the
    request runs on its own if that one has gone. 0: none.
    `priority`: lower is earlier (unified policy with order `priority`).
    `cache_salt`: only requests of the same salt share a cached prefix.
    `schedulable`: False holds the request, and whatever is queued behind it, until `Ready`.
    `structured`: its output is bound to an automaton, so it is never computed again after a preemption.
    `chunk_checkpoints`: lengths, rising, at which a chunk of the prompt has to end.
    `spans`: [start, end) of tokens that no chunk boundary may cut (an image).
    """

    wake: int
    request_id: int
    prompt: list[int]
    sampling: Sampling
    num_emitted: int = 0
    parent: int = 0
    priority: int = 0
    cache_salt: str = ""
    schedulable: bool = True
    structured: bool = False
    chunk_checkpoints: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


class Wake(Message, frozen=True):
    """Some other rank has got work."""

    wake: int


class Abort(Message, frozen=True):
    """Forget these requests. Unknown ids are ignored (they may have ended meanwhile)."""

    request_ids: list[int]


class Ready(Message, frozen=True):
    """A request that was added with `schedulable` False may run, or, with an `error`, ends as preprocess_failed."""

    wake: int
    request_id: int
    error: str = ""


class Pause(Message, frozen=True):
    """What the scheduler may start: everything ("none" is paused), nothing that is not running yet ("new"), or nothing
    at all ("all"). Requests stay where they are.
    """

    wake: int
    mode: PauseMode


class ResetPrefixCache(Message, frozen=True):
    """Forget all cached prefixes. Requests that use some of them go on."""

    wake: int


class Fault(Message, frozen=True):
    """Let something go wrong at this rank, for tests and drills (`dp_engine.chaos`). A step is a turn of the step loop.

    kill, stop, raise, hang: in the step after `after_steps` more. slow: the next `steps` forwards take `seconds` more.
    drop: the next `messages` messages in this `direction` are lost. full: all free KV blocks are withheld for `steps`
    steps. poison: from now on a request whose own prompt contains `tokens` in a row ends the rank, in `how`'s way, in
    the step that schedules it.
    """

    wake: int
    kind: FaultKind
    after_steps: int = 0
    seconds: float = 0.0
    steps: int = 1
    messages: int = 1
    direction: Direction = "to_router"
    tokens: tuple[int, ...] = ()
    how: Literal["raise", "kill"] = "raise"


class Shutdown(Message, frozen=True):
    """Leave the step loop. Sent to all ranks; they leave together at the same step."""

    wake: int


ToRank: TypeAlias = Welcome | Add | Wake | Abort | Ready | Pause | ResetPrefixCache | Fault | Shutdown
ToRouter: TypeAlias = Hello | Output | Rejected | LogLine | Loading | Diagnosis | Goodbye

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_to_router = msgspec.msgpack.Decoder(ToRouter).decode
