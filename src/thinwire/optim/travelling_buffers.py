"""Buffers that are learnt from data but have no gradient (BatchNorm's running statistics).

They are averaged with the rounds, dense, in a flight of their own. A mean that arrives a round late
is not put in place of the newer local values: what the replica differed from the mean when it was
sent is taken off, b = b + (mean - sent), so that the drift since then stays.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from thinwire.optim.flat import Flat
from thinwire.wire.flight import Flight
from thinwire.wire.wire import Wire


class TravellingBuffers:
    def __init__(self, buffers: Iterable[Tensor], wire: Wire) -> None:
        # Counters (BatchNorm's num_batches_tracked) advance alike everywhere and do not travel.
        self._buffers = [b for b in buffers if b.is_floating_point()]
        self._wire = wire
        self._flat = Flat(self._buffers)
        self._sent: Tensor | None = None
        self._flight: Flight | None = None

    def turn(self, *, late: bool) -> None:
        """The end of a round."""
        if not self._buffers:
            return
        self._land()
        self._launch()
        if not late:
            self._land()

    def finish(self) -> None:
        """The mean itself, now that nothing is newer: the same bits on all replicas."""
        if not self._buffers:
            return
        self._land()
        flight = self._wire.mean(self._values())
        mean = flight.wait()
        if flight.finite:
            self._flat.unpack(mean, self._buffers)

    def swap_in_mean(self, wire: Wire) -> Tensor | None:
        """Puts the mean of all replicas in place; returns this one's own values."""
        if not self._buffers:
            return None
        own = self._values()
        self._flat.unpack(wire.mean(own.clone()).wait(), self._buffers)
        return own

    def restore(self, own: Tensor | None) -> None:
        if own is not None:
            self._flat.unpack(own, self._buffers)

    def state(self) -> dict[str, Any]:
        mean = self._flight.wait() if self._flight is not None else None
        return {"sent": self._sent, "mean": mean}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sent, self._flight = state["sent"], None
        if state["mean"] is not None:
            self._flight = Flight(state["mean"], self._wire.account)

    def _launch(self) -> None:
        self._sent = self._values()
        self._flight = self._wire.mean(self._sent.clone())

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None or self._sent is None:
            return
        mean = flight.wait()
        if flight.finite:
            correction = mean.sub_(self._sent)
            for buffer, view in zip(self._buffers, self._flat.views(correction), strict=True):
                buffer.add_(view.to(buffer.dtype))
        self._sent = None

    def _values(self) -> Tensor:
        return self._flat.pack(self._buffers, self._flat.new())
