"""Departures: methods that send buckets during the backward pass.

[Note: unused parameters] A parameter that has no gradient on any rank is left alone, as torch's
optimizers do. The ranks agree on those at the first step; a mean gradient that is not zero ends it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

from thinwire.optim.base import WireOptimizer
from thinwire.optim.buckets import Backward, Bucket
from thinwire.optim.checks import require_bool, require_dense_gradient, require_positive

State = dict[str, Any]
B = TypeVar("B", bound=Bucket)


class Departures(WireOptimizer, Generic[B]):
    """A method calls `_prepare` once it is built, and implements `_launch` and `_make_buckets`."""

    def _prepare(self, bucket_mb: float | None, overlap: bool) -> None:
        name = type(self).__name__
        if bucket_mb is not None:
            bucket_mb = require_positive(name, "bucket_mb", bucket_mb)
        self.bucket_mb, self.overlap = bucket_mb, require_bool(name, "overlap", overlap)
        self.buckets: list[B] = []
        self._idle: set[int] = set()  # see [Note: unused parameters]
        self._place: dict[int, int] = {}  # parameter -> its bucket's position
        self._missing: list[set[int]] = []  # gradients each bucket still waits for
        self._launched = 0  # buckets already in the air, in [Note: order of buckets]
        self._backward = Backward(self._parameters, self._gradient_ready)

    def accumulating(self) -> AbstractContextManager[None]:
        """Around forward and backward of all micro-batches of a step but the last one."""
        return self._backward.accumulating()

    def _launch(self, bucket: B) -> None:
        """Sends a bucket whose gradients are all there."""
        raise NotImplementedError

    def _make_buckets(self, order: Sequence[int]) -> list[B]:
        """Parameters, in the order of their gradients, as buckets."""
        raise NotImplementedError

    def _overlaps(self) -> bool:
        """Whether buckets may leave before step() at present."""
        return self.overlap

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
                f"pass. {self._how_to_clip()}; for anything else build it with overlap=False"
            )

    def _how_to_clip(self) -> str:
        return "To clip them use clip="

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
        self.buckets = self._make_buckets(order)
        self._place = {i: at for at, bucket in enumerate(self.buckets) for i in bucket.indices}
        self._await_gradients()

    def _arrange_as(self, order: Sequence[int], sizes: Sequence[int]) -> None:
        """The buckets of a saved state."""
        self._arrange(order)
        if [len(bucket.indices) for bucket in self.buckets] != list(sizes):
            raise ValueError(
                f"{type(self).__name__}(bucket_mb={self.bucket_mb}) makes other buckets than the "
                "state was saved with, whose errors it holds; load it with the same bucket_mb, "
                "groups and late"
            )

    def _arrangement(self) -> State:
        return {
            "idle": sorted(self._idle),
            "order": [i for bucket in self.buckets for i in bucket.indices],
            "buckets": [len(bucket.indices) for bucket in self.buckets],
        }

    def _bucket(self, index: int) -> B:
        return self.buckets[self._place[index]]

    def _group_settings(self) -> State:
        """What all ranks must have been given alike, but for the learning rate."""
        groups = {
            str(number): {k: str(v) for k, v in group.items() if k not in ("params", "lr")}
            for number, group in enumerate(self.param_groups)
        }
        return {"bucket_mb": self.bucket_mb, "group": groups}

    # -- what all of them save --------------------------------------------------------------------

    def _described(self, kept: dict[int, dict[str, torch.Tensor]], more: State) -> State:
        """As torch's optimizers have it, and under "method" what is the method's own; a copy."""
        index = {id(p): i for i, p in enumerate(self._parameters)}
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            | {"params": [index[id(p)] for p in group["params"]]}
            for group in self.param_groups
        ]
        state = {
            i: {name: tensor.clone() for name, tensor in entries.items()}
            for i, entries in kept.items()
        }
        method = {"name": type(self).__name__} | self._arrangement() | more
        return {"state": state, "param_groups": groups, "method": method}

    def _check_described(self, saved: State) -> None:
        """Refuses the state of another method, or of other parameters."""
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

    def _check_shape(self, index: int, shape: torch.Size, wanted: torch.Size) -> None:
        if shape != wanted:
            raise ValueError(
                f"{type(self).__name__}: parameter {index} has shape {tuple(wanted)}, in the state "
                f"{tuple(shape)}; load it into the model it was saved with"
            )

    def _load_described(self, saved: State) -> None:
        """The settings of the groups, and the buckets; JSON has made lists of tuples."""
        for group, values in zip(self.param_groups, saved["param_groups"], strict=True):
            for key, value in values.items():
                if key != "params":
                    group[key] = tuple(value) if isinstance(value, list) else value
        method = saved["method"]
        self._idle = set(method["idle"])
        self._arrange_as(method["order"], method["buckets"])
