"""The gated feed-forward networks of a rank's experts over rows grouped by expert."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import PackedLinear


class GroupedExperts:
    """E local experts, each `down(silu(gate(x)) * up(x))`. Owns their weights."""

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]):
        """gate_up[e]: [2 * intermediate, hidden], gate first; down[e]: [hidden, intermediate]."""
        self.gate_up = tuple(gate_up)
        self.down = tuple(down)

    def __len__(self) -> int:
        return len(self.gate_up)

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [R, hidden] sorted by local expert, counts[e] of them for expert e (R = sum) -> [R, hidden].

        Reads only the weights of experts that have rows.
        """
        outputs = []
        start = 0
        for expert, count in enumerate(counts):
            if count:
                hidden = self.gate_up[expert](rows[start : start + count])
                gate, up = hidden.view(count, 2, -1).unbind(1)
                outputs.append(self.down[expert](F.silu(gate).mul_(up)))
                start += count
        if not outputs:
            return torch.empty_like(rows)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
