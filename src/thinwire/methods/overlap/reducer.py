"""GradientReducer: sends buckets while the backward pass still runs, and lands them at step().

It decides *when* things travel; what a bucket's payload is, and which way it takes, is told by the
engine that holds the reducer (`ReducingEngine`, engine.py).

[Note: order of buckets] A bucket is launched when all of its gradients are there and every bucket
before it has been launched. The order is fixed, so all ranks issue the same transfers in the same
order, whichever gradients came first on each of them; what is left is launched by step(). Buckets
follow the order in which rank 0's first backward pass produced the gradients.

[Note: unused parameters] A parameter that has a gradient on some ranks counts as one of zeros on
the others. One that has none on any rank is left alone, as torch's optimizers do: a frozen layer, a
branch that was not taken. Every step ends with one byte for each parameter to every other rank, by
which all of them know the parameters in use; it arrives while the last bucket is on its way.

A parameter joins the buckets at the first step at which any rank has a gradient for it, in buckets
of its own, which are sent and landed in that step. So it does not matter when it begins to be
trained.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from thinwire.errors import UsageError
from thinwire.methods.overlap.backward import BackwardHooks
from thinwire.methods.overlap.bucket import Bucket
from thinwire.methods.overlap.route import Direct, Route
from thinwire.methods.session import Session
from thinwire.optim.checks import require_bool, require_dense_gradient, require_positive
from thinwire.wire.flight import Flight

if TYPE_CHECKING:
    from thinwire.methods.overlap.engine import ReducingEngine

State = dict[str, Any]
B = TypeVar("B", bound=Bucket)


class GradientReducer(Generic[B]):
    """
    buckets   in the order in which they are launched; empty before the first step
    place     parameter -> position of its bucket
    launched  how many of them are in the air already
    """

    def __init__(
        self,
        session: Session,
        engine: "ReducingEngine[B]",
        *,
        bucket_mb: float | None,
        overlap: bool,
        route: Route | None = None,
        asks_usage: bool = True,
    ) -> None:
        if bucket_mb is not None:
            bucket_mb = require_positive(session.name, "bucket_mb", bucket_mb)
        self.bucket_mb = bucket_mb
        self.overlap = require_bool(session.name, "overlap", overlap)
        self.route = route or Direct(session.wire)
        self.buckets: list[B] = []
        self.place: dict[int, int] = {}
        self.launched = 0
        self._session, self._asks_usage = session, asks_usage
        # It holds this reducer: without the proxy neither would be freed with the optimizer.
        self._engine: ReducingEngine[B] = weakref.proxy(engine)
        self._added = 0  # buckets, the last ones, of parameters that were not used at first
        self._missing: list[set[int]] = []  # gradients each bucket still waits for
        self._probed = 0  # steps, see [Note: changes past the versions] in bucket.py
        self._usage: Flight | None = None  # see [Note: unused parameters]
        self.hooks = BackwardHooks(session.parameters, self._gradient_ready)

    def accumulating(self) -> AbstractContextManager[None]:
        """Around forward and backward of all micro-batches of a step but the last one."""
        return self.hooks.accumulating()

    def bucket_of(self, index: int) -> B:
        return self.buckets[self.place[index]]

    # -- the backward pass ------------------------------------------------------------------------

    @torch.no_grad()
    def _gradient_ready(self, index: int) -> None:
        """Called by the backward pass: launches what can be."""
        self._engine.gradient_seen(index)
        position = self.place.get(index)
        if position is None or not self._session.checked or not self._engine.may_overlap():
            return
        if position < self.launched:
            raise RuntimeError(
                f"a second backward pass before step(): the gradient of parameter {index} is "
                "already on its way. Put all micro-batches but the last one under "
                "`with optimizer.accumulating():`, or build the optimizer with overlap=False"
            )
        self._missing[position].discard(index)
        while self.launched < len(self.buckets) and self._complete(self.launched):
            bucket = self.buckets[self.launched]
            for parameter in bucket.parameters:
                require_dense_gradient(self._session.name, parameter)
            self._engine.launch(bucket)
            bucket.note_gradients(self._probed)
            self.launched += 1

    def _complete(self, position: int) -> bool:
        """Whether no gradient of a bucket can still come in this pass."""
        parameters = self._session.parameters
        return not any(parameters[i].requires_grad for i in self._missing[position])

    # -- step() -----------------------------------------------------------------------------------

    def require_usable_gradients(self) -> None:
        """Refuses what cannot be honoured once buckets have left."""
        name, early = self._session.name, self.buckets[: self.launched]
        for parameter in self._session.parameters:
            require_dense_gradient(name, parameter)
        if early and self._session.scaling:
            raise RuntimeError(
                f"{name} sent gradients during the backward pass with GradScaler's scale still in "
                "them; build it with overlap=False, or train in bfloat16, which needs no scale"
            )
        changed = [bucket.gradients_changed(self._probed) for bucket in early]
        self._probed += bool(early)
        if any(changed):
            raise RuntimeError(
                f"{name}: gradients were changed after they had been sent during the backward "
                f"pass. {self._engine.how_to_clip}; for anything else build it with overlap=False"
            )

    def launch_rest(self) -> None:
        for bucket in self.buckets[self.launched :]:
            self._engine.launch(bucket)
        if self._asks_usage:
            # After all buckets: some ranks have launched more of those early than others.
            self.ask_usage([p.grad is not None for p in self._session.parameters])
        self._await_gradients()

    def ask_usage(self, flags: Sequence[bool]) -> None:
        """Tells all ranks which parameters this one has used."""
        self._usage = self.route.union(flags)

    def land(self) -> bool:
        """Waits for all buckets; whether all of them are finite, the same on every rank."""
        used = self._landed_usage()
        finite = self._landed(self.buckets)
        if new := sorted(used - self.place.keys()):
            finite = self._landed(self.admit(new)) and finite
        finite = self._engine.agreed(finite)
        for bucket in self.buckets:
            bucket.commit(finite, used)
        return finite

    def _landed_usage(self) -> set[int]:
        """The parameters that any rank has a gradient for; empty ones never count."""
        assert self._usage is not None
        flags, self._usage = self._usage.wait().tolist(), None
        parameters = self._session.parameters
        return {i for i, flag in enumerate(flags) if flag and parameters[i].numel()}

    def _landed(self, buckets: Sequence[B]) -> bool:
        self.route.before_landing(buckets)
        finite = True
        for bucket in buckets:
            assert bucket.flight is not None
            bucket.flight.wait()
            finite = bucket.flight.finite and finite
            bucket.flight = None
        return finite

    def admit(self, indices: Sequence[int]) -> Sequence[B]:
        """Buckets for parameters used for the first time, by all ranks alike, and in the air."""
        self._engine.admitting(indices)
        added = self._engine.make_buckets(indices)
        self._added += len(added)
        self.set_buckets([*self.buckets, *added])
        for bucket in added:
            self._engine.launch(bucket)
        return added

    def abandon(self) -> None:
        """Lands and drops what is in the air, before another state takes its place: a flight that
        comes later would write into it."""
        for flight in [*(bucket.flight for bucket in self.buckets), self._usage]:
            if flight is not None:
                flight.wait()
        for bucket in self.buckets:
            bucket.flight = None
            bucket.commit(False, ())
        self._usage = None
        self.launched = 0

    # -- buckets ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """At the first step everybody takes rank 0's order of the parameters that are used."""
        used = [float(flag) for flag in self._engine.used_at_first()]
        order = [i for i in self.hooks.order if used[i]]
        order += [i for i in reversed(range(len(used))) if i not in self.hooks.order]
        first, used = self.route.agree_on_start(",".join(map(str, order)), used)
        known = _distinct(first, len(used))
        known += [i for i in range(len(used)) if i not in known]
        self.arrange([i for i in known if used[i]])

    def arrange(self, order: Sequence[int]) -> None:
        """New buckets for parameters in this order, which take over what the old ones hold."""
        resting, before = self._resting(), self._engine.held()
        self._added = 0
        self.set_buckets(self._engine.make_buckets(order))
        for bucket in self.buckets:
            bucket.rests(resting)
        self._engine.take_over(before)

    def arrange_as(self, order: Sequence[int], sizes: Sequence[int], added: int) -> None:
        """The buckets of a saved state: those of the first step, and those that were added."""
        members, at = [], 0
        for size in sizes:
            members.append(list(order[at : at + size]))
            at += size
        first = len(members) - added
        self.arrange([i for bucket in members[:first] for i in bucket])
        if [bucket.indices for bucket in self.buckets] != members[:first]:
            raise ValueError(
                f"{self._session.name}(bucket_mb={self.bucket_mb}) makes other buckets than the "
                "state was saved with, whose errors it holds; load it with the same bucket_mb, "
                "groups and delayed_step"
            )
        for indices in members[first:]:
            self.set_buckets([*self.buckets, *self._engine.make_buckets(indices, whole=True)])
        self._added = added

    def arrangement(self) -> State:
        """What `arrange_as` needs, and which parameters rest."""
        return {
            "order": [i for bucket in self.buckets for i in bucket.indices],
            "buckets": [len(bucket.indices) for bucket in self.buckets],
            "added": self._added,
            "resting": sorted(self._resting()),
        }

    def set_buckets(self, buckets: Sequence[B]) -> None:
        self.buckets = list(buckets)
        self.place = {i: at for at, bucket in enumerate(buckets) for i in bucket.indices}
        self._await_gradients()
        self._engine.rearranged()

    def _resting(self) -> set[int]:
        """The parameters in buckets that no rank had a gradient for at the last step."""
        return {bucket.indices[at] for bucket in self.buckets for at in bucket.resting}

    def _await_gradients(self) -> None:
        self.launched = 0
        self._missing = [set(bucket.indices) for bucket in self.buckets]
        self.hooks.watch()


def _distinct(order: str, count: int) -> list[int]:
    """The order that rank 0 has sent, if it is one of parameters: an index that came twice would be
    averaged twice."""
    found = [int(i) for i in order.split(",") if i.isdecimal()]
    if len(set(found)) != len(found) or any(i >= count for i in found):
        raise UsageError(f"rank 0 sent no order of {count} parameters: {order[:80]!r}")
    return found
