"""Where m and v of a bucket are kept: whole on every rank, or spread over them (`shard_state`).

[Note: sharded moments] With shards every value has an owner, which keeps m and v of it.

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
from typing import Protocol

import torch
from torch import Tensor

from thinwire.methods.onebit.clipping import squared_norm
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.onebit.rule import Rule
from thinwire.methods.shared.shards import Shards
from thinwire.wire.codecs import Codec
from thinwire.wire.wire import Wire

Totals = tuple[list[float], list[float]]


class Placement(Protocol):
    """Where moments are, and what follows for sending and learning."""

    parts: dict[str, int]
    """Into how many parts the moments are spread, and which is this rank's."""

    def send(
        self,
        bucket: MomentBucket,
        part: Tensor,
        rule: Rule,
        *,
        frozen: bool,
        prepare: Callable[[], None] | None,
    ) -> None:
        """Launches a bucket with this rank's gradient in it. `part` is what this rank sends of it;
        with `prepare` the payload is made by that, in a thread of the wire."""

    def learns(self, frozen: bool) -> bool:
        """Whether a bucket's moments are learnt after it has landed."""

    def verdict(self, finite: bool, dense: Sequence[MomentBucket]) -> tuple[bool, float]:
        """What all ranks make of a step: whether it is finite, and ||g||² of its dense buckets."""

    def decides_alone(self, dense: Sequence[MomentBucket]) -> bool:
        """Whether each rank knows by itself if a step without dense buckets is finite."""

    def spread(self, buckets: Sequence[MomentBucket]) -> None:
        """The directions of these buckets to all ranks."""

    def totals(self, bucket: MomentBucket, sums: list[float]) -> Totals:
        """Sums over this rank's values of every tensor -> those over all values, and the sizes."""

    def whole(self, bucket: MomentBucket, own: Tensor, wire: Wire) -> Tensor:
        """A moment of all values of a bucket; a collective over `wire`, of the same ranks."""


class WholeMoments:
    """Every rank keeps m and v of all values."""

    def __init__(self, wire: Wire, dense: Codec | None, shards: Shards) -> None:
        self._wire, self._dense, self._shards = wire, dense, shards
        self.parts = {"size": 1, "rank": 0}

    def send(
        self,
        bucket: MomentBucket,
        part: Tensor,
        rule: Rule,
        *,
        frozen: bool,
        prepare: Callable[[], None] | None,
    ) -> None:
        codec = bucket.feedback if frozen else self._dense
        if frozen and prepare is None:
            rule.payload(bucket)
        bucket.flight = self._wire.mean(part, codec, prepare=prepare)

    def learns(self, frozen: bool) -> bool:
        return True

    def verdict(self, finite: bool, dense: Sequence[MomentBucket]) -> tuple[bool, float]:
        square = squared_norm([bucket.mine for bucket in dense]) if finite else 0.0
        bad, total = self._shards.sum([float(not finite), square])
        return not bad, total

    def decides_alone(self, dense: Sequence[MomentBucket]) -> bool:
        return True  # all replicas have seen the same bits

    def spread(self, buckets: Sequence[MomentBucket]) -> None:
        pass

    def totals(self, bucket: MomentBucket, sums: list[float]) -> Totals:
        both = self._shards.sum([*sums, *map(float, bucket.flat.sizes)])
        return both[: len(sums)], both[len(sums) :]

    def whole(self, bucket: MomentBucket, own: Tensor, wire: Wire) -> Tensor:
        return own


class ShardedMoments:
    """Every rank keeps m and v of its own part alone, see [Note: sharded moments]."""

    def __init__(self, wire: Wire, dense: Codec | None) -> None:
        self._wire, self._dense = wire, dense
        self.parts = {"size": wire.size, "rank": wire.rank}

    def send(
        self,
        bucket: MomentBucket,
        part: Tensor,
        rule: Rule,
        *,
        frozen: bool,
        prepare: Callable[[], None] | None,
    ) -> None:
        """Dense: the mean lands in the owner's part of the buffer. Frozen: one bit a value out and
        back, and in between the owner turns its mean into d."""
        if not frozen:
            bucket.flight = self._wire.scatter_mean(bucket.buffer, bucket.part, self._dense)
            return
        _each(bucket.views(bucket.buffer), bucket.scalars["scale"], Tensor.mul_)

        def owner(mean: Tensor) -> Tensor:
            _each(bucket.pieces(mean), bucket.scalars["scale"], Tensor.div_)
            return rule.own_direction(bucket, mean)

        bucket.flight = self._wire.mean(bucket.buffer, bucket.feedback, owner=owner)

    def learns(self, frozen: bool) -> bool:
        return not frozen  # its owner did it on the way

    def verdict(self, finite: bool, dense: Sequence[MomentBucket]) -> tuple[bool, float]:
        """See [Note: verdicts]."""
        square = squared_norm([bucket.mine for bucket in dense]) if finite else 0.0
        bad, total = self._wire.agree([float(not finite), square], "sum")
        return not bad, total

    def decides_alone(self, dense: Sequence[MomentBucket]) -> bool:
        return not dense

    def spread(self, buckets: Sequence[MomentBucket]) -> None:
        flights = [self._wire.gather(b.buffer, b.part, self._dense) for b in buckets]
        for flight in flights:
            flight.wait()

    def totals(self, bucket: MomentBucket, sums: list[float]) -> Totals:
        """At the freeze; also finds k of every tensor."""
        sums = self._wire.agree(sums, "sum")
        means = torch.tensor(sums, dtype=torch.float64) / torch.tensor(bucket.flat.sizes)
        bucket.new_scalar("scale", 1.0).copy_(equalising(means.sqrt()))
        return sums, [float(size) for size in bucket.flat.sizes]

    def whole(self, bucket: MomentBucket, own: Tensor, wire: Wire) -> Tensor:
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
