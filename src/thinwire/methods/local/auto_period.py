"""AutoPeriod: the shortest round that hides a flight, from a measurement of both.

A flight of T seconds is hidden if every * t_step >= T. After two steps (the first ones are slow) a
payload of the real size is sent while the next steps run; at step PROBE_STEPS it is landed, and

    every = max(8, ceil(1.2 T / t_step))        t_step: the median step

is agreed on as the largest over the ranks.
"""

import logging
import math
import statistics
import time

import torch

from thinwire.errors import UsageError
from thinwire.wire.codecs import Codec, Feedback
from thinwire.wire.flight import Flight
from thinwire.wire.wire import Wire

LAUNCH_STEP = 2
PROBE_STEPS = 8
SHORTEST = 8
HEADROOM = 1.2

log = logging.getLogger("thinwire")


class AutoPeriod:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._clock: list[float] = []
        self._flight: Flight | None = None

    def step(self, codec: Codec | Feedback, numel: int, device: torch.device) -> int | None:
        """After each step; the period once it is known."""
        self._clock.append(time.perf_counter())
        if len(self._clock) == LAUNCH_STEP:
            fresh = codec.fresh() if isinstance(codec, Feedback) else codec
            self._flight = self._wire.mean(torch.zeros(numel, device=device), fresh)
        if len(self._clock) < PROBE_STEPS:
            return None
        return self._decide()

    def _decide(self) -> int:
        assert self._flight is not None
        steps = [b - a for a, b in zip(self._clock, self._clock[1:], strict=False)]
        self._flight.wait()
        flown, step = self._flight.seconds, statistics.median(steps)
        own = max(SHORTEST, math.ceil(HEADROOM * flown / step))
        longest = self._wire.agree([own])[0]
        if not SHORTEST <= longest < 2**31:
            raise UsageError(f"every=auto: a rank asks for rounds of {longest} steps; set every=")
        period = int(longest)
        if self._wire.rank == 0:
            log.info(
                "every=auto: a step takes %.3f s and a flight %.3f s here; rounds of %d steps",
                step,
                flown,
                period,
            )
        return period
