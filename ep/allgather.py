"""Dispatch by all-gather: every rank gets every token, with its expert ids, and takes what is for its own experts.

A rank hands its tokens over once and the collective spreads them (a ring, a tree, or the network itself), where
`ep.alltoall` sends a copy to each rank. Sizes follow from `begin_step` alone, whatever the routing. Every rank receives
all tokens of the gang, so this is for few tokens, or for so many experts per token that most tokens go everywhere.

All ranks know all expert ids then, so the outputs come back, one row per (token, k) pair, in an all-to-all whose sizes
nobody has to ask for: `ep.alltoall`'s own.
"""

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, Work

from ep.alltoall import AllToAllDispatcher
from ep.dispatch import Setup


class AllGatherDispatcher(AllToAllDispatcher):
    """The collective wants equal shares: they are as large as the largest, and what fills them up is cut off again
    before anybody looks at it."""

    def _whole(self, top_k: int, row_bytes: int) -> bool:
        return True

    def _share(self, records: Tensor) -> tuple[Work, Tensor]:
        most = max(1, *self._num_tokens)
        share = records.new_zeros(most, records.shape[1])
        share[: len(records)] = records
        received = records.new_empty(self.world_size * most, records.shape[1])
        options = AllgatherOptions()
        work = self._enter(b"dispatch", most, lambda: self.group._allgather_base(received, share, options))
        return work, received

    def _collect(self, work: Work, received: Tensor) -> Tensor:
        self._finish(work)
        shares = received.unflatten(0, (self.world_size, -1))
        return torch.cat([share[:count] for share, count in zip(shares, self._num_tokens, strict=True)])


def make(setup: Setup) -> AllGatherDispatcher:
    return AllGatherDispatcher(
        setup.placements, setup.rank, setup.ranks, setup.device, log=setup.log, max_tokens=setup.max_tokens
    )
