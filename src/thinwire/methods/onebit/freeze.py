"""FreezeRule: when the variance of the gradients has settled enough to be kept for good.

||v||_1 is a running mean of s_t = ||g_t||², so the rule needs only that number of every step. It
is the mean gradient's before clipping, the same bits on all ranks: they all decide alike, at the
same step, and nothing is sent for it.

    w = min(1/(1-b2), t/4) ;   A = median of s over the last w steps,  B = over the w before those
    settled:   A >= (1 - tolerance) B ,   tolerance = max(0.04, 2 / sqrt(w))

The variance is frozen at the first step t >= max(160, 1.5 x the learning rate's warm-up) at which
it has settled. The published rule asks for a fall of at most 4 % over 1/(1-b2) steps. At b2 = .999
a run of 500 steps never has that many, and v, which starts from zeros, would hide the answer. Here
the window grows with the run up to that length, and the tolerance is what the noise of w gradients
leaves visible, down to the published 4 %. Medians, because one bad batch weighs as much as a
hundred others in a mean of squares.

0/1 Adam sees a dense gradient at its refreshes only. Windows are in steps all the same and hold the
refreshes in them; the tolerance goes by their number.
"""

import math
import statistics
from bisect import bisect_right
from collections import deque
from itertools import islice
from typing import Any

LEAST = 160
SHARE = 4  # a window is this part of the steps so far
TOLERANCE = 0.04
NOISE = 2.0
AFTER_WARMUP = 1.5


class FreezeRule:
    def __init__(self, beta2: float) -> None:
        self._longest = max(LEAST // SHARE, round(1 / (1 - beta2)))
        self._squares: deque[float] = deque(maxlen=2 * self._longest)
        self._seen_at: deque[int] = deque(maxlen=2 * self._longest)  # the step of each of them
        self.step = 0
        self.peak = 0
        """The last step at which the learning rate has risen."""
        self._lr = 0.0

    def observe(self, square: float, lr: float, step: int | None = None) -> bool:
        """After every dense step: the mean gradient's squared norm; whether to freeze now."""
        self.step = self.step + 1 if step is None else step
        if lr > self._lr:
            self.peak = self.step
        self._lr = lr
        self._squares.append(square)
        self._seen_at.append(self.step)
        return self.step >= max(LEAST, AFTER_WARMUP * self.peak) and self.settled()

    def settled(self) -> bool:
        width = min(self._longest, self.step // SHARE)
        first, middle = (bisect_right(self._seen_at, self.step - k * width) for k in (2, 1))
        before = list(islice(self._squares, first, middle))
        new = list(islice(self._squares, middle, None))
        if not new or not before:
            return False
        tolerance = max(TOLERANCE, NOISE / math.sqrt(min(len(new), len(before))))
        return statistics.median(new) >= (1 - tolerance) * statistics.median(before)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "peak": self.peak,
            "lr": self._lr,
            "squares": list(self._squares),
            "seen_at": list(self._seen_at),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.peak, self._lr = state["step"], state["peak"], state["lr"]
        squares = state["squares"]
        every_step = range(self.step - len(squares) + 1, self.step + 1)  # in states without steps
        self._squares = deque(squares, maxlen=self._squares.maxlen)
        self._seen_at = deque(state.get("seen_at", every_step), maxlen=self._seen_at.maxlen)
