"""How experts' weights and counts travel between ranks: collectives of the data group."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup
from torch.distributed.distributed_c10d import AllToAllOptions, Work

from ep.dispatch import CollectiveFailed, Dispatcher
from ep.transfers import Transfer
from kernels.experts import Experts, ExpertWeights


class WeightsExchange:
    """Enters collectives between two steps, and has the dispatcher count and note them with its own.

    All ranks call the same methods with the same transfers. Raises CollectiveFailed.
    """

    def __init__(self, group: ProcessGroup, dispatcher: Dispatcher) -> None:
        self._group = group
        self._dispatcher = dispatcher
        self._options = AllToAllOptions()

    def sum(self, counts: np.ndarray) -> np.ndarray:
        """Over all ranks. int64, of the same shape everywhere."""
        total = torch.from_numpy(counts).to(self._dispatcher.device)
        entry = self._enter(b"expert loads", len(counts))
        try:
            self._wait(self._group.allreduce([total], AllreduceOptions()), entry)
        except RuntimeError as error:
            raise self._failed(error) from error
        return total.cpu().numpy()

    def exchange(self, moves: Sequence[Transfer], experts: Experts, slots: Sequence[int]) -> dict[int, ExpertWeights]:
        """Send what others lack and receive what this rank does: weights by logical expert, as in the checkpoint.

        slots: logical experts of this rank by slot, those that `experts` has.
        """
        rank, ranks = self._dispatcher.rank, range(self._group.size())
        outgoing = sorted((move for move in moves if move.source == rank), key=lambda move: move.target)
        incoming = sorted((move for move in moves if move.target == rank), key=lambda move: move.source)
        packed = [_to_bytes(experts.weights(slots.index(move.expert))) for move in outgoing]
        template = experts.weights(0) if incoming else None
        size = sum(tensor.nbytes for tensor in template.tensors()) if template else 0
        device = self._dispatcher.device
        sent = torch.stack(packed) if packed else torch.empty(0, size, dtype=torch.uint8, device=device)
        received = torch.empty(len(incoming), size, dtype=torch.uint8, device=device)
        receive_splits = [sum(move.source == other for move in incoming) for other in ranks]
        send_splits = [sum(move.target == other for move in outgoing) for other in ranks]
        entry = self._enter(b"expert weights", len(outgoing))
        try:
            self._wait(self._group.alltoall_base(received, sent, receive_splits, send_splits, self._options), entry)
        except RuntimeError as error:
            raise self._failed(error) from error
        if template is None:
            return {}
        return {move.expert: _from_bytes(row, template) for move, row in zip(incoming, received, strict=True)}

    def _enter(self, kind: bytes, size: int) -> int:
        self._dispatcher.num_collectives += 1
        return self._dispatcher.log.enter(kind, size, self._dispatcher.num_collectives)

    def _wait(self, work: Work, entry: int) -> None:
        work.wait()
        self._dispatcher.log.leave(entry)

    def _failed(self, error: RuntimeError) -> CollectiveFailed:
        rank, number = self._dispatcher.rank, self._dispatcher.num_collectives
        return CollectiveFailed(f"rank {rank}: collective number {number}, for moving experts, failed: {error}")


def _to_bytes(weights: ExpertWeights) -> Tensor:
    """uint8 [N], all tensors behind each other."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in weights.tensors()])


def _from_bytes(data: Tensor, template: ExpertWeights) -> ExpertWeights:
    """Tensors of their own, shaped as the template's."""
    found: dict[str, Tensor] = {}
    start = 0
    for field in fields(template):
        like: Tensor | None = getattr(template, field.name)
        if like is not None:
            part = data[start : start + like.nbytes].clone()
            found[field.name] = part.view(like.dtype).view(like.shape)
            start += like.nbytes
    return ExpertWeights(**found)
