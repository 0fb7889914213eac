"""NormRatio: the norm of the mean gradient at steps where nobody holds that gradient.

    ||mean_i g_i||² ~ rho mean_i ||g_i||² ;    rho = sum ||mean_i g_i||² / sum mean_i ||g_i||²

over the last dense steps, at which both are known. rho is 1/n where gradients are noise and 1 where
those of all n ranks are alike. Without it a clip that leaves dense steps alone would shorten most
of those in one bit, whose gradients come from a small batch each.
"""

from collections import deque
from typing import Any

WINDOW = 50  # dense steps: squared norms scatter by a factor of two


class NormRatio:
    def __init__(self) -> None:
        self._dense: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def observe(self, of_mean: float, mean_of_all: float) -> None:
        """Two squared norms of a dense step: the mean gradient's, and the ranks' own on average."""
        self._dense.append((of_mean, mean_of_all))

    @property
    def rho(self) -> float:
        """1 where nothing is known: then a norm is never taken for smaller than it is."""
        of_means = sum(square for square, _ in self._dense)
        of_all = sum(square for _, square in self._dense)
        return min(1.0, of_means / of_all) if of_all > 0 else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"dense": [list(pair) for pair in self._dense]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dense = deque(map(tuple, state["dense"]), maxlen=WINDOW)
