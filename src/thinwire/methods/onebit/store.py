"""MomentStore: the buckets of a one-bit method as parameters, for `state_dict` and the user.

[Note: errors on other numbers of ranks] Of the workers' errors only the mean enters later results,
and the owners' parts are one buffer of N values cut by rank. `portable_errors` stores those two;
they load on any number of ranks. `own_errors` keeps this rank's, which go on bit for bit.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.overlap.bucket import arrange
from thinwire.methods.overlap.engine import Kept
from thinwire.methods.overlap.reducer import GradientReducer
from thinwire.methods.session import Session
from thinwire.wire.compressed_mean import own_slice

State = dict[str, Any]


class MomentStore:
    """`parts` is where this rank's moments are: one of so many parts of every bucket."""

    def __init__(
        self, session: Session, reducer: GradientReducer[MomentBucket], parts: dict[str, int]
    ) -> None:
        self._session, self._reducer, self._parts = session, reducer, parts
        self._groups = session.group_of_each()
        self.always_dense: set[int] = set()
        """Parameters first used after the freeze, which have no variance to be frozen."""

    @property
    def _buckets(self) -> list[MomentBucket]:
        return self._reducer.buckets

    def make_buckets(self, order: Sequence[int], whole: bool, count: int) -> list[MomentBucket]:
        """About `count` of them, where bucket_mb does not say how large they are."""
        parameters = self._session.parameters
        kinds = [self._compresses(i) for i in range(len(parameters))]
        size = math.inf if whole else self._reducer.bucket_mb
        return [
            MomentBucket(
                members, parameters, self._groups, compress=kinds[members[0]], **self._parts
            )
            for members in arrange(order, parameters, kinds, size, count)
        ]

    def _compresses(self, index: int) -> bool:
        """Whether a parameter's payload is compressed where the method does that."""
        return bool(self._groups[index]["compress"]) and index not in self.always_dense

    # -- moments ----------------------------------------------------------------------------------

    def entries(self) -> Kept:
        """What is kept here, by parameter."""
        return {i: bucket.entries(i) for bucket in self._buckets for i in bucket.indices}

    def whole_entries(self, whole: Callable[[MomentBucket, Tensor], Tensor] | None) -> Kept:
        """What is kept of whole parameters; `whole(bucket, own)` gathers a moment that is spread
        over the ranks."""
        entries = self.entries()
        if whole is None:
            return entries
        for bucket in self._buckets:
            for name, own in bucket.moments.items():
                views = bucket.views(whole(bucket, own))
                for index, view in zip(bucket.indices, views, strict=True):
                    entries[index][name] = view
        return entries

    def adopt(self, entries: Kept) -> None:
        """What was kept for these parameters, into the buckets that they are in now."""
        for index in self._reducer.place:
            if index in entries:
                self._reducer.bucket_of(index).adopt(index, entries[index])
        self.show()

    def show(self) -> None:
        """`optimizer.state[p]` as with any torch optimizer; views of the buckets."""
        state = self._session.state
        state.clear()
        for bucket in self._buckets:
            for index in bucket.indices:
                state[self._session.parameters[index]] = bucket.shown(index)

    # -- errors -----------------------------------------------------------------------------------

    def own_errors(self) -> list[State]:
        return [bucket.feedback.state_dict() for bucket in self._buckets]

    def portable_errors(self) -> list[State]:
        """For each bucket the workers' mean error and all owners' errors; a collective."""
        return [
            {"worker": self._mean_error(bucket), "owner": self._all_owners(bucket)}
            for bucket in self._buckets
        ]

    def load_errors(self, errors: list[State], *, ranks: int | list[int]) -> None:
        """Errors as `own_errors` gave them on so many ranks, or portable ones (0)."""
        layout, part = self._reducer.route.layout, self._reducer.route.part
        if ranks not in (0, layout):
            raise ValueError(
                f"this state holds the errors of one of {ranks} ranks, and here are "
                f"{layout}; save with portable_state_dict(), which loads on any number"
            )
        for bucket, saved in zip(self._buckets, errors, strict=True):
            copies = {
                side: None if error is None else error.to(bucket.buffer.device, copy=True)
                for side, error in saved.items()
            }
            worker, owner = copies["worker"], copies["owner"]
            if ranks == 0 and worker is not None and owner is not None:
                mine = self._own_slice(bucket, part(owner))
                copies = {"worker": part(worker).clone(), "owner": mine.clone()}
            bucket.feedback.load_state_dict(copies)

    def _mean_error(self, bucket: MomentBucket) -> Tensor | None:
        if not self._has_errors(bucket):
            return None
        route, whole = self._reducer.route, torch.zeros_like(bucket.buffer)
        if (error := bucket.feedback.worker.error) is not None:
            route.part(whole).copy_(error)
        self._session.evaluation.mean(route.part(whole)).wait()
        return route.whole(whole)

    def _all_owners(self, bucket: MomentBucket) -> Tensor | None:
        if not self._has_errors(bucket):
            return None
        route, wire = self._reducer.route, self._session.evaluation
        whole = torch.zeros_like(bucket.buffer)
        sent = route.part(whole)
        if (error := bucket.feedback.owner.error) is not None:
            self._own_slice(bucket, sent).copy_(error)
        wire.mean(sent).wait().mul_(wire.size)
        return route.whole(whole)

    def _has_errors(self, bucket: MomentBucket) -> bool:
        """Whether anything of it was compressed so far, the same on all ranks."""
        return self._reducer.route.any(bucket.feedback.worker.error is not None)

    def _own_slice(self, bucket: MomentBucket, whole: Tensor) -> Tensor:
        wire = self._session.wire
        part = bucket.feedback.codec.part(whole.numel(), wire.size)
        return whole[own_slice(whole.numel(), part, wire.rank)]
