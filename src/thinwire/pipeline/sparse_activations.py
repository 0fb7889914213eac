"""Crossing: activations above a threshold, and their gradients by the way they came.

    y = x where |x| >= τ, at most density * N of the values, 0 elsewhere            to the peer
    dx = dy where x was sent, 0 elsewhere                                             back again

This is DCT for model parallelism, 2010.08899. Both ends know from the forward pass where values
were sent, so that no places travel back. τ is found as in codecs/threshold.py; there is no error
feedback, for what one batch's activations were says nothing of the next one's.

`Cut` uses this for an all-to-all, `AsyncPipeline` between two stages.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.wire.codecs import Codec, Threshold
from thinwire.wire.codecs.selection import is_due, select
from thinwire.wire.codecs.sparse import SparseRow, sparse_row

Choice = tuple[Tensor, Tensor | None]


class ThresholdSelector:
    """A threshold and its refreshes, for one stream of tensors."""

    def __init__(self, refresh: int, steps: int = 0, threshold: float | None = None) -> None:
        self.refresh, self.steps, self.threshold = refresh, steps, threshold

    def choose(self, values: Tensor, form: SparseRow) -> Choice:
        """The places whose values are sent, and what `SparseRow.pack` takes as broken."""
        self.steps += 1
        known = None if is_due(self.steps, self.refresh) else self.threshold
        places, threshold, finite = select(values, form.keep, known)
        if finite and form.keep < values.numel():
            self.threshold = threshold
        broken = None if finite else torch.ones(1, dtype=torch.bool, device=values.device)
        return form.admit(places), broken


@dataclass(frozen=True)
class Activations(Codec):
    """One end of a crossing; what it sends or gets is noted for the way back."""

    density: float
    value_bits: int
    sieve: ThresholdSelector
    noted: "deque[Tensor] | None"
    """Places of the tensors under way, the oldest first; None where gradients go their own way."""

    def payload_bytes(self, part: int) -> int:
        return self._form(part).nbytes

    def encode(self, x: Tensor, rows: int, part: int) -> Tensor:
        form = self._form(part)
        payload = torch.zeros(1, form.nbytes, dtype=torch.uint8, device=x.device)
        places, broken = self.sieve.choose(x, form)
        form.pack(x, places, payload[0], broken=broken)
        self._note(places)
        return payload

    def decode(self, payload: Tensor, part: int, out: Tensor) -> Tensor:
        self._note(self._form(part).unpack(payload[0], out))
        return out

    def _form(self, part: int) -> SparseRow:
        return sparse_row(part, self.density, self.value_bits)

    def _note(self, places: Tensor) -> None:
        if self.noted is not None:
            self.noted.append(places)


@dataclass(frozen=True)
class Gradients(Codec):
    """The way back: values alone, for the places that were noted. Backward passes come in the order
    of the forward passes, so the oldest note is the right one."""

    there: Activations
    density: float
    value_bits: int
    sieve: ThresholdSelector

    def payload_bytes(self, part: int) -> int:
        return self._form(part).nbytes

    def encode(self, x: Tensor, rows: int, part: int) -> Tensor:
        form, places = self._form(part), self._places()
        payload = torch.zeros(1, form.nbytes, dtype=torch.uint8, device=x.device)
        values = x[places]
        chosen, broken = self.sieve.choose(values, form)
        form.pack(values, chosen, payload[0], broken=broken)
        return payload

    def decode(self, payload: Tensor, part: int, out: Tensor) -> Tensor:
        form, places = self._form(part), self._places()
        values = out.new_empty(self.there._form(part).keep)
        form.unpack(payload[0], values)
        out.zero_()[places] = values[: places.numel()]
        return out

    def _places(self) -> Tensor:
        assert self.there.noted is not None
        return self.there.noted.popleft()

    def _form(self, part: int) -> SparseRow:
        return sparse_row(self.there._form(part).keep, self.density, self.value_bits)


@dataclass(frozen=True)
class End:
    """The codecs of one stage towards one neighbour."""

    activations: Codec | None
    gradients: Codec | None


def end_of(codec: Codec | Threshold | None, gradient_codec: Codec | Threshold | None) -> End:
    """A stage makes one for each neighbour: codecs with thresholds remember what passed there."""
    if not isinstance(codec, Threshold):
        return End(codec, _alone(gradient_codec))
    noted: deque[Tensor] = deque()
    there = Activations(codec.density, codec.value_bits, ThresholdSelector(codec.refresh), noted)
    if isinstance(gradient_codec, Codec):
        raise ValueError(
            f"codec={codec!r} sends gradients back where activations were sent: gradient_codec "
            f"takes None or a Threshold, which thins them further, got {gradient_codec!r}"
        )
    second = gradient_codec or Threshold(1.0, codec.refresh, value_bits=codec.value_bits)
    back = Gradients(there, second.density, second.value_bits, ThresholdSelector(second.refresh))
    return End(there, back)


def _alone(codec: Codec | Threshold | None) -> Codec | None:
    """Gradients thresholded by themselves: places travel with them."""
    if isinstance(codec, Threshold):
        return Activations(codec.density, codec.value_bits, ThresholdSelector(codec.refresh), None)
    return codec
