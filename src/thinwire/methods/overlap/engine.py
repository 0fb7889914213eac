"""ReducingEngine: what the methods share that send buckets during the backward pass.

The reducer (reducer.py) asks it what a bucket is and how one is sent.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from torch import Tensor

from thinwire.methods.engine import Engine, State
from thinwire.methods.overlap.bucket import Bucket
from thinwire.methods.overlap.reducer import GradientReducer

B = TypeVar("B", bound=Bucket)
Kept = dict[int, dict[str, Tensor]]  # what is kept of each parameter, by name


class ReducingEngine(Engine, Generic[B]):
    """A method sets `reducer` when it is built, and implements `make_buckets` and `launch`."""

    reducer: GradientReducer[B]
    how_to_clip = "To clip them use clip="

    @property
    def buckets(self) -> list[B]:
        return self.reducer.buckets

    @property
    def overlap(self) -> bool:
        return self.reducer.overlap

    def accumulating(self) -> AbstractContextManager[None]:
        return self.reducer.accumulating()

    def make_buckets(self, order: Sequence[int], whole: bool = False) -> list[B]:
        """Parameters, in the order of their gradients, as buckets; as a single one if `whole`."""
        raise NotImplementedError

    def launch(self, bucket: B) -> None:
        """Sends a bucket whose gradients are all there."""
        raise NotImplementedError

    def may_overlap(self) -> bool:
        """Whether buckets may leave before step() at present."""
        return self.reducer.overlap

    def agreed(self, finite: bool) -> bool:
        """What all ranks make of it; they know already where all of them hold the same bits."""
        return finite

    def gradient_seen(self, index: int) -> None:
        """A gradient has been computed."""

    def used_at_first(self) -> list[bool]:
        """Which parameters take part from the first step on, as far as this rank knows."""
        return [p.grad is not None and p.numel() > 0 for p in self.session.parameters]

    def admitting(self, indices: Sequence[int]) -> None:
        """Parameters are about to get buckets that were not used before."""

    def held(self) -> Kept:
        """What the buckets hold, for others that take their place."""
        return {}

    def take_over(self, held: Kept) -> None:
        """The buckets are new, and this is what the old ones held."""

    def rearranged(self) -> None:
        """The reducer has other buckets."""

    def group_settings(self) -> State:
        """What all ranks must have been given alike, but for the learning rate."""
        groups: dict[str, Any] = {
            str(number): {k: str(v) for k, v in group.items() if k not in ("params", "lr")}
            for number, group in enumerate(self.session.groups)
        }
        return {"bucket_mb": self.reducer.bucket_mb, "group": groups}
