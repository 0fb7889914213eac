"""Consensus: the mean of the replicas in a model's place, for as long as it is looked at."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.flat import Flat
from thinwire.methods.shared.finite import finite_means
from thinwire.methods.shared.shards import Shards
from thinwire.wire.wire import Wire


@contextmanager
def mean_of_replicas(
    wire: Wire, tensors: Sequence[Tensor], shards: Shards | None = None
) -> Iterator[None]:
    """Inside, the tensors hold their mean over the ranks that are finite; after it, what they held
    before."""
    if wire.size == 1:
        yield
        return
    with torch.no_grad():
        flat = Flat(tensors)
        own = flat.pack(tensors, flat.new())
        (mean,) = finite_means(wire, [own], shards or Shards([]), wire.name)
        flat.unpack(mean, tensors)
    try:
        yield
    finally:
        with torch.no_grad():
            flat.unpack(own, tensors)
