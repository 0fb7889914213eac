"""BucketedOptimizer: methods that keep their moments in buckets and send these during backward.

[Note: errors on other numbers of ranks] Of the workers' errors only the mean enters later results,
and the owners' parts are one buffer of N values cut by rank. `portable_state_dict` stores those
two; they load on any number of ranks. `state_dict` keeps this rank's own, which go on bit for bit.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.buckets import arrange
from thinwire.optim.checks import require_betas, require_bool, require_nonnegative
from thinwire.optim.departures import Departures, State
from thinwire.optim.flat import local_part
from thinwire.optim.moment_bucket import MomentBucket
from thinwire.wire.compressed_mean import own_slice
from thinwire.wire.wire import Group


class BucketedOptimizer(Departures[MomentBucket]):
    """A method implements `_launch`, `_step` and, for its own state, `_kept` and `_restore`."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        bucket_mb: float | None,
        overlap: bool,
        group: Group,
    ) -> None:
        name = type(self).__name__
        super().__init__(params, defaults | {"compress": True}, group=group, name=name)
        for settings in self.param_groups:
            self._check_group(name, settings)
        self.steps = 0
        """Steps taken; skipped ones do not count."""
        self._groups = [g for g in self.param_groups for _ in g["params"]]
        self._prepare(bucket_mb, overlap)

    def _kept(self) -> State:
        """What the method has to save beside the moments; the same on all ranks, JSON."""
        return {}

    def _restore(self, kept: State) -> None:
        pass

    def _check_group(self, name: str, group: dict[str, Any]) -> None:
        require_nonnegative(name, group, "lr", "eps", "weight_decay")
        group["betas"] = require_betas(name, group["betas"])
        for key in ("compress", "bias_correction"):
            group[key] = require_bool(name, key, group[key])

    def _land(self) -> bool:
        finite = super()._land()
        if not finite:
            self.account.skipped += 1
        return finite

    def _arrange(self, order: Sequence[int]) -> None:
        """Makes the buckets, and takes over what earlier ones hold."""
        earlier = self._whole_entries()
        super()._arrange(order)
        for index in self._place:
            if index in earlier:
                self._bucket(index).adopt(index, earlier[index])
        self._show_state()

    def _set_buckets(self, buckets: Sequence[MomentBucket]) -> None:
        super()._set_buckets(buckets)
        self._show_state()

    def _make_buckets(self, order: Sequence[int], whole: bool = False) -> list[MomentBucket]:
        kinds = [self._compresses(i) for i in range(len(self._parameters))]
        size = math.inf if whole else self.bucket_mb
        place = self._ownership()
        return [
            MomentBucket(
                members, self._parameters, self._groups, compress=kinds[members[0]], **place
            )
            for members in arrange(order, self._parameters, kinds, size, self._count())
        ]

    def _compresses(self, index: int) -> bool:
        """Whether a parameter's payload is compressed where the method does that."""
        return bool(self._groups[index]["compress"])

    def _count(self) -> int:
        """Of buckets, about, where bucket_mb does not say how large they are."""
        return 4

    def _ownership(self) -> dict[str, int]:
        """Into how many parts the moments are spread, and which is this rank's."""
        return {"size": 1, "rank": 0}

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | self._group_settings()

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """This rank's state, its own errors included: goes on bit for bit on as many ranks."""
        state = self._described(self._whole_entries(), self._method_state())
        return state | {"errors": self.own_errors(), "ranks": self._layout()}

    def portable_state_dict(self) -> State:
        """The same on every rank, and for any number of ranks. A collective: all ranks call it."""
        return self.common_state() | {"errors": self.portable_errors(), "ranks": 0}

    def common_state(self) -> State:
        """What is the same on all ranks; a collective, for some methods must find that first."""
        return self._described(self._common_entries(), self._method_state())

    def _method_state(self) -> State:
        return {"steps": self.steps} | self._kept()

    def own_errors(self) -> list[State]:
        return [bucket.feedback.state_dict() for bucket in self.buckets]

    def portable_errors(self) -> list[State]:
        """For each bucket the workers' mean error and all owners' errors; a collective."""
        return [
            {"worker": self._mean_error(bucket), "owner": self._all_owners(bucket)}
            for bucket in self.buckets
        ]

    def load_state_dict(self, state_dict: State) -> None:
        """Takes the state of either kind, and refuses one of other parameters."""
        self.load_common_state(state_dict)
        self.load_errors(state_dict["errors"], ranks=state_dict["ranks"])

    def load_common_state(self, saved: State) -> None:
        self._check_described(saved)
        for index, entries in sorted(saved["state"].items(), key=lambda item: int(item[0])):
            wanted = local_part(self._parameters[int(index)]).shape
            self._check_shape(int(index), entries["exp_avg"].shape, wanted)
        self._abandon()
        self.buckets = []  # nothing that they hold is to be taken over
        self.steps = saved["method"]["steps"]
        self._restore(saved["method"])
        self._load_described(saved)
        for index, entries in saved["state"].items():
            self._bucket(int(index)).adopt(int(index), self._run_counts() | entries)
        self._show_state()

    def _run_counts(self) -> dict[str, Tensor]:
        """For states from before there were counts for every tensor."""
        return {"step": torch.tensor(float(self.steps))}

    def load_errors(self, errors: list[State], *, ranks: int | list[int]) -> None:
        """Errors as `own_errors` gave them on so many ranks, or portable ones (0)."""
        if ranks not in (0, self._layout()):
            raise ValueError(
                f"this state holds the errors of one of {ranks} ranks, and here are "
                f"{self._layout()}; save with portable_state_dict(), which loads on any number"
            )
        for bucket, saved in zip(self.buckets, errors, strict=True):
            copies = {
                side: None if error is None else error.to(bucket.buffer.device, copy=True)
                for side, error in saved.items()
            }
            worker, owner = copies["worker"], copies["owner"]
            if ranks == 0 and worker is not None and owner is not None:
                mine = self._own_slice(bucket, self._sent(owner))
                copies = {"worker": self._sent(worker).clone(), "owner": mine.clone()}
            bucket.feedback.load_state_dict(copies)

    def _layout(self) -> int | list[int]:
        """The ranks that a rank's own errors belong to."""
        return self.wire.size

    def _sent(self, whole: Tensor) -> Tensor:
        """Which of a bucket's values this rank sends over the wire."""
        return whole

    def _mean_error(self, bucket: MomentBucket) -> Tensor | None:
        if not self._has_errors(bucket):
            return None
        whole = torch.zeros_like(bucket.buffer)
        if (error := bucket.feedback.worker.error) is not None:
            self._sent(whole).copy_(error)
        self.meeting.mean(self._sent(whole)).wait()
        return self._assembled(whole)

    def _all_owners(self, bucket: MomentBucket) -> Tensor | None:
        if not self._has_errors(bucket):
            return None
        whole = torch.zeros_like(bucket.buffer)
        sent = self._sent(whole)
        if (error := bucket.feedback.owner.error) is not None:
            self._own_slice(bucket, sent).copy_(error)
        self.meeting.mean(sent).wait().mul_(self.meeting.size)
        return self._assembled(whole)

    def _has_errors(self, bucket: MomentBucket) -> bool:
        """Whether anything of it was compressed so far, the same on all ranks."""
        return bucket.feedback.worker.error is not None

    def _assembled(self, whole: Tensor) -> Tensor:
        """With what other ranks than those of the wire have of it."""
        return whole

    def _own_slice(self, bucket: MomentBucket, whole: Tensor) -> Tensor:
        part = bucket.feedback.codec.part(whole.numel(), self.wire.size)
        return whole[own_slice(whole.numel(), part, self.wire.rank)]

    def _entries(self) -> dict[int, dict[str, Tensor]]:
        """What is kept here, by parameter."""
        return {i: bucket.entries(i) for bucket in self.buckets for i in bucket.indices}

    def _common_entries(self) -> dict[int, dict[str, Tensor]]:
        """What all ranks can go on from."""
        return self._whole_entries()

    def _whole_entries(self) -> dict[int, dict[str, Tensor]]:
        """What is kept of whole parameters, wherever."""
        return self._entries()

    def _show_state(self) -> None:
        """`optimizer.state[p]` as with any torch optimizer; views of the buckets."""
        self.state.clear()
        for bucket in self.buckets:
            for index in bucket.indices:
                self.state[self._parameters[index]] = bucket.shown(index)
