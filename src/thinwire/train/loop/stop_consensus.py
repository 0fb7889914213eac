"""StopConsensus: a small all-reduce every few steps so that all workers stop at the same step.

Ranks must leave the loop after the same step, but a signal reaches each of them at another one.
Every few steps (a period) a worker launches a small reduction - "I was asked to stop", "my loss is
not finite" - and lands the one launched a period ago. The answer is the same on all ranks at the
same step, nobody waits for it unless somebody is a whole period behind, and a worker that is lost
or stuck is noticed here even by methods that send nothing else.
"""

import math
import signal
from types import FrameType

from thinwire.errors import NonFinite
from thinwire.wire.flight import Flight
from thinwire.wire.wire import Wire

PERIOD = 4
# Steps in a row with a loss that is not finite, after which a replica will not come back.
MOST_BAD_STEPS = 8


class StopConsensus:
    def __init__(self, wire: Wire, period: int = PERIOD) -> None:
        """A longer `period` is for replicas that may be further apart than one of ours."""
        self._wire, self._period = wire, period
        self._flight: Flight | None = None
        self._bad_losses = 0  # in a row, like the next
        self._bad_steps = 0
        self.stop_asked = 0
        """The signal that asked this rank to stop, set by its handler."""

    def beat(self, step: int, loss: float, norm: float) -> int:
        """After step `step`, of which these are the loss and the gradient's norm.

        The signal for which all ranks stop now, or 0. Raises when a replica is beyond help.
        """
        self._bad_losses = 0 if math.isfinite(loss) else self._bad_losses + 1
        self._bad_steps = 0 if math.isfinite(norm) else self._bad_steps + 1
        if step % self._period:
            return 0
        stop = self._land()
        flags = [0.0] * (2 + self._wire.size)
        flags[:2] = [float(self.stop_asked), float(self._bad_steps)]
        flags[2 + self._wire.rank] = float(self._bad_losses)
        self._flight = self._wire.poll(flags)
        return stop

    def end(self) -> None:
        """Lands the last flight."""
        self._land()
        self._flight = None

    def _land(self) -> int:
        if self._flight is None:
            return 0
        stop, skipped, *losses = self._flight.wait().tolist()
        lost = [rank for rank, count in enumerate(losses) if count >= MOST_BAD_STEPS]
        if lost:
            names = ", ".join(f"worker {rank}" for rank in lost)
            raise NonFinite(
                f"the loss of {names} has not been finite for {MOST_BAD_STEPS} steps or more; "
                "lower --lr, raise --warmup, or look at that worker's data"
            )
        if skipped >= MOST_BAD_STEPS:
            raise NonFinite(
                f"the gradients have not been finite for {MOST_BAD_STEPS} steps or more, though "
                "every worker's loss is; lower --lr or raise --warmup"
            )
        return int(stop)


def stop_on_signals(pulse: StopConsensus, *, alone: bool) -> None:
    """SIGTERM and Ctrl-C end the run at a step all ranks agree on, with a checkpoint.

    A second one ends it at once. Among others the kernel sees to that, for a worker that waits for
    a peer inside of torch runs no handler; alone, Python can still tidy up the terminal.
    """
    again = signal.default_int_handler if alone else signal.SIG_DFL

    def ask(signum: int, frame: FrameType | None) -> None:
        pulse.stop_asked = signum
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, again)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
