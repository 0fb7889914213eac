"""Account: what a wire sent, and how long anybody waited for it.

*exposed* seconds are those a caller spent inside `Flight.wait()`; *hidden* seconds are the rest of
a flight's time in the air, which passed behind compute. Bytes are payload bytes that this rank
handed to its network for other ranks, by the algorithm the collective really runs.
"""

import threading
from dataclasses import dataclass, field, fields


def format_bytes(count: float) -> str:
    """1234567 -> '1.23 MB' (decimal units, as links are rated)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


@dataclass
class Account:
    """Totals since the wire was made. Each field is read by the metrics under its own name."""

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
    """Steps dropped on every replica because one of them was not finite."""
    steps: int = 0
    """Optimizer steps counted by `tick`."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    # lanes and gloo's threads write here as well as the training loop

    def tick(self) -> None:
        """Counts one optimizer step: the unit in which a flight's lag is told."""
        self.steps += 1

    def launched(self) -> None:
        """A transfer was asked for, on the caller's thread: all ranks count alike."""
        with self._lock:
            self.transfers += 1

    def sent(self, count: int) -> None:
        """Bytes handed to the network, on whichever thread did it."""
        with self._lock:
            self.bytes += count

    def landed(self, *, flown: float, waited: float, lag: int) -> None:
        with self._lock:
            self.exposed += waited
            self.hidden += max(0.0, flown - waited)
            self.lag = max(self.lag, lag)

    def snapshot(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _TOTALS}

    def restore(self, totals: dict[str, float]) -> None:
        """Takes up the totals of a checkpointed run."""
        for name in _TOTALS:
            setattr(self, name, totals[name])

    def __str__(self) -> str:
        text = (
            f"{format_bytes(self.bytes)} sent in {self.transfers} transfers, "
            f"{self.exposed:.1f} s exposed, {self.hidden:.1f} s hidden"
        )
        return text + (f", {self.skipped} steps skipped" if self.skipped else "")


_TOTALS = tuple(f.name for f in fields(Account) if not f.name.startswith("_"))
