"""Departures: methods that send buckets during the backward pass.

[Note: unused parameters] A parameter that has a gradient on some ranks counts as one of zeros on
the others. One that has none on any rank is left alone, as torch's optimizers do: a frozen layer, a
branch that was not taken. Every step ends with one byte for each parameter to every other rank, by
which all of them know the parameters in use; it arrives while the last bucket is on its way.

A parameter joins the buckets at the first step at which any rank has a gradient for it, in buckets
of its own, which are sent and landed in that step. So it does not matter when it begins to be
trained.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

from thinwire.errors import UsageError
from thinwire.optim.base import WireOptimizer
from thinwire.optim.buckets import Backward, Bucket
from thinwire.optim.checks import require_bool, require_dense_gradient, require_positive
from thinwire.wire.flight import Flight

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
        self._added = 0  # buckets, the last ones, of parameters that were not used at first
        self._place: dict[int, int] = {}  # parameter -> its bucket's position
        self._missing: list[set[int]] = []  # gradients each bucket still waits for
        self._launched = 0  # buckets already in the air, in [Note: order of buckets]
        self._probed = 0  # steps, see [Note: changes past the versions]
        self._usage: Flight | None = None  # see [Note: unused parameters]
        self._backward = Backward(self._parameters, self._gradient_ready)

    def accumulating(self) -> AbstractContextManager[None]:
        """Around forward and backward of all micro-batches of a step but the last one."""
        return self._backward.accumulating()

    def _launch(self, bucket: B) -> None:
        """Sends a bucket whose gradients are all there."""
        raise NotImplementedError

    def _make_buckets(self, order: Sequence[int], whole: bool = False) -> list[B]:
        """Parameters, in the order of their gradients, as buckets; as a single one if `whole`."""
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
        while self._launched < len(self.buckets) and self._complete(self._launched):
            bucket = self.buckets[self._launched]
            for parameter in bucket.parameters:
                require_dense_gradient(type(self).__name__, parameter)
            self._launch(bucket)
            bucket.note_gradients(self._probed)
            self._launched += 1

    def _complete(self, position: int) -> bool:
        """Whether no gradient of a bucket can still come in this pass."""
        return not any(self._parameters[i].requires_grad for i in self._missing[position])

    def _launch_rest(self) -> None:
        for bucket in self.buckets[self._launched :]:
            self._launch(bucket)
        self._ask_usage()
        self._await_gradients()

    def _ask_usage(self) -> None:
        """After all buckets: some ranks have launched more of those early than others."""
        self._usage = self.wire.union([p.grad is not None for p in self._parameters])

    def _await_gradients(self) -> None:
        self._launched = 0
        self._missing = [set(bucket.indices) for bucket in self.buckets]
        self._backward.watch()

    def _land(self) -> bool:
        """Waits for all buckets; whether all of them are finite, the same on every rank."""
        used = self._landed_usage()
        finite = self._landed(self.buckets)
        if new := sorted(used - self._place.keys()):
            finite = self._landed(self._admit(new)) and finite
        finite = self._agreed(finite)
        for bucket in self.buckets:
            bucket.commit(finite, used)
        return finite

    def _landed_usage(self) -> set[int]:
        """The parameters that any rank has a gradient for; empty ones never count."""
        assert self._usage is not None
        flags, self._usage = self._usage.wait().tolist(), None
        return {i for i, flag in enumerate(flags) if flag and self._parameters[i].numel()}

    def _landed(self, buckets: Sequence[B]) -> bool:
        finite = True
        for bucket in buckets:
            assert bucket.flight is not None
            bucket.flight.wait()
            finite = bucket.flight.finite and finite
            bucket.flight = None
        return finite

    def _admit(self, indices: Sequence[int]) -> Sequence[B]:
        """Buckets for parameters used for the first time, by all ranks alike, and in the air."""
        added = self._make_buckets(indices)
        self._added += len(added)
        self._set_buckets([*self.buckets, *added])
        for bucket in added:
            self._launch(bucket)
        return added

    def _abandon(self) -> None:
        """Lands and drops what is in the air, before another state takes its place: a flight that
        comes later would write into it."""
        for flight in [*(bucket.flight for bucket in self.buckets), self._usage]:
            if flight is not None:
                flight.wait()
        for bucket in self.buckets:
            bucket.flight = None
            bucket.commit(False, ())
        self._usage = None
        self._launched = 0

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
        changed = [bucket.gradients_changed(self._probed) for bucket in early]
        self._probed += bool(early)
        if any(changed):
            raise RuntimeError(
                f"{name}: gradients were changed after they had been sent during the backward "
                f"pass. {self._how_to_clip()}; for anything else build it with overlap=False"
            )

    def _how_to_clip(self) -> str:
        return "To clip them use clip="

    # -- the start --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """At the first step everybody takes rank 0's order of the parameters that are used."""
        used = [float(p.grad is not None and p.numel() > 0) for p in self._parameters]
        order = [i for i in self._backward.order if used[i]]
        order += [i for i in reversed(range(len(used))) if i not in self._backward.order]
        first, used = self._agree_on_start(",".join(map(str, order)), used)
        known = _distinct(first, len(used))
        known += [i for i in range(len(used)) if i not in known]
        self._arrange([i for i in known if used[i]])

    def _agree_on_start(self, order: str, used: list[float]) -> tuple[str, list[float]]:
        return self.wire.gather_bytes(order.encode())[0].decode(), self.wire.agree(used)

    def _arrange(self, order: Sequence[int]) -> None:
        resting = self._resting()
        self._added = 0
        self._set_buckets(self._make_buckets(order))
        for bucket in self.buckets:
            bucket.rests(resting)

    def _resting(self) -> set[int]:
        """The parameters in buckets that no rank had a gradient for at the last step."""
        return {bucket.indices[at] for bucket in self.buckets for at in bucket.resting}

    def _set_buckets(self, buckets: Sequence[B]) -> None:
        self.buckets = list(buckets)
        self._place = {i: at for at, bucket in enumerate(buckets) for i in bucket.indices}
        self._await_gradients()

    def _arrange_as(self, order: Sequence[int], sizes: Sequence[int], added: int) -> None:
        """The buckets of a saved state: those of the first step, and those that were added."""
        members, at = [], 0
        for size in sizes:
            members.append(list(order[at : at + size]))
            at += size
        first = len(members) - added
        self._arrange([i for bucket in members[:first] for i in bucket])
        if [bucket.indices for bucket in self.buckets] != members[:first]:
            raise ValueError(
                f"{type(self).__name__}(bucket_mb={self.bucket_mb}) makes other buckets than the "
                "state was saved with, whose errors it holds; load it with the same bucket_mb, "
                "groups and late"
            )
        for indices in members[first:]:
            self._set_buckets([*self.buckets, *self._make_buckets(indices, whole=True)])
        self._added = added

    def _arrangement(self) -> State:
        return {
            "order": [i for bucket in self.buckets for i in bucket.indices],
            "buckets": [len(bucket.indices) for bucket in self.buckets],
            "added": self._added,
            "resting": sorted(self._resting()),
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
        self._arrange_as(method["order"], method["buckets"], method.get("added", 0))
        for bucket in self.buckets:
            bucket.rests(method.get("resting", ()))


def _distinct(order: str, count: int) -> list[int]:
    """The order that rank 0 has sent, if it is one of parameters: an index that came twice would be
    averaged twice."""
    found = [int(i) for i in order.split(",") if i.isdecimal()]
    if len(set(found)) != len(found) or any(i >= count for i in found):
        raise UsageError(f"rank 0 sent no order of {count} parameters: {order[:80]!r}")
    return found
