"""Consensus: the mean of the replicas in a model's place, for as long as it is looked at."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.optim.flat import Flat
from thinwire.wire.wire import Wire


@contextmanager
def mean_of_replicas(wire: Wire, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the tensors hold their mean over the ranks; after it, what they held before."""
    if wire.size == 1:
        yield
        return
    with torch.no_grad():
        flat = Flat(tensors)
        own = flat.pack(tensors, flat.new())
        flat.unpack(wire.mean(own.clone()).wait(), tensors)
    try:
        yield
    finally:
        with torch.no_grad():
            flat.unpack(own, tensors)
