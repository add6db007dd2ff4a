"""Replay recorded scheduler traces: `python -m dp_engine.replay FILE...`

A trace is a scenario (settings, arrivals, aborts) and what an original scheduler decided in it, step by step. The
preset of that scheduler has to decide the same, record for record: `deepinfer` (phased; one to three ranks, voting) or
`vllm` (unified). tests/traces/README.md describes the files.
"""

import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dp_engine.config import EngineConfig
from dp_engine.ledger import Ledgers
from dp_engine.messages import Add, Sampling
from dp_engine.phased import PhasedScheduler
from dp_engine.sequence import Sequence
from dp_engine.unified import UnifiedScheduler
from vote.config import VoteConfig
from vote.decision import StepType
from vote.group import ControlGroup, SoloGroup
from vote.protocol import StepProtocol
from vote.recorder import Recorder
from vote.simulated import SimulatedGang
from vote.witness import Witness

Trace = dict[str, Any]
Record = dict[str, Any]

WRONG_GUESS = -5
ORDINARY_TOKEN = 50


def replay_phased(trace: Trace, rank: int, group: ControlGroup) -> list[Record]:
    """What rank `rank` decides in the scenario. Every rank of the trace has to be replayed at the same time."""
    return _PhasedReplay(trace, rank, group).run()


def replay_unified(trace: Trace) -> list[Record]:
    return _UnifiedReplay(trace).run()


class _Scenario:
    """What both replays share: the requests, and the rule for their tokens."""

    def __init__(self, trace: Trace) -> None:
        self.config: dict[str, Any] = trace["config"]
        self.trace = trace
        self.eos_at: dict[int, int | None] = {}

    def settings(self, *names: str) -> dict[str, Any]:
        return {name: self.config[name] for name in names}

    def token(self, request_id: int, number: int) -> int:
        """Output `number`, from 1, of a request."""
        return int(self.config["eos_token_id"]) if self.eos_at[request_id] == number else ORDINARY_TOKEN

    def add(self, event: dict[str, Any], prompt: list[int], **more: Any) -> Add:
        self.eos_at[event["id"]] = event["eos_at"]
        sampling = Sampling(max_tokens=event["max_tokens"], ignore_eos=event["eos_at"] is None)
        return Add(wake=0, request_id=event["id"], prompt=prompt, sampling=sampling, **more)


class _PhasedReplay(_Scenario):
    def __init__(self, trace: Trace, rank: int, group: ControlGroup) -> None:
        super().__init__(trace)
        self.rank = rank
        config = self.config
        engine = EngineConfig(
            preset="deepinfer",
            preemption="terminate" if config["stop_preempted_request"] else "recompute",
            **self.settings(
                "block_size", "num_state_slots", "max_num_batched_tokens", "max_num_seqs", "chunked_prefill",
                "lookahead_tokens", "prefill_max_sum_seqlen_k", "cp_size", "num_draft_tokens",
            ),
        )  # fmt: skip
        votes = VoteConfig(
            decision="cadence",
            fast_path=False,
            all_interval=config["prefill_attempt_interval"],
            any_interval=config["prefill_any_attempt_interval"],
        )
        eos = [config["eos_token_id"]]
        self.scheduler = PhasedScheduler(engine, config["num_blocks"], config["max_model_len"], eos)
        self.scheduler.propose = self.propose
        self.protocol = StepProtocol(group, votes, Witness(Recorder(rank, group.size)))

    def run(self) -> list[Record]:
        records = []
        for events in self.trace["events"]:
            for event in events:
                if event["rank"] == self.rank:
                    self.apply(event)
            records.append(self.step())
        return records

    def apply(self, event: dict[str, Any]) -> None:
        if event["op"] == "abort":
            self.scheduler.abort(event["id"])
        elif event["op"] == "set_schedulable":
            self.scheduler.ready(event["id"])
        else:
            more = {"schedulable": event["schedulable"], "chunk_checkpoints": tuple(event["chunk_checkpoints"])}
            self.scheduler.add(self.add(event, [ORDINARY_TOKEN] * event["prompt_len"], **more))

    def step(self) -> Record:
        scheduler = self.scheduler
        # The original has no sleep: a rank without work still counts its decode steps.
        agreement = self.protocol.agree(replace(scheduler.facts(), unfinished=True), scheduler.try_prefill)
        scheduler.plan(agreement.step_type)
        ignored = [_ended(seq) for seq in scheduler.unreported]
        cleared = [_ended(seq) for seq in scheduler.cleared]
        batch = scheduler.batch()
        step = scheduler._in_flight
        assert step is not None
        ids = scheduler.ledgers.request_id[step.rows].tolist()
        accepted = dict(zip(ids, self.accepted(step.rows, step.seqlens_q), strict=True))
        scheduler.settle(self.tokens(step.rows, step.num_drafts))
        running = [scheduler.ledgers.seq_of(row) for row in scheduler.running.tolist()]
        record: Record = {
            "type": agreement.step_type.value,
            "scheduled": [list(pair) for pair in zip(ids, batch.seqlens_q.tolist(), strict=True)],
            "ignored": ignored,
            "finished": cleared,
            "free_blocks": scheduler.pool.num_free,
            "decode_step": self.protocol.clock.decode_step,
            "waiting": [seq.request_id for seq in scheduler.waiting],
            "running": sorted(seq.request_id for seq in running),
            "computed": {
                str(seq.request_id): self.computed(seq)
                for seq in [*scheduler.waiting, *running]
                if not seq.status.finished
            },
        }
        if scheduler.resources.slots is not None:
            record["free_slots"] = scheduler.resources.slots.num_free
        if self.config["num_draft_tokens"]:
            decode = agreement.step_type is StepType.DECODE
            record["accepted"] = [accepted[request_id] if decode else 0 for request_id in ids]
        return record

    def computed(self, seq: Sequence) -> int:
        return int(self.scheduler.ledgers.num_tokens[seq.row]) if seq.has_row else 0

    def accepted(self, rows: np.ndarray, seqlens_q: np.ndarray) -> list[int]:
        """Accepted drafts of a decode of width q after k outputs: (7 id + 3 k) mod q."""
        ledgers = self.scheduler.ledgers
        return ((7 * ledgers.request_id[rows] + 3 * ledgers.output_len[rows]) % seqlens_q).tolist()

    def propose(self, ledgers: Ledgers, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """As many guesses as are allowed, right ones up to the number that the scenario accepts."""
        for row, limit, right in zip(rows.tolist(), limits.tolist(), self.accepted(rows, 1 + limits), strict=True):
            start, made = int(ledgers.length[row]), int(ledgers.output_len[row])
            request_id = int(ledgers.request_id[row])
            guesses = [self.token(request_id, made + 1 + j) if j < right else WRONG_GUESS for j in range(limit)]
            ledgers.tokens[row, start : start + limit] = guesses
        return limits

    def tokens(self, rows: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
        """The fake model's answer: the next outputs of each sequence."""
        ledgers, flat = self.scheduler.ledgers, []
        for row, drafts in zip(rows.tolist(), num_drafts.tolist(), strict=True):
            made, request_id = int(ledgers.output_len[row]), int(ledgers.request_id[row])
            flat += [self.token(request_id, made + 1 + j) for j in range(drafts + 1)]
        return np.array(flat, np.int64)


class _UnifiedReplay(_Scenario):
    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        config = self.config
        engine = EngineConfig(
            preset="vllm",
            order=config["policy"],
            **self.settings(
                "block_size", "max_num_batched_tokens", "max_num_seqs", "chunked_prefill",
                "long_prefill_token_threshold", "prefix_cache",
            ),
        )  # fmt: skip
        eos = [config["eos_token_id"]]
        self.scheduler = UnifiedScheduler(engine, config["num_blocks"], config["max_model_len"], eos)
        self.seen: set[int] = set()

    def run(self) -> list[Record]:
        records = []
        for events in self.trace["events"]:
            for event in events:
                if event["op"] == "abort":
                    self.scheduler.abort(event["id"])
                else:
                    self.scheduler.add(self.add(event, _prompt(event), priority=event["priority"]))
            records.append(self.step())
        return records

    def step(self) -> Record:
        scheduler, ledgers = self.scheduler, self.scheduler.ledgers
        before = {ledgers.seq_of(row).request_id for row in scheduler.running.tolist()}
        scheduler.plan(StepType.MIXED)
        step = scheduler._planned
        assert step is not None
        after = {ledgers.seq_of(row).request_id for row in scheduler.running.tolist()}
        ids = ledgers.request_id[step.rows].tolist()
        new = [(i, int(ledgers.num_tokens[row])) for i, row in zip(ids, step.rows.tolist(), strict=True)]
        hits = {str(i): hit for i, hit in new if hit and i not in self.seen}
        self.seen.update(ids)
        batch = scheduler.batch()
        made = ledgers.output_len[step.rows].tolist()
        tokens = [self.token(i, number + 1) for i, number in zip(ids, made, strict=True)]
        output = scheduler.settle(np.array(tokens, np.int64))
        running = [ledgers.seq_of(row) for row in scheduler.running.tolist()]
        return {
            "scheduled": [list(pair) for pair in zip(ids, batch.seqlens_q.tolist(), strict=True)],
            "prefix_hit": hits,
            "preempted": sorted(before - after),
            "ended": sorted(list(pair) for pair in output.finished),
            "running": [seq.request_id for seq in running],
            "waiting": [seq.request_id for seq in scheduler.waiting],
            "free_blocks": scheduler.pool.num_free,
            "computed": {str(seq.request_id): int(ledgers.num_tokens[seq.row]) for seq in running},
        }


def _prompt(event: dict[str, Any]) -> list[int]:
    """Requests of a group share the first tokens."""
    group, own, shared = 100 + 1000 * event["group"], 5000 + 300 * event["id"], event["shared"]
    return [(group if j < shared else own) + j for j in range(event["prompt_len"])]


def _ended(seq: Sequence) -> list[Any]:
    return [seq.request_id, seq.status.reason]


# ---- comparing


def first_difference(trace: Trace, records: Seq[Seq[Record]]) -> str | None:
    """Where the replay (per rank) first differs from the trace, in words."""
    ranks = len(records)
    for step, expected in enumerate(trace["expected"]):
        for rank in range(ranks):
            wanted = expected[rank] if isinstance(expected, list) else expected
            got = records[rank][step]
            for name in wanted:
                if got.get(name) != wanted[name]:
                    return f"step {step}, rank {rank}, {name}: {got.get(name)} instead of {wanted[name]}"
    return None


def replay(trace: Trace) -> list[list[Record]]:
    """Records of every rank; the ranks of a phased trace vote over a simulated group."""
    if len(trace["expected"]) != len(trace["events"]):
        raise ValueError(f"{len(trace['expected'])} steps are recorded, {len(trace['events'])} have events")
    if "ranks" not in trace:
        return [replay_unified(trace)]
    size = trace["ranks"]
    if size == 1:
        return [replay_phased(trace, 0, SoloGroup())]
    gang = SimulatedGang(size)
    results = gang.run([partial(replay_phased, trace, rank, gang.group(rank)) for rank in range(size)])
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result for result in results if not isinstance(result, Exception)]


def main(paths: list[str]) -> int:
    if not paths:
        print("usage: python -m dp_engine.replay FILE...", file=sys.stderr)
        return 2
    failed = 0
    for path in paths:
        try:
            trace = json.loads(Path(path).read_text())
            difference = first_difference(trace, replay(trace))
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path}: cannot be replayed: {type(error).__name__}: {error}", file=sys.stderr)
            return 2
        if difference is not None:
            failed += 1
            print(f"{path}: {difference}")
    print(f"{len(paths) - failed} of {len(paths)} traces reproduced")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
