"""Progress: how far a one-bit method is, as all of its parts see it."""

from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.methods.onebit.moments import MomentBucket


@dataclass
class Progress:
    """The same on all ranks."""

    steps: int = 0
    """Steps taken; skipped ones do not count."""
    frozen_at: int | None = None
    """The step after which the variance was frozen; None in the warm-up."""

    @property
    def compressing(self) -> bool:
        """Whether the variance is frozen and one bit a value is sent."""
        return self.frozen_at is not None

    def frozen(self, bucket: MomentBucket) -> bool:
        """Groups with compress=False stay in the first stage."""
        return self.compressing and bucket.compress

    def count_step(self, buckets: Iterable[MomentBucket]) -> None:
        self.steps += 1
        for bucket in buckets:
            bucket.count("step")
