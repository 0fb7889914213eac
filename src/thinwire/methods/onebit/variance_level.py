"""VarianceLevel: how a frozen variance would have gone on.

    dense      s_t = b2 s_(t-1) + (1-b2) ||g_t||²                   what v does, as one number
    frozen     s_t = b2 s_(t-1) + (1-b2) l ,   l = min(mean of ||g||² over the last quarter of the
               dense steps, s at the freeze)
    factor     ŝ_t / ŝ_freeze ,   ŝ_t = s_t / (1 - b2^t)            in [FLOOR, 1]

The gradients of the first steps are many times larger than later ones. Adam's variance forgets them
in 1/(1-b2) steps, and its steps grow meanwhile; a variance frozen before that keeps them, and steps
stay short for the rest of the run. The freeze waits until gradients have settled (freeze.py): from
there on l stands for them, and all ranks find the same factor without a message.
"""

from collections import deque
from itertools import islice
from typing import Any

FLOOR = 0.01
SHARE = 4  # l is the mean over this part of the dense steps


class VarianceLevel:
    def __init__(self, beta2: float) -> None:
        self._b2 = beta2
        self._sum = 0.0  # s
        self._steps = 0  # dense ones
        self._latest: deque[float] = deque(maxlen=max(1, round(1 / (1 - beta2))))

    def observe(self, square: float, beta2: float | None = None) -> None:
        """After a dense step: the squared norm of the gradient that v has seen, and its b2."""
        self._steps += 1
        self._b2 = self._b2 if beta2 is None else beta2
        self._sum = self._b2 * self._sum + (1 - self._b2) * square
        self._latest.append(square)

    def factor(self, step: int) -> float:
        """What the frozen v̂ = v / (1 - b2^t) is worth at a later step."""
        if not self._sum > 0:
            return 1.0
        at_freeze = self._sum / (1 - self._b2**self._steps)
        width = max(1, self._steps // SHARE)
        latest = list(islice(reversed(self._latest), width))
        level = min(sum(latest) / len(latest), at_freeze)
        kept = self._b2 ** (step - self._steps)
        now = (kept * self._sum + (1 - kept) * level) / (1 - self._b2**step)
        return min(1.0, max(FLOOR, now / at_freeze))

    def state_dict(self) -> dict[str, Any]:
        seen = {"sum": self._sum, "steps": self._steps, "latest": list(self._latest)}
        return {"beta2": self._b2} | seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._b2, self._sum, self._steps = state["beta2"], state["sum"], state["steps"]
        self._latest = deque(state["latest"], maxlen=self._latest.maxlen)
