"""ErrorFeedback: what a codec loses is kept and added to the next thing sent.

    worker:  z = x + decay * e ;   q = C[z] ;   e' = z - q                    e: one float a value
    owner:   a = mean_i q_i + decay * E ;   Q = C[a] ;   E' = a - Q           E: one float a value
                                                                            of the owner's part
With decay = 1 nothing is ever lost, only late: the sum of all that was returned plus the errors
still kept equals the sum of all that was given. e' and E' replace e and E only when the flight has
landed and its result was finite, so a skipped step leaves no trace.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.checks import refusal, require_kind, require_weight
from thinwire.wire.codecs.base import Codec, Split
from thinwire.wire.codecs.feedback import Feedback, Mean, State, cloned, restore


class ErrorFeedback(Feedback):
    """Wraps a codec with memory for ONE stream of payloads: make one for each buffer that is sent.

    Args:
        codec: any `Codec`.
        decay: share of the kept error that is used again. Below 1 old errors fade: try 0.95 when
            the loss oscillates with very coarse codecs.
    """

    def __init__(self, codec: Codec, *, decay: float = 1.0) -> None:
        _require_codec(codec)
        self.codec = codec
        self.decay = require_weight("ErrorFeedback", "decay", decay)
        self.worker = _Memory("worker")
        self.owner = _Memory("owner")

    def fresh(self, sizes: Sequence[int] | None = None) -> "ErrorFeedback":
        return ErrorFeedback(self.codec, decay=self.decay)

    def require(self, numel: int, size: int, rank: int) -> None:
        self.worker.require(numel)
        self.owner.require(0 if self.gathers(size) else self.split(numel, size).own(rank))

    def gathers(self, size: int) -> bool:
        return self.codec.gathers(size)

    def split(self, numel: int, rows: int) -> Split:
        return self.codec.split(numel, rows)

    def row_bytes(self, split: Split) -> int:
        return self.codec.row_bytes(split)

    def encode_worker(self, x: Tensor, split: Split) -> Tensor:
        return self.worker.encode(self.codec, x, split.rows, split.part, self.decay)

    def encode_owner(self, x: Tensor, split: Split, row: int) -> Tensor:
        return self.owner.encode(self.codec, x, 1, split.part, self.decay)

    def decode(self, payload: Tensor, split: Split, row: int, out: Tensor) -> Tensor:
        return self.codec.decode(payload, split.part, out)

    def settle(self, taken: bool, unused: Sequence[slice] = ()) -> None:
        self.worker.settle(taken, unused)
        self.owner.settle(taken, unused, self._begins)

    def state_dict(self) -> State:
        return {"worker": self.worker.error, "owner": self.owner.error}

    def load_state_dict(self, state: State) -> None:
        # Copies: the memory is written to, and the dictionary is the caller's.
        self.worker = _Memory("worker", cloned(state["worker"]))
        self.owner = _Memory("owner", cloned(state["owner"]))
        self._in_the_air = False

    def portable_state(self, mean: Mean, size: int, rank: int) -> State:
        """The workers' mean error, and the owners' parts as the one buffer they were cut from."""
        error = self.worker.error
        if error is None:
            return {"worker": None, "owner": None}
        whole = torch.zeros_like(error)
        if self.owner.error is not None:
            self._own(whole, size, rank).copy_(self.owner.error)
        return {"worker": mean(error.clone()), "owner": mean(whole).mul_(size)}

    def load_portable_state(self, state: State, size: int, rank: int) -> None:
        worker, owner = state["worker"], state["owner"]
        if owner is not None and self.gathers(size):  # no owners: their error is everybody's
            worker, owner = worker + owner, None
        part = None if owner is None else self._own(owner, size, rank)
        self.load_state_dict({"worker": worker, "owner": part})

    def _own(self, whole: Tensor, size: int, rank: int) -> Tensor:
        """The part of a buffer whose mean this rank computes."""
        split = self.split(whole.numel(), size)
        start = min(whole.numel(), rank * split.part)
        return whole[start : start + split.own(rank)]

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec!r}, decay={self.decay})"


def _require_codec(given: object) -> None:
    if isinstance(given, Feedback):
        wants = "a codec without memory (one layer keeps all of the error)"
        raise refusal("ErrorFeedback", "codec", wants, given)
    require_kind("ErrorFeedback", "codec", given, Codec, "a codec such as Int8()")


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
        self._next = codec.lose(payload, part, z, x)
        return payload

    def settle(self, taken: bool, unused: Sequence[slice], begins: int = 0) -> None:
        if taken and self._next is not None:
            restore(self._next, self.error, unused, begins)
            self.error, self._next = self._next, self.error
        self._spare, self._next = self._next, None

    def require(self, numel: int) -> None:
        if self.error is not None and self.error.numel() != numel:
            raise ValueError(
                f"this ErrorFeedback keeps the {self._side} error of {self.error.numel()} values "
                f"and was given {numel}; make one ErrorFeedback for each buffer that is sent, and "
                "load one only among as many ranks as saved it"
            )
