"""BucketedOptimizer: methods that keep their moments in buckets and send these during backward.

[Note: errors on other numbers of ranks] Of the workers' errors only the mean enters later results,
and the owners' parts are one buffer of N values cut by rank. `portable_state_dict` stores those
two; they load on any number of ranks. `state_dict` keeps this rank's own, which go on bit for bit.

[Note: unused parameters] A parameter that has no gradient on any rank is left alone, as torch's
optimizers do. The ranks agree on those at the first step; a mean gradient that is not zero ends it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.base import WireOptimizer
from thinwire.optim.buckets import Backward, Bucket, arrange
from thinwire.optim.checks import (
    require_betas,
    require_dense_gradient,
    require_nonnegative,
    require_positive,
)
from thinwire.wire.compressed_mean import own_slice
from thinwire.wire.wire import Group

State = dict[str, Any]


class BucketedOptimizer(WireOptimizer):
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
        if bucket_mb is not None:
            require_positive(name, "bucket_mb", bucket_mb)
        super().__init__(params, defaults | {"compress": True}, group=group, name=name)
        for settings in self.param_groups:
            self._check_group(name, settings)
        self.bucket_mb, self.overlap = bucket_mb, overlap
        self.steps = 0
        """Steps taken; skipped ones do not count."""
        self.buckets: list[Bucket] = []
        self._groups = [g for g in self.param_groups for _ in g["params"]]
        self._idle: set[int] = set()  # see [Note: unused parameters]
        self._place: dict[int, int] = {}  # parameter -> its bucket's position
        self._missing: list[set[int]] = []  # gradients each bucket still waits for
        self._launched = 0  # buckets already in the air, in [Note: order of buckets]
        self._backward = Backward(self._parameters, self._gradient_ready)

    def accumulating(self) -> AbstractContextManager[None]:
        """Around forward and backward of all micro-batches of a step but the last one."""
        return self._backward.accumulating()

    def _launch(self, bucket: Bucket) -> None:
        """Sends a bucket whose gradients are all there."""
        raise NotImplementedError

    def _overlaps(self) -> bool:
        """Whether buckets may leave before step() at present."""
        return self.overlap

    def _kept(self) -> State:
        """What the method has to save beside the moments; the same on all ranks, JSON."""
        return {}

    def _restore(self, kept: State) -> None:
        pass

    def _check_group(self, name: str, group: dict[str, Any]) -> None:
        require_nonnegative(name, group, "lr", "eps", "weight_decay")
        require_betas(name, group["betas"])
        if not isinstance(group["compress"], bool):
            raise ValueError(f"{name}(compress=...) takes True or False, got {group['compress']!r}")

    # -- the backward pass ------------------------------------------------------------------------

    @torch.no_grad()
    def _gradient_ready(self, index: int) -> None:
        """Called by the backward pass: launches what can be."""
        position = self._place.get(index)
        if position is None or not self._checked or not self._overlaps():
            return
        if position < self._launched:
            raise RuntimeError(
                f"a second backward pass before step(): the gradient of parameter {index} is "
                "already on its way. Put all micro-batches but the last one under "
                "`with optimizer.accumulating():`, or build the optimizer with overlap=False"
            )
        self._missing[position].discard(index)
        while self._launched < len(self.buckets) and not self._missing[self._launched]:
            bucket = self.buckets[self._launched]
            for parameter in bucket.parameters:
                require_dense_gradient(type(self).__name__, parameter)
            self._launch(bucket)
            bucket.note_gradients()
            self._launched += 1

    def _launch_rest(self) -> None:
        for bucket in self.buckets[self._launched :]:
            self._launch(bucket)
        self._await_gradients()

    def _await_gradients(self) -> None:
        self._launched = 0
        self._missing = [set(bucket.indices) - self._idle for bucket in self.buckets]

    def _land(self) -> bool:
        """Waits for all buckets; whether all of them are finite, the same on every rank."""
        finite = True
        for bucket in self.buckets:
            assert bucket.flight is not None
            bucket.flight.wait()
            finite = bucket.flight.finite and finite
            bucket.flight = None
        finite = self._agreed(finite)
        for bucket in self.buckets:
            bucket.commit(finite)
        if not finite:
            self.account.skipped += 1
        return finite

    def _agreed(self, finite: bool) -> bool:
        """What all ranks make of it; they know already where all of them hold the same bits."""
        return finite

    def _require_usable_gradients(self) -> None:
        name = type(self).__name__
        for parameter in self._parameters:
            require_dense_gradient(name, parameter)
        early = self.buckets[: self._launched]
        if early and hasattr(self, "found_inf"):
            raise RuntimeError(
                f"{name} sent gradients during the backward pass with GradScaler's scale still in "
                "them; build it with overlap=False, or train in bfloat16, which needs no scale"
            )
        changed = [bucket.gradients_changed() for bucket in early]
        if any(changed):
            raise RuntimeError(
                f"{name}: gradients were changed after they had been sent during the backward "
                "pass. To clip them use clip=; for anything else build it with overlap=False"
            )

    # -- the start --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """At the first step everybody takes rank 0's order and learns which tensors are unused."""
        trained = [i for i, p in enumerate(self._parameters) if p.requires_grad and p.numel()]
        seen = [i for i in self._backward.order if i in trained]
        order = seen + [i for i in reversed(trained) if i not in self._backward.order]
        first, used = self._agree_on_start(
            ",".join(map(str, order)),
            [float(self._parameters[i].grad is not None) for i in trained],
        )
        self._idle = {i for i, flag in zip(trained, used, strict=True) if not flag}
        self._arrange([int(i) for i in first.split(",") if i])

    def _agree_on_start(self, order: str, used: list[float]) -> tuple[str, list[float]]:
        return self.wire.gather_bytes(order.encode())[0].decode(), self.wire.agree(used)

    def _arrange(self, order: Sequence[int]) -> None:
        """Makes the buckets, and takes over what earlier ones hold."""
        earlier = self._whole_entries()
        self.buckets = arrange(
            order, self._parameters, self._groups, self.bucket_mb, **self._ownership()
        )
        self._place = {i: at for at, bucket in enumerate(self.buckets) for i in bucket.indices}
        for index in self._place:
            if index in earlier:
                self._bucket(index).adopt(index, earlier[index])
        self._await_gradients()
        self._show_state()

    def _bucket(self, index: int) -> Bucket:
        return self.buckets[self._place[index]]

    def _ownership(self) -> dict[str, int]:
        """Into how many parts the moments are spread, and which is this rank's."""
        return {"size": 1, "rank": 0}

    def _settings(self) -> dict[str, Any]:
        groups = {
            str(number): {k: str(v) for k, v in group.items() if k not in ("params", "lr")}
            for number, group in enumerate(self.param_groups)
        }
        return super()._settings() | {"bucket_mb": self.bucket_mb, "group": groups}

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """This rank's state, its own errors included: goes on bit for bit on as many ranks."""
        state = self._described(self._whole_entries())
        return state | {"errors": self.own_errors(), "ranks": self._layout()}

    def portable_state_dict(self) -> State:
        """The same on every rank, and for any number of ranks. A collective: all ranks call it."""
        return self.common_state() | {"errors": self.portable_errors(), "ranks": 0}

    def common_state(self) -> State:
        """What is the same on all ranks; a collective, for some methods must find that first."""
        return self._described(self._common_entries())

    def _described(self, kept: dict[int, dict[str, Tensor]]) -> State:
        index = {id(p): i for i, p in enumerate(self._parameters)}
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            | {"params": [index[id(p)] for p in group["params"]]}
            for group in self.param_groups
        ]
        method = {
            "name": type(self).__name__,
            "steps": self.steps,
            "idle": sorted(self._idle),
            "order": [i for bucket in self.buckets for i in bucket.indices],
            "buckets": [len(bucket.indices) for bucket in self.buckets],
        } | self._kept()
        state = {
            i: {name: tensor.clone() for name, tensor in entries.items()}
            for i, entries in kept.items()
        }
        return {"state": state, "param_groups": groups, "method": method}

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
        self._check_state(saved)
        for group, values in zip(self.param_groups, saved["param_groups"], strict=True):
            group.update({k: v for k, v in values.items() if k != "params"})
            group["betas"] = tuple(group["betas"])
        method = saved["method"]
        self.steps, self._idle = method["steps"], set(method["idle"])
        self._restore(method)
        self._arrange(method["order"])
        if [len(bucket.indices) for bucket in self.buckets] != method["buckets"]:
            raise ValueError(
                f"{type(self).__name__}(bucket_mb={self.bucket_mb}) makes other buckets than the "
                "state was saved with, whose errors it holds; use the same bucket_mb and groups"
            )
        for index, entries in saved["state"].items():
            self._bucket(int(index)).adopt(int(index), entries)
        self._show_state()

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

    def _mean_error(self, bucket: Bucket) -> Tensor | None:
        if not self._has_errors(bucket):
            return None
        whole = torch.zeros_like(bucket.buffer)
        if (error := bucket.feedback.worker.error) is not None:
            self._sent(whole).copy_(error)
        self.meeting.mean(self._sent(whole)).wait()
        return self._assembled(whole)

    def _all_owners(self, bucket: Bucket) -> Tensor | None:
        if not self._has_errors(bucket):
            return None
        whole = torch.zeros_like(bucket.buffer)
        sent = self._sent(whole)
        if (error := bucket.feedback.owner.error) is not None:
            self._own_slice(bucket, sent).copy_(error)
        self.meeting.mean(sent).wait().mul_(self.meeting.size)
        return self._assembled(whole)

    def _has_errors(self, bucket: Bucket) -> bool:
        """Whether anything of it was compressed so far, the same on all ranks."""
        return bucket.feedback.worker.error is not None

    def _assembled(self, whole: Tensor) -> Tensor:
        """With what other ranks than those of the wire have of it."""
        return whole

    def _own_slice(self, bucket: Bucket, whole: Tensor) -> Tensor:
        part = bucket.feedback.codec.part(whole.numel(), self.wire.size)
        return whole[own_slice(whole.numel(), part, self.wire.rank)]

    def _check_state(self, saved: State) -> None:
        name = type(self).__name__
        kind = saved.get("method", {}).get("name", "another optimizer")
        if kind != name:
            raise ValueError(f"{name} cannot load the state of {kind}")
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        here = [len(group["params"]) for group in self.param_groups]
        if sizes != here:
            raise ValueError(
                f"{name}: the state has groups of {sizes} parameters, this optimizer of {here}; "
                "load it into the model it was saved with"
            )
        for index, entries in sorted(saved["state"].items(), key=lambda item: int(item[0])):
            shape, wanted = entries["exp_avg"].shape, self._parameters[int(index)].shape
            if shape != wanted:
                raise ValueError(
                    f"{name}: parameter {index} has shape {tuple(wanted)}, in the state "
                    f"{tuple(shape)}; load it into the model it was saved with"
                )

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
        for index, entries in self._entries().items():
            self.state[self._parameters[index]] = entries
