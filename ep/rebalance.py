"""Moves experts between ranks while the gang serves, a layer at a time, between two steps."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed import ProcessGroup

from ep.balance import Gang, busiest, pack
from ep.config import ExpertConfig
from ep.dispatch import Dispatcher
from ep.moe import MoELayer
from ep.placement import ExpertPlacement
from ep.transfers import Transfer, in_goes, transfers
from ep.weights_exchange import WeightsExchange
from ep.window import Window
from kernels.experts import Experts

log = logging.getLogger(__name__)


@dataclass
class BalanceCounters:
    """Cumulative since the rank's start.

    rounds: times all layers were looked at; placed: layers placed anew; received, received_bytes: experts that came to
    this rank; held_s: seconds that steps have waited for all this; longest_s: the longest such wait.
    """

    rounds: int = 0
    placed: int = 0
    received: int = 0
    received_bytes: int = 0
    held_s: float = 0.0
    longest_s: float = 0.0


@dataclass
class _Move:
    """A layer on its way to a new placement. `staged`: the experts in use and, behind them, those that have arrived;
    `held`: what is in its slots."""

    layer: MoELayer
    target: ExpertPlacement
    goes: deque[list[Transfer]]
    staged: Experts
    held: list[int]


class Rebalancer:
    """Owns the plan of who holds which expert, and carries it out. Everybody's `advance` is called between the same two
    steps, and enters the same collectives.

    A round goes through the layers. Each is judged by what its experts had to do in the last steps, gang-wide, and
    placed anew if that lowers the busiest rank's load by more than `rebalance_threshold`. An `advance` does one piece
    of it: looks at a layer, or moves up to `rebalance_moves_per_step` experts to and from each rank. With the last of
    them the layer changes over; until then tokens go where they went before, and a rank keeps what arrives besides.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        dispatcher: Dispatcher,
        group: ProcessGroup | None,
        config: ExpertConfig,
    ) -> None:
        """layers: in the order of their `.layer`. group: the data group, of all ranks; None for a gang of one, where
        nothing can be moved."""
        self.counters = BalanceCounters()
        self.dispatcher = dispatcher
        self._layers = layers
        self._config = config
        self._exchange = WeightsExchange(group, dispatcher) if group is not None and layers else None
        slots = dispatcher.placements.layers[0].local_counts if layers else ()
        num_groups = layers[0].router.routing.num_groups if layers else 1
        self._gang = Gang(slots, config.ranks_per_node, num_groups)
        self._loads = Window(lambda: dispatcher.counts, config.rebalance_window_steps)
        self._rows = Window(self.rows, config.rebalance_window_steps)
        self._steps = 0  # since the last round
        self._next = 0  # layer to be looked at
        self._move: _Move | None = None
        self._costs = np.zeros(3)  # of the round: busiest rank before and after, and the mean

    @property
    def placement(self) -> int:
        """Digest of where the experts are, for the ballot."""
        return self.dispatcher.placements.digest

    @property
    def wanted(self) -> bool:
        """A round is due, or under way."""
        interval = self._config.rebalance_interval_steps
        if self._exchange is None or not interval:
            return False
        return self._steps >= interval or self._next > 0 or self._move is not None

    def rows(self) -> np.ndarray:
        """int64 [layers]: rows that this rank's experts have computed since the start."""
        return np.array([layer.num_rows for layer in self._layers], np.int64)

    def recent_rows(self) -> list[int]:
        """The same for the steps by which placements are judged."""
        return self._rows.gain().tolist()

    def step_done(self) -> None:
        """A forward has ended."""
        self._steps += 1
        self._loads.step_done()
        self._rows.step_done()

    @torch.inference_mode()
    def advance(self) -> None:
        """One piece of a round. Raises CollectiveFailed."""
        assert self._exchange is not None, "a gang of one has nobody to move experts to"
        started = time.monotonic()
        if self._move is None:
            self._move = self._look_at(self._exchange, self._layers[self._next])
        else:
            self._carry_on(self._exchange, self._move)
            if not self._move.goes:
                self._change_over(self._move)
                self._move = None
        if self._move is None:
            self._next += 1
            if self._next == len(self._layers):
                self._end_round()
        held = time.monotonic() - started
        self.counters.held_s += held
        self.counters.longest_s = max(self.counters.longest_s, held)

    def _look_at(self, exchange: WeightsExchange, layer: MoELayer) -> _Move | None:
        """Plan a layer from everybody's counts. None: it stays as it is."""
        old = self.dispatcher.placements.layers[layer.layer]
        counts = exchange.sum(self._loads.parts(layer.layer))
        new = pack(counts, self._gang, old)
        before, after = busiest(counts, old), busiest(counts, new)
        stays = before - after <= self._config.rebalance_threshold * before
        self._costs += before, before if stays else after, counts.sum() / old.world_size
        if stays:
            return None
        goes = deque(in_goes(transfers(old, new), self._config.rebalance_moves_per_step))
        return _Move(layer, new, goes, layer.experts, list(old.local_experts(self.dispatcher.rank)))

    def _carry_on(self, exchange: WeightsExchange, move: _Move) -> None:
        """The next go of a move. What arrives is laid out for computing at once, so that changing over is quick."""
        arrived = exchange.exchange(move.goes.popleft(), move.staged, move.held)
        move.staged = move.staged.rearranged([*range(len(move.held)), *arrived.values()])
        move.held += arrived
        self.counters.received += len(arrived)
        self.counters.received_bytes += sum(t.nbytes for one in arrived.values() for t in one.tensors())

    def _change_over(self, move: _Move) -> None:
        """From the next forward on, the layer is where it should be."""
        wanted = move.target.local_experts(self.dispatcher.rank)
        if wanted != self.dispatcher.placements.layers[move.layer.layer].local_experts(self.dispatcher.rank):
            move.layer.experts = move.staged.rearranged([move.held.index(expert) for expert in wanted])
        self.dispatcher.place(move.layer.layer, move.target)
        self.counters.placed += 1

    def _end_round(self) -> None:
        before, after = self._costs[:2] / max(self._costs[2], 1)
        if self.dispatcher.rank == 0:
            log.info(
                "looked at the experts of %d layers: the busiest rank has %.2f times the mean load, before %.2f; "
                "placement %d", len(self._layers), after, before, self.dispatcher.placements.epoch,
            )  # fmt: skip
        self.counters.rounds += 1
        self._steps = self._next = 0
        self._costs[:] = 0
