"""Pulse: a few bytes every few steps by which the workers stay one run.

Ranks must leave the loop after the same step, but a signal reaches each of them at another one. At
every PERIOD-th step a worker launches a small reduction - "I was asked to stop", "my loss is not
finite" - and lands the one launched a period ago. The answer is the same on all ranks at the same
step, nobody waits for it unless somebody is a whole period behind, and a worker that is lost or
stuck is noticed here even by methods that send nothing else.
"""

import math

from thinwire.errors import NonFinite
from thinwire.wire.flight import Flight
from thinwire.wire.wire import Wire

PERIOD = 4
# Steps in a row with a loss that is not finite, after which a replica will not come back.
MOST_BAD_STEPS = 8


class Pulse:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._flight: Flight | None = None
        self._bad = 0
        self.stop_asked = False
        """Set by this rank's signal handler."""

    def beat(self, step: int, loss: float) -> bool:
        """After step `step`; whether all ranks stop now. Raises when a replica is beyond help."""
        self._bad = 0 if math.isfinite(loss) else self._bad + 1
        if step % PERIOD:
            return False
        stop = self._land()
        flags = [0.0] * (1 + self._wire.size)
        flags[0] = float(self.stop_asked)
        flags[1 + self._wire.rank] = float(self._bad)
        self._flight = self._wire.poll(flags)
        return stop

    def end(self) -> None:
        """Lands the last flight."""
        self._land()
        self._flight = None

    def _land(self) -> bool:
        if self._flight is None:
            return False
        stop, *bad = self._flight.wait().tolist()
        lost = [rank for rank, count in enumerate(bad) if count >= MOST_BAD_STEPS]
        if lost:
            names = ", ".join(f"worker {rank}" for rank in lost)
            raise NonFinite(
                f"the loss of {names} has not been finite for {MOST_BAD_STEPS} steps or more; "
                "lower --lr, raise --warmup, or look at that worker's data"
            )
        return bool(stop)
