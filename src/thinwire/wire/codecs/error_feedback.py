"""ErrorFeedback: what a codec loses is kept and added to the next thing sent.

    worker:  z = x + decay * e ;   q = C[z] ;   e' = z - q                    e: one float a value
    owner:   a = mean_i q_i + decay * E ;   Q = C[a] ;   E' = a - Q           E: one float a value
                                                                            of the owner's part
With decay = 1 nothing is ever lost, only late: the sum of all that was returned plus the errors
still kept equals the sum of all that was given. e' and E' replace e and E only when the flight has
landed and its result was finite, so a skipped step leaves no trace.
"""

from typing import Any

import torch
from torch import Tensor

from thinwire.wire.codecs.base import Codec


class ErrorFeedback:
    """Wraps a codec with memory for ONE stream of payloads: make one for each buffer that is sent.

    Args:
        codec: any `Codec`.
        decay: share of the kept error that is used again. Below 1 old errors fade: try 0.95 when
            the loss oscillates with very coarse codecs.
    """

    def __init__(self, codec: Codec, *, decay: float = 1.0) -> None:
        if isinstance(codec, ErrorFeedback):
            raise ValueError("ErrorFeedback(ErrorFeedback(...)): one layer keeps all of the error")
        if not isinstance(codec, Codec):
            raise ValueError(f"ErrorFeedback wraps a codec such as Int8(), got {codec!r}")
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"ErrorFeedback(decay=...) takes a number in [0, 1], got {decay}")
        self.codec = codec
        self.decay = decay
        self.worker = _Memory("worker")
        self.owner = _Memory("owner")
        self._in_the_air = False

    def take_off(self, numel: int, own: int) -> None:
        """A payload of `numel` values is launched, of whose mean this rank owns `own`."""
        if self._in_the_air:
            raise RuntimeError(
                "an ErrorFeedback codec got a second payload while its first is still in the air; "
                "wait for that flight, or make one ErrorFeedback for each buffer that is sent"
            )
        self.worker.require(numel)
        self.owner.require(own)
        self._in_the_air = True

    def touch_down(self) -> None:
        """The flight has been waited for."""
        self._in_the_air = False

    def settle(self, finite: bool) -> None:
        """The flight landed: takes over the new errors, or drops them with the skipped step."""
        self.worker.settle(finite)
        self.owner.settle(finite)

    def state_dict(self) -> dict[str, Any]:
        return {"worker": self.worker.error, "owner": self.owner.error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.worker = _Memory("worker", state["worker"])
        self.owner = _Memory("owner", state["owner"])
        self._in_the_air = False

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec!r}, decay={self.decay})"


class _Memory:
    """The error of one side, and the one that will replace it when the flight has landed."""

    def __init__(self, side: str, error: Tensor | None = None) -> None:
        self._side = side
        self.error = error
        self._next: Tensor | None = None
        self._spare: Tensor | None = None  # memory of the error before: a new one costs page faults

    def encode(self, codec: Codec, x: Tensor, rows: int, part: int, decay: float) -> Tensor:
        """x belongs to the flight, and is overwritten."""
        self.require(x.numel())
        z, self._spare = self._spare, None
        if z is None or z.shape != x.shape or z.device != x.device or z.dtype != x.dtype:
            z = torch.empty_like(x)
        if self.error is None:
            z.copy_(x)
        else:
            self.error = self.error.to(x.device)
            torch.add(x, self.error, alpha=decay, out=z)
        payload = codec.encode(z, rows, part)
        self._next = z.sub_(codec.decode(payload, part, x))
        return payload

    def settle(self, finite: bool) -> None:
        if finite and self._next is not None:
            self.error, self._next = self._next, self.error
        self._spare, self._next = self._next, None

    def require(self, numel: int) -> None:
        if self.error is not None and self.error.numel() != numel:
            raise ValueError(
                f"this ErrorFeedback keeps the {self._side} error of {self.error.numel()} values "
                f"and was given {numel}; make one ErrorFeedback for each buffer that is sent, and "
                "load one only among as many ranks as saved it"
            )
