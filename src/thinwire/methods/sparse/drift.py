"""Drift: how far a replica's weights move while a mean of them is in the air.

A mean that was lag steps away is put in place of newer weights. What those have learnt meanwhile,
their drift, is estimated by an exponential average over the landings of each coordinate. It is kept
per step, so that a lag which varies is corrected by the lag that occurred:

    rate <- (1 - lam) rate + lam drift / lag            drift stands for lag * rate

With a constant lag this is the average of the drifts themselves. rate starts at 0.

lam falls over the run, when its length is known: START for the first 1/30 of it, then along half a
cosine to an end. Early on the direction of training changes fast and only recent drift tells; later
the noise of single steps is most of a drift, and a longer average has less of it.

[Note: the end of lam] It was published as 0.01, for 30000 steps in which each coordinate lands 1500
times: an average over the last 100 landings, a fifteenth of the run. A shorter run has no hundred
landings to average over - in one of 480 steps a coordinate lands 24 times - and an average that
reaches back into the warm-up corrects by a drift that is long over. So the end is 15 / landings
where that is more, and lam stays at START in runs of fewer than 30 landings.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.flat import Flat
from thinwire.methods.sparse.subsets import Subset

START, END = 0.5, 0.01
HELD = 1 / 30  # of the run; published: 1000 of 30000 rounds
REMEMBERED = 1 / 15  # of the run, in the end


def scaled_end(landings: float) -> float:
    """See [Note: the end of lam]."""
    return min(START, max(END, 1 / (REMEMBERED * max(1.0, landings))))


def ema_weight(progress: float, start: float, end: float) -> float:
    """lam at this share of the run."""
    if progress <= HELD:
        return start
    turn = math.pi * (min(progress, 1.0) - HELD) / (1 - HELD)
    return end + (start - end) * 0.5 * (1 + math.cos(turn))


class DriftEstimate:
    """The average drift per step, one value per parameter."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        flat = Flat(tensors)
        self.rate = flat.new().zero_()
        self._views = flat.views(self.rate)

    def update(self, subset: Subset, drift: Tensor, lag: int, weight: float) -> Tensor:
        """Takes in the drift of a subset over `lag` >= 1 steps; returns what to use for it."""
        rate = subset.read(self._views, torch.empty_like(drift))
        rate.lerp_(drift.div_(lag), weight)
        subset.write(rate, self._views)
        return rate.mul_(lag)
