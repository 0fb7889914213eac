"""Owners: m and v spread over the ranks, those of each value with its owner (`shard_state=True`).

A bucket of N values is cut into n parts, the same that its one-bit mean is taken in; rank j owns
part j, keeps m and v of it alone, and makes the direction in which it goes:

    dense        owner:     g = mean_i g_i ;  m = b1 m + (1-b1) g ;  v = b2 v + (1-b2) g²
                            d = m̂ / (sqrt(v̂) + eps)
    compressed   worker i:  z = k g_i + e_i ;  q_i = C[z] ;  e_i = z - q_i
                 owner:     g = mean_i q_i / k ;  m = b1 m + (1-b1) g
                            a = m̂ / (sqrt(v_frozen) + eps) + E ;  d = C[a] ;  E = a - d
    everybody    x = x - lr (d + lam x)              Adam; LAMB takes d where it has m̂ / sqrt(v)

with k = (mean over the tensors of s) / s at the freeze, s = sqrt(mean of v) of a tensor: one scale
serves a whole bucket, so its tensors are brought to one size before they share it.

What is sent is what it is without shards, n parts out and n parts back: g_i to the owners, d from
them. The dense stage is the same method, if `dense` is float32. The compressed stage is not that of
the papers. There the workers compress b1 m + (1-b1) g_i, for which all of them need all of m, and
divide the result by sqrt(v), for which all of them need all of v. Here the workers compress their
gradients, the owner averages over time what arrives, in float32, and compresses what it has made of
it. Both errors are fed back. A worker's error e_i is its own and as long as the bucket: it cannot
be spread.

A rank keeps, in floats: m, v and E of N/n values each, e of N. Without shards: m, v and e of N, E
of N/n.

[Note: verdicts] Of dense buckets only owners see the mean, so whether the step is finite, the
gradient's norm and which parameters are still unused are summed up over the ranks, in one message
of some dozen bytes a step. In the compressed stage the owner's d is not finite where the mean is
not, and everybody sees that; m is then not taken over.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.optim.moment_bucket import MomentBucket
from thinwire.wire.codecs import Codec
from thinwire.wire.wire import Wire


class Owners:
    def __init__(self, wire: Wire, dense: Codec | None) -> None:
        self.wire, self._dense = wire, dense

    def send_gradients(self, bucket: MomentBucket) -> None:
        """Dense: the mean lands in the owner's part of the buffer."""
        bucket.flight = self.wire.scatter_mean(bucket.buffer, bucket.part, self._dense)

    def send_bits(
        self, bucket: MomentBucket, make: Callable[[MomentBucket, Tensor], Tensor]
    ) -> None:
        """One bit a value out and back; in between `make` turns the owner's mean into d.

        It runs in a thread of the wire: what it changes must be `tentative`.
        """
        _each(bucket.views(bucket.buffer), bucket.scalars["scale"], Tensor.mul_)

        def owner(mean: Tensor) -> Tensor:
            _each(bucket.pieces(mean), bucket.scalars["scale"], Tensor.div_)
            return make(bucket, mean)

        bucket.flight = self.wire.mean(bucket.buffer, bucket.feedback, owner=owner)

    def spread(self, buckets: Sequence[MomentBucket]) -> None:
        """Everybody's directions, of dense buckets, to everybody."""
        flights = [self.wire.gather(b.buffer, b.part, self._dense) for b in buckets]
        for flight in flights:
            flight.wait()

    def equalise(self, bucket: MomentBucket, own: Sequence[float]) -> list[float]:
        """At the freeze: k of every tensor, from the sums of this rank's v; returns all ranks'."""
        sums = self.wire.agree(own, "sum")
        means = torch.tensor(sums, dtype=torch.float64) / torch.tensor(bucket.flat.sizes)
        bucket.new_scalar("scale", 1.0).copy_(equalising(means.sqrt()))
        return sums

    def whole(self, bucket: MomentBucket, own: Tensor, wire: Wire) -> Tensor:
        """A moment of all values of a bucket; a collective over `wire`, of the same ranks."""
        flat = torch.zeros_like(bucket.buffer)
        flat[bucket.own] = own
        return wire.gather(flat, bucket.part).wait()


def equalising(sizes: Tensor) -> Tensor:
    """Factors that bring tensors to the mean of their sizes; 1 for one that has none."""
    moving = sizes > 0
    mean = sizes.sum() / moving.sum().clamp(min=1)
    return torch.where(moving, mean / sizes, 1.0)


def _each(
    pieces: Sequence[Tensor], factors: Tensor, operation: Callable[[Tensor, Tensor], Tensor]
) -> None:
    for piece, factor in zip(pieces, factors, strict=True):
        operation(piece, factor)
