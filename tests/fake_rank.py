"""A rank without an engine: speaks the wire protocol from a thread and answers scripted tokens, one per tick."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import zmq

from dp_engine.link import RankKeys
from dp_engine.messages import (
    BALLOT_BUCKETS_S,
    FIRST_TOKEN_BUCKETS_S,
    LEAST_LOGPROB,
    PROTOCOL_VERSION,
    Abort,
    Add,
    Fault,
    Goodbye,
    Hello,
    Histogram,
    LogLine,
    Output,
    Pause,
    PauseMode,
    Rejected,
    Report,
    ResetPrefixCache,
    Shutdown,
    TokenLogprobs,
    Wake,
    Welcome,
    decode_to_rank,
    empty_histogram,
    encode,
)
from dp_engine.numbering import Reception, numbered

Reply = Callable[[Add], Iterator[int] | str]  # tokens (their end ends the request), or a reason to reject


def count_up(add: Add) -> Iterator[int]:
    """The default answer: endless tokens 3, 4, 5 ... below 200, so that max_tokens ends it."""
    del add
    token = 0
    while True:
        yield 3 + token % 197
        token += 1


def logprobs_of(token: int, count: int) -> TokenLogprobs:
    """The fake rank's: falling by one tenth from the token drawn on; the fourth likeliest is impossible."""
    top = [(token + number, -(token + number) / 10 if number != 3 else LEAST_LOGPROB) for number in range(count)]
    return TokenLogprobs(-token / 10, sorted(top, key=lambda entry: -entry[1]))


class FakeRank:
    """`with FakeRank(...) as rank:` runs it. What it received is in `adds`, `aborted`, `pauses`, `resets`, `faults`
    and `wakes`.

    A step gives each request up to `burst` tokens, as accepted drafts do. Pause mode "all" holds the steps.
    """

    def __init__(
        self,
        endpoint: str,
        keys: RankKeys,
        rank: int,
        world_size: int,
        *,
        epoch: int = 1,
        reply: Reply = count_up,
        tick_s: float = 0.001,
        burst: int = 1,
        hello: dict[str, Any] | None = None,
        num_blocks: int = 1000,
        max_model_len: int = 512,
    ) -> None:
        self.rank = rank
        self.reply = reply
        self.tick_s = tick_s
        self.burst = burst
        self.adds: list[Add] = []
        self.aborted: list[int] = []
        self.pauses: list[Pause] = []
        self.resets: list[ResetPrefixCache] = []
        self.faults: list[Fault] = []
        self.wakes: list[int] = []
        self.welcomed = threading.Event()
        self.was_aborted = threading.Event()
        self.end_reason = "stop"  # of answers that end before max_tokens
        self.running: dict[int, tuple[Add, Iterator[int], int]] = {}
        self._hello = Hello(
            **{
                "protocol": PROTOCOL_VERSION,
                "launch_id": keys.launch_id,
                "epoch": epoch,
                "rank": rank,
                "world_size": world_size,
                "pid": 4711 + rank,
                "num_blocks": num_blocks,
                "max_model_len": max_model_len,
                "observer": "",
                **(hello or {}),
            }
        )
        self._num_blocks = num_blocks
        self._endpoint, self._keys = endpoint, keys
        self._outbox: list[bytes] = []
        self._leave: str | None = None
        self._vanish = False
        self._sent = 0
        self._reception = Reception()
        self._steps = self._generated = self._drafted = self._accepted = 0
        self._mode: PauseMode = "none"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "FakeRank":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._vanish = True
        self._thread.join(5)
        assert not self._thread.is_alive()

    def die(self, error: str) -> None:
        """Say Goodbye with an error and stop."""
        self._leave = error

    def send_raw(self, payload: bytes) -> None:
        self._outbox.append(payload)

    def log(self, text: str) -> None:
        self.send_raw(encode(LogLine(rank=self.rank, level=20, text=text)))

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 200
        socket.curve_serverkey = self._keys.server_public.encode()
        socket.curve_publickey = self._keys.client_public.encode()
        socket.curve_secretkey = self._keys.client_secret.encode()
        socket.connect(self._endpoint)
        self._send(socket, encode(self._hello))
        try:
            self._loop(socket)
        finally:
            socket.close()
            context.term()

    def lose(self, messages: int) -> None:
        """The next messages of this rank are lost on the way."""
        self._sent += messages

    def _send(self, socket: Any, payload: bytes) -> None:
        socket.send(numbered(self._sent, payload))
        self._sent += 1

    def _loop(self, socket: Any) -> None:
        next_tick = time.monotonic()
        while not self._vanish:
            socket.poll(timeout=max(1, int(1000 * self.tick_s)) if self.running else 5)
            while socket.poll(timeout=0):
                if not self._receive(decode_to_rank(self._reception.payload(socket.recv()))):
                    self._send(socket, encode(Goodbye(rank=self.rank, error="")))
                    return
            for payload in self._outbox:
                self._send(socket, payload)
            self._outbox.clear()
            if self._leave is not None:
                self._send(socket, encode(Goodbye(rank=self.rank, error=self._leave)))
                return
            if self.running and self._mode != "all" and time.monotonic() >= next_tick:
                next_tick = time.monotonic() + self.tick_s
                self._send(socket, encode(self._step()))

    def _receive(self, message: Any) -> bool:
        match message:
            case Welcome():
                self.welcomed.set()
            case Add():
                self.adds.append(message)
                self.wakes.append(message.wake)
                answer = self.reply(message)
                if isinstance(answer, str):
                    self._outbox.append(encode(Rejected(request_id=message.request_id, reason=answer)))
                else:
                    self.running[message.request_id] = (message, answer, message.num_emitted)
            case Wake():
                self.wakes.append(message.wake)
            case Pause():
                self.wakes.append(message.wake)
                self.pauses.append(message)
                self._mode = message.mode
            case ResetPrefixCache():
                self.wakes.append(message.wake)
                self.resets.append(message)
            case Fault():
                self.wakes.append(message.wake)
                self.faults.append(message)
            case Abort():
                self.aborted += message.request_ids
                self.was_aborted.set()
                for request_id in message.request_ids:
                    self.running.pop(request_id, None)
            case Shutdown():
                return False
        return True

    def _step(self) -> Output:
        self._steps += 1
        ids: list[int] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        finished = []
        for request_id, (add, answer, emitted) in list(self.running.items()):
            drawn = list(islice(answer, min(self.burst, add.sampling.max_tokens - emitted)))
            ids += [request_id] * len(drawn)
            tokens += drawn
            wanted = add.sampling.logprobs
            logprobs += [None if wanted is None else logprobs_of(token, wanted) for token in drawn]
            emitted += len(drawn)
            self._drafted += self.burst - 1
            self._accepted += len(drawn) - 1
            following = next(answer, None)
            if emitted == add.sampling.max_tokens or following is None:
                finished.append((request_id, "length" if emitted == add.sampling.max_tokens else self.end_reason))
                del self.running[request_id]
            else:
                self.running[request_id] = (add, chain([following], answer), emitted)
        self._generated += len(tokens)
        return Output(self._steps, ids, tokens, finished, self.report(), logprobs if any(logprobs) else None)

    def report(self) -> Report:
        buckets = [0, 0, self._steps, *[0] * (len(BALLOT_BUCKETS_S) - 2)]
        return Report(
            running=len(self.running),
            waiting=0,
            used_blocks=len(self.running),
            num_blocks=self._num_blocks,
            prefill_steps=1,
            decode_steps=self._steps,
            idle_sleeps=0,
            placeholder_steps=0,
            mixed_steps=0,
            prompt_tokens=sum(len(add.prompt) for add in self.adds),
            generated_tokens=self._generated,
            preemptions=0,
            aborted=len(self.aborted),
            prefix_query_tokens=sum(len(add.prompt) for add in self.adds),
            prefix_hit_tokens=sum(len(add.prompt) for add in self.adds if add.parent),
            draft_tokens=self._drafted,
            accepted_draft_tokens=self._accepted,
            forks=sum(add.parent > 0 for add in self.adds),
            cached_blocks=len(self.adds),
            batched_tokens=self._generated,
            sum_qk=3 * self._generated,
            max_seqlen_k=7,
            min_seqlen_k=2,
            bad_messages=0,
            ballots=Histogram(self._steps, 0.001 * self._steps, buckets),
            first_tokens=empty_histogram(FIRST_TOKEN_BUCKETS_S),
        )
