"""MeanNorm: the norm of the mean gradient, also at steps where nobody holds that gradient.

    ||mean_i g_i||² ~ rho mean_i ||g_i||² ;    rho = sum ||mean_i g_i||² / sum mean_i ||g_i||²

over the last dense steps, at which both are known. mean_i ||g_i||² is one number in a reduction of
its own. rho is 1/n where gradients are noise and 1 where those of all n ranks are alike: without it
a clip that leaves dense steps alone would shorten most of those in one bit, for a rank's gradient
is of a smaller batch.
"""

import math
from collections import deque
from typing import Any

from torch import Tensor

from thinwire.wire.flight import Flight
from thinwire.wire.wire import Wire

WINDOW = 50  # dense steps: squared norms scatter by a factor of two


class MeanNorm:
    """Among the ranks of a wire, and of `inside`, the node's, if the wire goes between nodes."""

    def __init__(self, wire: Wire, inside: Wire | None) -> None:
        self._wire, self._inside = wire, inside
        self._dense: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def spread(self, square: float) -> float:
        """mean_i ||g_i||², from this rank's ||g_i||²; at once."""
        total, count = square, self._wire.size
        if self._inside is not None:
            total = self._inside.agree([total], "sum")[0]
            count *= self._inside.size
        return self._wire.agree([total], "sum")[0] / count

    def poll(self, square: float) -> Flight:
        """The same without waiting, where there are no nodes; see `polled`."""
        return self._wire.poll([square], "sum")

    def polled(self, answer: Tensor) -> float:
        """The norm by what a poll has brought."""
        return self.estimate(float(answer[0]) / self._wire.size)

    def estimate(self, spread: float) -> float:
        square = spread * self.rho
        return math.sqrt(square) if square >= 0 else math.nan

    def observe(self, square: float, spread: float) -> None:
        """Of a dense step: ||mean_i g_i||² and mean_i ||g_i||²."""
        self._dense.append((square, spread))

    @property
    def rho(self) -> float:
        """1 where nothing is known: then a norm is never taken for smaller than it is."""
        squares, spreads = (sum(pair[i] for pair in self._dense) for i in range(2))
        return min(1.0, squares / spreads) if spreads > 0 else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"dense": [list(pair) for pair in self._dense]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dense = deque(((a, b) for a, b in state["dense"]), maxlen=WINDOW)


def shortening(norm: float, clip: float | None) -> float:
    """The factor on a gradient of this norm. One that is not finite scales nothing: all ranks will
    find what they send so, and skip the step."""
    return clip / norm if clip is not None and clip < norm < math.inf else 1.0
