"""Route: the way that buckets take to the other ranks.

`Direct` sends them over one wire. `TwoLevels` is for nodes whose ranks have a fast link to each
other: gradients are averaged densely inside a node first. Each of its L ranks then sends its own
Lth of a bucket between the nodes, to the ranks that have the same part there, and the parts meet
again inside. The traffic between nodes divides by L. Part r of a bucket is the rth of L equal ones,
the last short or empty. Bucket k-1 is passed on between the nodes when bucket k is launched, so
both wires keep one order on all ranks.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from thinwire.methods.overlap.bucket import Bucket
from thinwire.wire.flight import Flight
from thinwire.wire.wire import Wire

B = TypeVar("B", bound=Bucket)
Send = Callable[[B, Tensor], None]


class Route(Protocol):
    """What the reducer and the engines ask of the way to the others."""

    def send(self, bucket: B, send: Send[B]) -> None:
        """Calls `send(bucket, part)` when the part that this rank sends is there."""

    def before_landing(self, buckets: Sequence[Bucket]) -> None:
        """Brings what is under way to where each bucket's flight is that of the whole buffer."""

    def union(self, flags: Sequence[bool]) -> Flight:
        """The flags that any rank has set."""

    def agree_on_start(self, order: str, used: list[float]) -> tuple[str, list[float]]:
        """Rank 0's order, and the largest of everybody's numbers."""

    def part(self, whole: Tensor) -> Tensor:
        """Which of a bucket's values this rank sends; it shares the memory."""

    def whole(self, flat: Tensor) -> Tensor:
        """Everybody's part of `flat`, in place; a collective."""

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank that sends a part of the same buckets."""

    @property
    def layout(self) -> int | list[int]:
        """The numbers of ranks, by level."""


class Direct:
    """All ranks on one wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def send(self, bucket: B, send: Send[B]) -> None:
        send(bucket, bucket.buffer)

    def before_landing(self, buckets: Sequence[Bucket]) -> None:
        pass

    def union(self, flags: Sequence[bool]) -> Flight:
        return self._wire.union(flags)

    def agree_on_start(self, order: str, used: list[float]) -> tuple[str, list[float]]:
        return self._wire.gather_bytes(order.encode())[0].decode(), self._wire.agree(used)

    def part(self, whole: Tensor) -> Tensor:
        return whole

    def whole(self, flat: Tensor) -> Tensor:
        return flat

    def any(self, flag: bool) -> bool:
        return flag

    @property
    def layout(self) -> int | list[int]:
        return self._wire.size


class TwoLevels:
    """`inside` connects the ranks of a node, `between` those with the same part in all nodes."""

    def __init__(self, inside: Wire, between: Wire) -> None:
        self.inside, self._between = inside, between
        self._pending: Callable[[], None] | None = None  # waits for the mean inside, and sends

    def send(self, bucket: B, send: Send[B]) -> None:
        flight = bucket.flight = self.inside.mean(bucket.buffer)
        self._pass_on()

        def pending() -> None:
            flight.wait()
            send(bucket, self.part(bucket.buffer))

        self._pending = pending

    def _pass_on(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def forget(self) -> None:
        """What has not been passed on is not sent any more."""
        self._pending = None

    def before_landing(self, buckets: Sequence[Bucket]) -> None:
        """Lands the parts of all buckets, and brings them together on every rank of the node.

        The flight left in a bucket is that of the whole: a part that is not finite is known to all.
        """
        self._pass_on()
        for bucket in buckets:
            assert bucket.flight is not None
            bucket.flight.wait()
            bucket.flight = self._gather(bucket.buffer)
        for bucket in buckets:
            assert bucket.flight is not None
            bucket.flight.wait()

    def union(self, flags: Sequence[bool]) -> Flight:
        self._pass_on()
        return self._between.union(self.inside.union(flags).wait().bool().tolist())

    def agree_on_start(self, order: str, used: list[float]) -> tuple[str, list[float]]:
        order = self.inside.gather_bytes(order.encode())[0].decode()
        used = self.inside.agree(used)
        return self._between.gather_bytes(order.encode())[0].decode(), self._between.agree(used)

    def part(self, whole: Tensor) -> Tensor:
        width = self._width(whole.numel())
        start = min(whole.numel(), self.inside.rank * width)
        return whole[start : start + width]

    def whole(self, flat: Tensor) -> Tensor:
        return self._gather(flat).wait()

    def any(self, flag: bool) -> bool:
        return bool(self.inside.agree([float(flag)])[0])  # a rank's part may be empty

    @property
    def layout(self) -> int | list[int]:
        return [self._between.size, self.inside.size]

    def _gather(self, flat: Tensor) -> Flight:
        return self.inside.gather(flat, self._width(flat.numel()))

    def _width(self, numel: int) -> int:
        return -(-numel // self.inside.size)
