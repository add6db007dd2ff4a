"""Recent history of counters that only rise."""

from collections import deque
from collections.abc import Callable

import numpy as np

PARTS = 16


class Window:
    """What counters have gained in the last steps, in PARTS of as many steps each; the latest part may be shorter.

    Owns copies of the counters, taken as each part ends: PARTS + 1 times their size.
    """

    def __init__(self, read: Callable[[], np.ndarray], num_steps: int) -> None:
        """read: the counters, int64, any shape. num_steps: rounded up to a multiple of PARTS."""
        self._read = read
        self._part = -(-num_steps // PARTS)
        self._steps = 0
        self._marks = deque([read().copy()], PARTS + 1)

    def step_done(self) -> None:
        """One more step has been counted."""
        self._steps += 1
        if self._steps % self._part == 0:
            self._marks.append(self._read().copy())

    def parts(self, row: int) -> np.ndarray:
        """int64 [at most PARTS + 1, ...]: what `row` of the counters has gained in each part, oldest first. As many
        parts on all ranks, as these count the same steps."""
        return np.diff([mark[row] for mark in self._marks] + [self._read()[row]], axis=0)

    def gain(self) -> np.ndarray:
        """What all counters have gained since the window's start."""
        return self._read() - self._marks[0]
