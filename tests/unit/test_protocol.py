"""The step protocol over simulated ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from vote.ballot import Facts
from vote.config import VoteConfig
from vote.decision import StepType
from vote.errors import LockstepBroken
from vote.protocol import Agreement, StepProtocol
from vote.recorder import Recorder
from vote.simulated import SimulatedGang
from vote.witness import Witness

CADENCE = VoteConfig(decision="cadence", fast_path=False)


def gang(size: int, script: Callable[[StepProtocol, int], object], **settings: object) -> list[object]:
    """Run `script(protocol, rank)` on every rank; returns results or exceptions."""
    simulated = SimulatedGang(size)

    def rank_main(rank: int) -> object:
        witness = Witness(Recorder(rank, size))
        return script(StepProtocol(simulated.group(rank), CADENCE, witness, **settings), rank)  # type: ignore[arg-type]

    return simulated.run([partial(rank_main, rank) for rank in range(size)])


WANTS = Facts(wants_prefill=True, unfinished=True)
BUSY = Facts(has_decode=True, unfinished=True)


def test_second_ballot_turns_an_empty_prefill_into_decode() -> None:
    def script(protocol: StepProtocol, rank: int) -> list[Agreement]:
        return [protocol.agree(WANTS, lambda: False), protocol.agree(WANTS, lambda: rank == 1)]

    for first, second in gang(2, script):  # type: ignore[misc]
        assert (first.step_type, first.compute) == (StepType.DECODE, False)
        assert (second.step_type, second.compute) == (StepType.DECODE, False)  # decode_step is 1 now, no ALL point


def test_one_rank_scheduling_is_enough_for_a_prefill_everywhere() -> None:
    def script(protocol: StepProtocol, rank: int) -> Agreement:
        return protocol.agree(WANTS, lambda: rank == 1)

    assert all(a.step_type is StepType.PREFILL and a.compute for a in gang(3, script))  # type: ignore[attr-defined]


def test_prefill_is_attempted_only_when_chosen() -> None:
    def script(protocol: StepProtocol, rank: int) -> StepType:
        def attempt() -> bool:
            raise AssertionError("nobody chose PREFILL")

        return protocol.agree(WANTS if rank == 0 else BUSY, attempt).step_type

    assert gang(2, script) == [StepType.DECODE, StepType.DECODE]


@pytest.mark.parametrize(
    ("facts", "sleep", "stop"),
    [
        ((Facts(wake=3), Facts(wake=3)), True, False),
        ((Facts(wake=3), Facts(wake=4)), False, False),  # a wake-up is on its way to rank 0: vote again
        ((Facts(wake=3), BUSY), False, False),
        ((Facts(wants_stop=True), Facts()), False, False),
        ((Facts(wants_stop=True), Facts(wants_stop=True)), False, True),
    ],
)
def test_sleep_and_stop_are_agreed(facts: tuple[Facts, ...], sleep: bool, stop: bool) -> None:
    def script(protocol: StepProtocol, rank: int) -> tuple[bool, bool]:
        agreement = protocol.agree(facts[rank], lambda: False)
        return agreement.sleep, agreement.stop

    assert gang(2, script) == [(sleep, stop)] * 2


def test_sleep_does_not_advance_the_clock() -> None:
    def script(protocol: StepProtocol, rank: int) -> int:
        for _ in range(3):
            assert protocol.agree(Facts(), lambda: False).sleep
        return protocol.clock.step

    assert gang(2, script) == [0, 0]


@pytest.mark.parametrize(
    ("facts", "rebalance"),
    [
        ((BUSY, replace(BUSY, wants_rebalance=True)), True),  # one is enough
        ((BUSY, Facts(wants_rebalance=True)), True),
        ((BUSY, BUSY), False),
        ((Facts(wants_rebalance=True), Facts(wants_rebalance=True)), False),  # nothing is computed: it sleeps
        ((Facts(wants_rebalance=True), Facts(unfinished=True)), False),
    ],
)
def test_experts_move_before_a_forward_if_any_rank_asks(facts: tuple[Facts, ...], rebalance: bool) -> None:
    def script(protocol: StepProtocol, rank: int) -> tuple[bool, bool]:
        agreement = protocol.agree(facts[rank], lambda: False)
        return agreement.rebalance, agreement.sleep

    asleep = not any(fact.unfinished for fact in facts)
    assert gang(2, script) == [(rebalance, asleep)] * 2


@pytest.mark.parametrize("field", ["settings", "epoch", "collectives", "decode_step", "placement"])
def test_a_rank_out_of_lockstep_is_noticed_by_all(field: str) -> None:
    def script(protocol: StepProtocol, rank: int) -> None:
        if rank == 1 and field == "decode_step":
            protocol.clock = protocol.clock.after(StepType.DECODE)
        elif rank == 1 and field == "collectives":
            protocol._count_collectives = lambda: 8
        elif rank == 1 and field == "placement":
            protocol._placement = lambda: 8
        elif rank == 1:
            setattr(protocol, f"_{field}", 9)
        protocol.agree(WANTS, lambda: True)

    for result in gang(2, script):
        assert isinstance(result, LockstepBroken)
        assert field in str(result)


def test_first_ballot_against_second_is_noticed() -> None:
    """MIN of a first and a second ballot completes silently in every library."""

    def script(protocol: StepProtocol, rank: int) -> None:
        if rank == 0:
            protocol.agree(WANTS, lambda: True)  # second ballot follows
            return
        protocol.agree(WANTS, lambda: True)
        protocol.agree(WANTS, lambda: True)

    results = gang(2, script)
    assert isinstance(results[1], LockstepBroken)  # rank 0 has left


def test_missing_rank_raises_on_the_others() -> None:
    def script(protocol: StepProtocol, rank: int) -> None:
        if rank == 2:
            raise ValueError("boom")
        protocol.agree(WANTS, lambda: True)

    first, second, third = gang(3, script)
    assert isinstance(first, LockstepBroken) and isinstance(second, LockstepBroken) and isinstance(third, ValueError)
