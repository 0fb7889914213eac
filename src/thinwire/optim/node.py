"""Node: the ranks of one machine, which have a fast link to each other.

Each of the L ranks stands for one part of every bucket towards the other nodes: part r of L equal
ones, the last short or empty.
"""

from collections.abc import Sequence

from torch import Tensor

from thinwire.optim.buckets import Bucket
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
            part = self.part(bucket.buffer)
            width = self._width(bucket.buffer.numel())
            whole = bucket.buffer.new_zeros(self.wire.size * width)
            whole[self.wire.rank * width :][: part.numel()] = part
            bucket.flight = self.wire.gather(whole)
        for bucket in buckets:
            assert bucket.flight is not None
            bucket.buffer.copy_(bucket.flight.wait()[: bucket.buffer.numel()])

    def _width(self, numel: int) -> int:
        return -(-numel // self.wire.size)
