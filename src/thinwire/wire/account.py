"""Account: what a wire sent, and how long anybody waited for it.

*exposed* seconds are those a caller spent inside `Flight.wait()`; *hidden* seconds are the rest of
a flight's time in the air, which passed behind compute. Bytes are payload bytes that this rank
hands to its network for other ranks, by the algorithm the collective really runs. They are counted
when a flight is launched, by the caller's own thread: what has been counted by a step depends on
the program alone, and not on what the network has carried by then.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from thinwire.checks import require_at_least, require_count
from thinwire.text import format_bytes


@dataclass(frozen=True)
class Landing:
    """One flight's course, on time.perf_counter's clock."""

    launched: float
    arrived: float
    asked: float
    """When somebody began to wait for it."""
    landed: float


@dataclass
class Account:
    """Totals since the wire was made. Each field is read by the metrics under its own name.

    [Note: pauses] Where methods take turns on one machine (thinwire compare), a method's clock
    stands between two of its turns, but what it has in the air flies on. A flight that arrives d
    seconds into a pause is not to be had before d seconds after it: so the method pays what it
    would have paid without the pause.
    """

    bytes: int = 0
    """Payload bytes this rank sent to others."""
    transfers: int = 0
    """Flights launched."""
    exposed: float = 0.0
    """Seconds spent waiting for flights."""
    hidden: float = 0.0
    """Seconds of flight that passed behind compute."""
    lag: int = 0
    """Most steps any flight was in the air."""
    skipped: int = 0
    """Steps that this replica, or with it every replica, left out because something was not finite;
    with local updates and sparse averaging also the rounds that were dropped."""
    steps: int = 0
    """Optimizer steps counted by `tick`."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    # lanes and gloo's threads write here as well as the training loop
    _paused: float = field(default=0.0, repr=False, compare=False)  # clock at the latest pause
    _resumed: float = field(default=0.0, repr=False, compare=False)  # and at its end
    _listener: Callable[[Landing], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in ("bytes", "transfers", "lag", "skipped", "steps"):
            setattr(self, key, require_count("Account", key, getattr(self, key), least=0))
        for key in ("exposed", "hidden"):
            setattr(self, key, require_at_least("Account", key, getattr(self, key), 0))

    def tick(self) -> None:
        """Counts one optimizer step: the unit in which a flight's lag is told."""
        self.steps += 1

    def launched(self, count: int = 0) -> None:
        """A transfer that sends so many bytes was asked for, on the caller's thread: all ranks
        count alike, whenever it lands."""
        with self._lock:
            self.transfers += 1
            self.bytes += count

    def sent(self, count: int) -> None:
        """Bytes of a transfer that somebody else (PyTorch) has made."""
        with self._lock:
            self.bytes += count

    def landed(
        self, *, flown: float, waited: float, lag: int, launched: float | None = None
    ) -> None:
        with self._lock:
            self.exposed += waited
            self.hidden += max(0.0, flown - waited)
            self.lag = max(self.lag, lag)
        if self._listener is not None and launched is not None:
            now = time.perf_counter()
            self._listener(Landing(launched, launched + flown, now - waited, now))

    def pause(self) -> None:
        """Stops the method's clock, see [Note: pauses]."""
        self._paused, self._resumed = time.perf_counter(), math.inf

    def resume(self) -> None:
        """Lets it run again; all that was in the air must have arrived by now."""
        self._resumed = time.perf_counter()

    def ready_at(self, arrived: float) -> float:
        """When a flight that has arrived at this moment is to be had; at once while the pause
        lasts, in which nobody asks but a checkpoint."""
        if self._paused <= arrived < self._resumed < math.inf:
            return self._resumed + (arrived - self._paused)
        return arrived

    def listen(self, listener: Callable[[Landing], None] | None) -> None:
        """Hands the course of every flight to `listener` when it lands, on the landing thread."""
        self._listener = listener

    def snapshot(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _TOTALS}

    def restore(self, totals: dict[str, float]) -> None:
        """Takes up the totals of a checkpointed run."""
        for name in _TOTALS:
            value = totals[name]
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} {value!r:.40} in an account")
            setattr(self, name, value)

    def __str__(self) -> str:
        text = (
            f"{format_bytes(self.bytes)} sent in {self.transfers} transfers, "
            f"{self.exposed:.1f} s exposed, {self.hidden:.1f} s hidden"
        )
        return text + (f", {self.skipped} steps skipped" if self.skipped else "")


_TOTALS = tuple(f.name for f in fields(Account) if not f.name.startswith("_"))
