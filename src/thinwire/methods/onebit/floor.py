"""The floor of a frozen variance.

    v = max(v, floor mean(v))

A value that saw hardly any gradient before the freeze has v near 0, but its share of the one-bit
momentum is as large as any other's: divided by sqrt(v) it would grow without limit. The mean is
taken over the values whose payloads are of one size: the tensor where tensors are brought to one
size before they share a scale, the bucket where they are not. (Over the bucket it would lift all of
a tensor with small gradients, such as a transformer's Q and K.) A tensor that has seen no gradient
at all takes the bucket's mean. The published methods have no floor: `floor=0.0`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.methods.onebit.moments import MomentBucket


def sums_of(bucket: MomentBucket, variance: Tensor) -> list[float]:
    """The sum over this rank's values of every tensor."""
    return torch.stack([piece.double().sum() for piece in bucket.pieces(variance)]).tolist()


def lift(
    bucket: MomentBucket,
    variance: Tensor,
    floor: float,
    sums: Sequence[float],
    sizes: Sequence[float],
    *,
    by_tensor: bool,
) -> None:
    """`sums` and `sizes` are those of whole tensors, wherever their values are."""
    whole = sum(sums) / max(1.0, sum(sizes))
    for piece, total, size in zip(bucket.pieces(variance), sums, sizes, strict=True):
        piece.clamp_(min=floor * (total / size if by_tensor and total > 0 else whole))
