"""Node: the ranks of one machine, which have a fast link to each other.

Each of the L ranks stands for one part of every bucket towards the other nodes: part r of L equal
ones, the last short or empty.
"""

from collections.abc import Sequence

from torch import Tensor

from thinwire.optim.buckets import Bucket
from thinwire.wire.flight import Flight
from thinwire.wire.wire import Group, Wire


class Node:
    def __init__(self, group: Group, name: str) -> None:
        self.wire = Wire(group, name=name)

    def part(self, flat: Tensor) -> Tensor:
        """This rank's part; it shares the memory."""
        width = self._width(flat.numel())
        start = min(flat.numel(), self.wire.rank * width)
        return flat[start : start + width]

    def reunite(self, buckets: Sequence[Bucket]) -> None:
        """Lands the parts of all buckets, and brings them together on every rank of the node.

        The flight left in a bucket is that of the whole: a part that is not finite is known to all.
        """
        for bucket in buckets:
            assert bucket.flight is not None
            bucket.flight.wait()
            bucket.flight = self._gather(bucket.buffer)
        for bucket in buckets:
            assert bucket.flight is not None
            bucket.flight.wait()

    def whole(self, flat: Tensor) -> Tensor:
        """Everybody's part of `flat`, in place."""
        return self._gather(flat).wait()

    def _gather(self, flat: Tensor) -> Flight:
        return self.wire.gather(flat, self._width(flat.numel()))

    def _width(self, numel: int) -> int:
        return -(-numel // self.wire.size)
