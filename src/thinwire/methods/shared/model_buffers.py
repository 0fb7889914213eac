"""Buffers that are learnt from data but have no gradient (BatchNorm's running statistics).

They are averaged with the rounds, dense, in a flight of their own. A mean that arrives a round late
is not put in place of the newer local values: what the replica differed from the mean when it was
sent is taken off, b = b + (mean - sent), so that the drift since then stays.

A batch that is not finite leaves statistics that never are again. Such a replica sends zeros with a
weight of zero - one more value in the payload - so that the mean is that of the others, and takes
it over when it lands.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.flat import Flat, local_part
from thinwire.methods.shared.finite import finite_means
from thinwire.methods.shared.shards import Shards
from thinwire.wire.flight import Flight, all_finite
from thinwire.wire.wire import Wire


class ModelBuffers:
    def __init__(self, buffers: Iterable[Tensor], wire: Wire) -> None:
        # Counters (BatchNorm's num_batches_tracked) advance alike everywhere and do not travel.
        self._buffers = [b for b in buffers if b.is_floating_point() or b.is_complex()]
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
        self._flat.unpack(self._mean(self._wire, self._values()), self._buffers)

    def swap_in_mean(self, wire: Wire) -> Tensor | None:
        """Puts the mean of all replicas in place; returns this one's own values."""
        if not self._buffers:
            return None
        own = self._values()
        self._flat.unpack(self._mean(wire, own), self._buffers)
        return own

    def restore(self, own: Tensor | None) -> None:
        if own is not None:
            self._flat.unpack(own, self._buffers)

    def state(self) -> dict[str, Any]:
        mean = self._flight.wait() if self._flight is not None else None
        return {"sent": self._sent, "mean": mean}

    def load_state(self, state: dict[str, Any]) -> None:
        """Into memory of its own: landing works in place."""
        self._abandon()
        self._sent = self._loaded(state["sent"], 0)
        mean = state["mean"]
        if mean is not None and mean.numel() == self._flat.numel:  # saved before it had a weight
            mean = torch.cat([mean, mean.new_ones(1)])
        mean = self._loaded(mean, 1)
        if mean is not None:
            self._flight = Flight(mean, self._wire.account)

    def _loaded(self, saved: Tensor | None, more: int) -> Tensor | None:
        if saved is None:
            return None
        if saved.numel() != self._flat.numel + more:
            raise ValueError(
                f"the saved state has {saved.numel() - more} values of travelling buffers, the "
                f"buffers given here {self._flat.numel}: it was saved with others"
            )
        return torch.empty_like(saved, dtype=self._flat.dtype, device=self._flat.device).copy_(
            saved
        )

    def _abandon(self) -> None:
        """All ranks load at the same point: what is in the air can be waited for. It has memory of
        its own; a wire that broke says so again when it is used next."""
        flight, self._flight = self._flight, None
        if flight is not None:
            with suppress(ThinwireError, RuntimeError):
                flight.wait()

    def _launch(self) -> None:
        self._sent = self._values()
        whole = all_finite(self._sent)
        weighted = self._sent.new_zeros(self._flat.numel + 1)
        if whole:
            weighted[:-1] = self._sent
            weighted[-1] = 1
        self._flight = self._wire.mean(weighted)

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None or self._sent is None:
            return
        weighted = flight.wait()
        sent, self._sent = self._sent, None
        share = float(weighted[-1])  # of the replicas that were finite
        if not flight.finite or share == 0:
            return
        mean = weighted[:-1].div_(share)
        if not all_finite(sent):
            self._flat.unpack(mean, self._buffers)
            return
        for buffer, view in zip(self._buffers, self._flat.views(mean.sub_(sent)), strict=True):
            part = local_part(buffer)
            part.add_(view.to(part.device, part.dtype))

    def _mean(self, wire: Wire, own: Tensor) -> Tensor:
        return finite_means(wire, [own], Shards([]), f"{self._wire.name}: the model's buffers")[0]

    def _values(self) -> Tensor:
        return self._flat.pack(self._buffers, self._flat.new())
