"""Clipping: by the norm of the mean gradient, also where no rank knows it.

Dense: by the norm of the mean gradient, as data parallelism does. Compressed: all ranks estimate it
from mean_i ||g_i||², one number in a reduction of its own, and from what the two had to do with
each other at the last dense steps (mean_norm.py). It is known only after the whole backward pass,
so with `clip` compressed buckets are launched by step().
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.flat import local_part
from thinwire.methods.onebit.mean_norm import MeanNorm, shortening
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.session import Session
from thinwire.methods.shared.shards import Shards
from thinwire.wire.flight import Flight


class Clipping:
    """
    clip       largest norm; None does not clip
    factor     on the gradients of this step, before they are compressed
    grad_norm  by which the last step was clipped; this rank's own without `clip`
    square     of the mean gradient's norm, at a dense step
    """

    def __init__(
        self, session: Session, shards: Shards, norms: MeanNorm, clip: float | None
    ) -> None:
        self._session, self._shards, self.norms = session, shards, norms
        self.clip = clip
        self.factor = 1.0
        self.grad_norm = math.nan
        self.square = 0.0

    def squared_gradients(self) -> float:
        """||g_i||² of this rank."""
        scale = 1.0 if self._session.scale is None else float(self._session.scale)
        parameters = self._session.parameters
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        return self._shards.sum([squared_norm(gradients)])[0] / scale**2

    def spread(self) -> float:
        """mean_i ||g_i||², where it is needed."""
        return 0.0 if self.clip is None else self.norms.spread(self.squared_gradients())

    def measure(self) -> None:
        """The norm of this step's gradients before they are compressed, and what it asks for."""
        if self.clip is None:
            square = self.squared_gradients()
            self.grad_norm = math.sqrt(square) if square >= 0 else math.nan
            return
        self.grad_norm = self.norms.estimate(self.spread())
        self.factor = shortening(self.grad_norm, self.clip)

    def poll(self) -> Flight:
        """mean_i ||g_i||² on its way; see `polled`."""
        return self.norms.poll(self.squared_gradients())

    def polled(self, squares: Flight) -> None:
        """Waits for a poll, and takes the norm from it."""
        self.grad_norm = self.norms.polled(squares.wait())
        self.factor = shortening(self.grad_norm, self.clip)

    def clip_mean(self, buckets: Iterable[MomentBucket], spread: float) -> None:
        """Clips the mean gradients in the buffers; `spread` is mean_i ||g_i||²."""
        self.grad_norm = math.sqrt(self.square)
        if self.clip is None:
            return
        self.norms.observe(self.square, spread)
        if self.grad_norm > self.clip:
            for bucket in buckets:
                bucket.mine.mul_(self.clip / self.grad_norm)

    @property
    def clipped_norm(self) -> float:
        """Of the mean gradient of a dense step, after `clip_mean`."""
        return self.grad_norm if self.clip is None else min(self.grad_norm, self.clip)


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """The squared norm of them all; one wait for the device."""
    norms = [torch.linalg.vector_norm(t.float()).double() for t in tensors]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
