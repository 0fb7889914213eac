"""Differences: weights among neighbours in a codec's form.

Most of a z is a weight that was sent a step ago. Rounding it anew every time would draw every
weight to the codec's nearest grid point, harder than the gradient draws it anywhere. So the
neighbours keep what they have heard, and only what has changed travels:

    q_i = C[z_i - h_i] ; h_i = h_i + q_i ; s_i = s_i + sum_j w_ij (q_j - q_i) ; zbar_i = z_i + s_i

h_i is the reference, what i has sent so far; s_i = sum_j w_ij (h_j - h_i) is the disagreement. All
start at one point, h_i = x, s_i = 0. Rows and columns of W sum to 1, hence sum_i s_i = 0: what the
codec loses never moves the mean of the replicas. It costs two buffers, and one while the transfer
lasts. C must keep most of its input: with one bit a value this diverges (measured), so only Dense,
Int8 and Int4 are taken.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.methods.gossip.bucket import NeighbourBucket
from thinwire.wire.codecs import Codec

MOMENTS = ("reference", "disagreement")  # h and s, of every value
OLD_NAMES = {"told": "reference", "apart": "disagreement"}  # in states of version 0.1


class Differences:
    """`weights` are those of this replica's neighbours."""

    def __init__(self, codec: Codec, weights: Sequence[float]) -> None:
        self.codec, self._weights = codec, weights

    def begin(self, bucket: NeighbourBucket) -> None:
        """All replicas are at one point: everybody knows everybody's reference."""
        bucket.flat.pack(bucket.parameters, bucket.moments["reference"])
        bucket.moments["disagreement"].zero_()

    def encode(self, bucket: NeighbourBucket) -> None:
        """z in the buffer gives way to what has changed; all of s but the neighbours' part."""
        reference, disagreement = (bucket.moments[name] for name in MOMENTS)
        bucket.proposed = bucket.buffer.clone()
        news = bucket.buffer.sub_(reference)
        part = self.codec.part(news.numel(), 1)
        q = torch.empty_like(news)
        self.codec.decode(self.codec.encode(news, 1, part), part, q)
        reference.add_(q)
        # `exchange` returns news + sum_j w_ij (q_j - news).
        given = sum(self._weights)
        disagreement.add_(news, alpha=given - 1).add_(q, alpha=-given)

    def mixed(self, bucket: NeighbourBucket, heard: Tensor) -> Tensor:
        """zbar, from what `exchange` has returned."""
        disagreement = bucket.moments["disagreement"].add_(heard)
        assert bucket.proposed is not None
        zbar, bucket.proposed = bucket.proposed.add_(disagreement), None
        return zbar
