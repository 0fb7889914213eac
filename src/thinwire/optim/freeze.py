"""FreezeRule: when the variance of the gradients has settled enough to be kept for good.

||v||_1 is a running mean of s_t = ||g_t||², so the rule needs only that number of every step. It
is the mean gradient's, the same bits on all ranks: they all decide alike, at the same step, and
nothing is sent for it.

    w = min(1/(1-b2), t/4) steps ;   A = mean of s over the last w steps,  B = over the w before
    settled:  |A - B| <= TOLERANCE max(A, B) + the standard error of A - B

freezes at the first step t that has the learning rate's warm-up behind it twice over, at least
LEAST steps, and is settled. The published rule compares ||v|| over 1/(1-b2) steps, which at
b2 = .999 a run of 500 steps never sees, and which the zeros that v starts from hold off; a window
that grows with the run asks the same question at any length, and the standard error keeps a short,
noisy window from asking for more than it can show.
"""

import math
from collections import deque
from typing import Any

LEAST = 50
TOLERANCE = 0.2
SHARE = 4  # the windows are 1/4 of the steps so far


class FreezeRule:
    def __init__(self, beta2: float) -> None:
        self._longest = max(8, round(1 / (1 - beta2))) if beta2 < 1 else 8
        self._squares: deque[float] = deque(maxlen=2 * self._longest)
        self.step = 0
        self.peak = 0  # the last step at which the learning rate has risen
        self._lr = 0.0

    def observe(self, square: float, lr: float) -> bool:
        """After every dense step: the mean gradient's squared norm; whether to freeze now."""
        self.step += 1
        if lr > self._lr:
            self.peak = self.step
        self._lr = lr
        self._squares.append(square)
        return self.step >= max(LEAST, 2 * self.peak) and self.settled()

    def settled(self) -> bool:
        width = min(self._longest, self.step // SHARE, len(self._squares) // 2)
        if width < 2:
            return False
        values = list(self._squares)
        new, before = _moments(values[-width:]), _moments(values[-2 * width : -width])
        noise = math.sqrt((new[1] + before[1]) / width)
        return abs(new[0] - before[0]) <= TOLERANCE * max(new[0], before[0]) + noise

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "peak": self.peak,
            "lr": self._lr,
            "squares": list(self._squares),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.peak, self._lr = state["step"], state["peak"], state["lr"]
        self._squares = deque(state["squares"], maxlen=self._squares.maxlen)


def _moments(values: list[float]) -> tuple[float, float]:
    """Mean and variance."""
    mean = sum(values) / len(values)
    return mean, sum((v - mean) ** 2 for v in values) / (len(values) - 1)
