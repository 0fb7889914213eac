"""TurnClock: the ground on which contestants take turns, as one worker sees it.

All emulated hosts share one machine, and so one clock and one file system: a turn can begin at the
same moment on all of them, and the kernel's counter of a host's interface tells when its link has
fallen silent.
"""

import time
from pathlib import Path

from thinwire.lab.host import Counters, read_counters
from thinwire.wire import comm_engine as carrier
from thinwire.wire.wire import Wire

_HEADSTART = 0.01  # s, beyond the links' delay, for all ranks to hear of a start
_SILENCE = 4096  # bytes received meanwhile that do not count as traffic: heartbeats, this question


class TurnClock:
    def __init__(self, control: Wire, delay: float) -> None:
        self.control = control
        self._delay = delay  # seconds, one way, jitter included

    @property
    def leader(self) -> bool:
        return self.control.rank == 0

    def start(self) -> float:
        """Returns on all ranks at one moment of the machine's clock, and tells it."""
        # The answer takes the ranks different times to arrive: a ring passes it on.
        ahead = _HEADSTART + 2 * self.control.size * self._delay
        moment = self.control.agree([time.perf_counter()])[0] + ahead
        time.sleep(max(0.0, moment - time.perf_counter()))
        return moment

    def wait_until_quiet(self) -> None:
        """Returns when nothing is left on the links: what was in the air has landed."""
        carrier.settle()
        while self.control.agree([self._heard()])[0] > _SILENCE:
            pass

    def _heard(self) -> float:
        """Bytes received in a time in which anything on its way would have shown up."""
        before = self.counters().rx_bytes
        time.sleep(0.02 + 1.5 * self._delay)
        return float(self.counters().rx_bytes - before)

    def counters(self) -> Counters:
        """This host's interface by the kernel's count; zeros outside of the lab."""
        try:
            return read_counters(Path("/proc/self/net/dev").read_bytes(), self.control.rank)
        except ValueError:
            return Counters(self.control.rank, 0, 0, 0, 0)
