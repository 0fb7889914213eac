"""Schedule: what a stage does and in which order, as data.

With P stages, stage s (from 0) and a lead of l micro-batches per hop,

    K_s = (P - 1 - s) (1 + l)                                   warm-up forwards of stage s

`1f1b`   never flushes: K_s forwards, then one forward and one backward in turn, an update after
         the backward of every k-th micro-batch (k = `accumulate`). The forward of micro-batch i
         uses the newest weights, those after floor((i - K_s) / k) updates.
`2bw`    the same order (PipeDream-2BW), but the micro-batches of update t use the weights after
         max(t - 1, 0) updates, on every stage: w_{t+1} = w_t - step(grad f(w_{t-1})). The delay is
         1 at any depth; it needs k >= P so that no stage waits.
`flush`  synchronous: every update's micro-batches are drained before it, no weights are ever old.

In the drawing, P = 3, l = 0, k = 1; a number is a forward, a number in brackets the backward of the
same micro-batch with the update after it.

    stage 0     0   1   2          (0)  3  (1)  4  (2)  5  (3) ...
    stage 1         0   1   (0) 2  (1)  3  (2)  4  (3)  5  (4) ...
    stage 2             0 (0) 1 (1) 2 (2) 3 (3) 4 (4) 5 (5) ...

The lead hides the network. A micro-batch comes back to stage s after the compute of the stages
behind it and two transfers per hop; with c seconds of compute per micro-batch on each stage and d
seconds per transfer, nobody waits if (1 + l) c >= c + 2 d, that is l >= 2 d / c (`lead_for`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

from thinwire.checks import (
    require_at_least,
    require_choice,
    require_count,
    require_positive,
)

Name = Literal["1f1b", "2bw", "flush"]
NAMES: tuple[str, ...] = get_args(Name)


class Forward(NamedTuple):
    micro: int
    version: int
    """Updates made to the weights this forward uses, counted from the start of the schedule."""


class Backward(NamedTuple):
    micro: int


class Update(NamedTuple):
    update: int


Action = Forward | Backward | Update


@dataclass(frozen=True)
class Schedule:
    """The schedule of one stage."""

    name: Name
    stage: int
    stages: int
    accumulate: int = 1
    """Micro-batches per update."""
    lead: int = 0
    """Micro-batches in flight per hop beyond the one that is computed."""

    def __post_init__(self) -> None:
        require_choice("Schedule", "name", self.name, NAMES)
        stages = require_count("Schedule", "stages", self.stages)
        counts = {
            "stages": stages,
            "stage": require_count("Schedule", "stage", self.stage, least=0, most=stages - 1),
            "accumulate": require_count("Schedule", "accumulate", self.accumulate),
            "lead": require_count("Schedule", "lead", self.lead, least=0),
        }
        for key, value in counts.items():
            object.__setattr__(self, key, value)
        least = max(self.stages, self._warmup(0))
        if self.name == "2bw" and self.accumulate < least:
            raise ValueError(
                f"schedule '2bw' keeps two versions only if accumulate >= {least} with "
                f"{self.stages} stages and lead={self.lead}, got accumulate={self.accumulate}"
            )

    def _warmup(self, stage: int) -> int:
        return (self.stages - 1 - stage) * (1 + self.lead)

    @property
    def warmup(self) -> int:
        """K_s."""
        return self._warmup(self.stage)

    @property
    def held(self) -> int:
        """Most micro-batches whose forward has run and whose backward has not."""
        limit = self.accumulate if self.name == "flush" else math.inf
        return int(min(self.warmup + 1, limit))

    @property
    def copies(self) -> int:
        """Most versions of the weights kept beside the newest."""
        if self.name == "flush":
            return 0
        if self.name == "2bw":
            return 2 if self.warmup else 1
        return math.ceil(self.warmup / self.accumulate) + 1 if self.warmup else 0

    @property
    def lag(self) -> float:
        """Updates between the weights of a gradient and those it is applied to, on average."""
        if self.name == "flush":
            return 0.0
        return 1.0 if self.name == "2bw" else self.warmup / self.accumulate

    @property
    def delay(self) -> int:
        """The lag in whole updates."""
        return math.floor(self.lag + 1 / (2 * self.accumulate))

    def version(self, micro: int) -> int:
        """Updates made to the weights that the forward of this micro-batch uses."""
        update = micro // self.accumulate
        if self.name == "flush":
            return update
        if self.name == "2bw":
            return max(update - 1, 0)
        return max(micro - self.warmup, 0) // self.accumulate

    def actions(self, updates: int | Callable[[], int]) -> Iterator[Action]:
        """What the stage does to make `updates` updates, all of it drained at the end.

        A function is asked again and again; its answer may fall, to `least_end` at that moment.
        """
        wanted = updates if callable(updates) else lambda: updates
        if self.name != "flush":
            yield from self._run(0, wanted)
            return
        update = 0
        while update < wanted():
            yield from self._run(update, partial(int, update + 1))
            update += 1

    def least_end(self, made: int) -> int:
        """The fewest updates a schedule can still end with, once every stage has made `made` of
        them: the micro-batches of the first stage's warm-up are under way."""
        return made if self.name == "flush" else made + math.ceil(self._warmup(0) / self.accumulate)

    def _run(self, first: int, last: Callable[[], int]) -> Iterator[Action]:
        """Updates first..last-1 without a flush in between."""
        micro = first * self.accumulate
        ahead = min(self.warmup, last() * self.accumulate - micro)
        for early in range(micro, micro + ahead):
            yield Forward(early, self.version(early))
        while micro < last() * self.accumulate:
            if micro + ahead < last() * self.accumulate:
                yield Forward(micro + ahead, self.version(micro + ahead))
            yield Backward(micro)
            if (micro + 1) % self.accumulate == 0:
                yield Update(micro // self.accumulate)
            micro += 1


def lead_for(compute: float, transfer: float) -> int:
    """The least lead that hides transfers of `transfer` seconds, one way with their latency, behind
    `compute` seconds per micro-batch of the slowest stage."""
    compute = require_positive("lead_for", "compute", compute)
    transfer = require_at_least("lead_for", "transfer", transfer, 0)
    lead = 2 * transfer / compute
    if not math.isfinite(lead):
        raise ValueError(
            f"lead_for(compute={compute!r}, transfer={transfer!r}): no lead hides such a transfer"
        )
    return math.ceil(lead)
