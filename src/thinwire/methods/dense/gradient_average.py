"""GradientAverage: data parallelism with a codec.

    g = mean_i C[g_i] ;   x = Inner(x, g)

Every step, in the caller's own optimizer, with the gradients of all replicas averaged in whatever
form the codec gives them. With the dense float32 codec this is plain data parallelism. All replicas
apply the same bits, so they stay equal. A step in which any replica's gradient is not finite is
skipped on all of them and counted.

[Note: overlap] Gradients leave in buckets, during the backward pass, if the caller's loop lets
them: each gradient computed once a step, and not touched before `average()` or `step()`. With
overlap="auto" the first step, whose buckets leave at its end, finds that out; a loop that
accumulates, clips its own gradients or scales its loss is then served without overlap. Ranks need
not agree on it: the order of the buckets is the same either way.

[Note: parameters without gradients] A parameter whose gradient is None on some replicas counts as
zero there. One that has none on any replica at this step keeps none, for to the inner optimizer a
gradient of zero is not the same (weight decay, moments): the agreement on those is in
methods/overlap/reducer.py.

[Note: sharded replicas] With FSDP2 every rank of a replica averages its own shard with its
counterparts in the other replicas. Whether a step is finite is decided by all of them together.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.flat import Flat, local_part
from thinwire.methods.base import Shown, WireOptimizer, require_wrapped
from thinwire.methods.engine import State
from thinwire.methods.overlap.bucket import Bucket, arrange, version
from thinwire.methods.overlap.engine import ReducingEngine
from thinwire.methods.overlap.reducer import GradientReducer
from thinwire.methods.session import Session
from thinwire.methods.shared.shards import Shards
from thinwire.optim.checks import refusal, require_codec
from thinwire.wire.codecs import Codec, Dense, Feedback
from thinwire.wire.ranks import Group


class GradientAverage(WireOptimizer):
    """Averages gradients over the replicas before each step of `inner`.

    With GradScaler, call `scaler.unscale_(optimizer)` before `average()`; `scaler.step(optimizer)`
    alone needs nothing.

    Args:
        inner: any torch optimizer over the model's parameters.
        codec: the form in which gradients travel. Change it when `account.exposed` is a large share
            of the run: Int8() first, then ErrorFeedback(Int4()), Threshold() for the thinnest
            links.
        bucket_mb: size of the buckets in MB of float32; about four of them by default. Raise it on
            links with a long delay, lower it when the backward pass ends long before the network.
        overlap: send buckets during the backward pass. "auto" does if the first step shows that
            the loop allows it; True refuses loops that do not.
        group: a ProcessGroup or one dimension of a DeviceMesh; all ranks by default.
    """

    engine: "AveragingEngine"
    codec = Shown[Codec | Feedback]("codec", "The form in which gradients travel.")
    overlap = Shown[bool]("reducer.overlap", "Whether buckets leave during the backward pass.")
    buckets = Shown[list[Bucket]]("reducer.buckets", "What travels together.")

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        codec: Codec | Feedback | None = None,
        bucket_mb: float | None = None,
        overlap: bool | Literal["auto"] = "auto",
        group: Group = None,
    ) -> None:
        require_codec("GradientAverage", "codec", codec)
        auto = isinstance(overlap, str) and overlap == "auto"
        if not auto and not isinstance(overlap, bool):
            raise refusal("GradientAverage", "overlap", 'True, False or "auto"', overlap)
        require_wrapped("GradientAverage", inner)
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = AveragingEngine(
            self.session, codec, bucket_mb=bucket_mb, overlap=overlap is True, auto=auto
        )

    def average(self) -> bool:
        """Averages the gradients now, for callers that clip or look at them before `step()`.

        Returns whether they are finite on every replica; `step()` skips if they are not.
        """
        return self.engine.average()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.engine.dropped()


class AveragingEngine(ReducingEngine[Bucket]):
    """Buckets of gradients out, their means back into `.grad`, then a step of the inner one."""

    how_to_clip = "To clip the mean, do so between average() and step()"

    def __init__(
        self,
        session: Session,
        codec: Codec | Feedback | None,
        *,
        bucket_mb: float | None,
        overlap: bool,
        auto: bool,
    ) -> None:
        super().__init__(session)
        self.codec = codec or Dense(Flat(session.parameters).dtype)
        self._shards = Shards(session.parameters)
        self._own_width = codec is None  # every bucket in the width of its own parameters
        self._auto = auto
        self._watched: dict[int, tuple[float, ...]] = {}  # the first step's gradients as they came
        self._begun = False
        self._ahead = False  # the averaged gradients are already in place
        self._finite = True
        self.reducer = GradientReducer(session, self, bucket_mb=bucket_mb, overlap=overlap)

    def step(self) -> None:
        if not self._ahead:
            self.average()
        elif self.session.scale is not None:
            self._ahead = False
            raise RuntimeError(
                "the gradients were averaged while GradScaler's scale was still in them; call "
                "scaler.unscale_(optimizer) before optimizer.average()"
            )
        self._ahead = False
        if self._finite:
            self._inner().step()
        else:
            self.session.account.skipped += 1

    @torch.no_grad()
    def average(self) -> bool:
        self.require_same_start()
        self.reducer.require_usable_gradients()
        if not self._begun:
            self.reducer.begin()
        if self._auto:
            self._choose_overlap()
        self.reducer.launch_rest()
        self._finite = self.reducer.land()
        if self._finite:
            self._hand_over()
        self._ahead = True
        return self._finite

    def dropped(self) -> None:
        """The gradients have been zeroed."""
        self._ahead = False
        self._watched.clear()

    def _hand_over(self) -> None:
        """The averaged gradients to the parameters."""
        for bucket in self.buckets:
            means = zip(bucket.parameters, bucket.views(bucket.buffer), strict=True)
            for at, (parameter, mean) in enumerate(means):
                if at in bucket.resting:
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local_part(parameter.grad).copy_(mean)

    # -- what the reducer asks --------------------------------------------------------------------

    def make_buckets(self, order: Sequence[int], whole: bool = False) -> list[Bucket]:
        parameters = self.session.parameters
        kinds = [Flat([p]).dtype for p in parameters]
        buckets = []
        size = math.inf if whole else self.reducer.bucket_mb
        for members in arrange(order, parameters, kinds, size):
            bucket = Bucket(members, parameters)
            if isinstance(self.codec, Feedback):
                bucket.memory = self.codec.fresh(bucket.flat.sizes)
                bucket.memory.tentative = True  # a step is skipped for any bucket's sake
            buckets.append(bucket)
        return buckets

    def launch(self, bucket: Bucket) -> None:
        flat = self.session.unscaled(bucket.take_gradients())
        codec = bucket.memory or (Dense(flat.dtype) if self._own_width else self.codec)
        bucket.flight = self.wire.mean(flat, codec)

    def agreed(self, finite: bool) -> bool:
        return self._shards.all(finite)

    def rearranged(self) -> None:
        self._begun = bool(self.buckets)

    def gradient_seen(self, index: int) -> None:
        if self._ahead and self.may_overlap():
            raise RuntimeError(
                "a backward pass between average() and step(): its gradients would be added to "
                "the mean of this replica alone; call step() first, or zero_grad() to drop the "
                "mean"
            )
        if self._auto:  # a second gradient for the same parameter changes it
            again = index in self._watched
            self._watched[index] = () if again else _fingerprint(self.session.parameters[index])

    def _choose_overlap(self) -> None:
        """See [Note: overlap]."""
        parameters = self.session.parameters
        untouched = all(seen == _fingerprint(parameters[i]) for i, seen in self._watched.items())
        self.reducer.overlap = untouched and not self.session.scaling
        self._auto = False
        self._watched.clear()

    # -- state ------------------------------------------------------------------------------------

    def settings(self) -> State:
        bucket_mb = self.reducer.bucket_mb
        return {**super().settings(), "codec": repr(self.codec), "bucket_mb": bucket_mb}

    def method_state(self) -> State:
        """This replica's own; goes on bit for bit on as many ranks."""
        return self._state_with(self.own_errors(), self.wire.size) if self._begun else {}

    def portable_method_state(self) -> State:
        return self._state_with(self.portable_errors(), 0) if self._begun else {}

    def _state_with(self, errors: list[State], ranks: int) -> State:
        return self.reducer.arrangement() | {"errors": errors, "ranks": ranks}

    def load_method_state(self, state: State) -> None:
        self.reducer.abandon()
        self._ahead = False
        self.reducer.set_buckets([])
        if "order" in state:
            self.reducer.arrange_as(state["order"], state["buckets"], state.get("added", 0))
            self.load_errors(state["errors"], ranks=state["ranks"])

    def own_errors(self) -> list[State]:
        """Of this rank; for as many ranks."""
        return self._of_feedback(lambda feedback: feedback.state_dict())

    def portable_errors(self) -> list[State]:
        """The same on every rank, and for any number of them. A collective: all ranks call it."""
        size, rank, wire = self.wire.size, self.wire.rank, self.session.evaluation
        return self._of_feedback(
            lambda f: f.portable_state(lambda error: wire.mean(error).wait(), size, rank)
        )

    def load_errors(self, errors: list[State], *, ranks: int) -> None:
        """Errors as `own_errors` gave them on so many ranks, or portable ones (0)."""
        if ranks not in (0, self.wire.size):
            raise ValueError(
                f"this state holds the errors of one of {ranks} ranks, and here are "
                f"{self.wire.size}; save with portable_state_dict(), which loads on any number"
            )
        for bucket, saved in zip(self.buckets, errors, strict=True):
            if bucket.memory is None:
                continue
            copies = {
                name: value.to(bucket.buffer.device, copy=True)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in saved.items()
            }
            if ranks == 0:
                bucket.memory.load_portable_state(copies, self.wire.size, self.wire.rank)
            else:
                bucket.memory.load_state_dict(copies)

    def _of_feedback(self, get: Callable[[Feedback], State]) -> list[State]:
        """An entry for every bucket; an empty one where the codec has no memory."""
        return [{} if b.memory is None else get(b.memory) for b in self.buckets]


def _fingerprint(parameter: Tensor) -> tuple[float, ...]:
    """The sum sees what the version does not: GradScaler.unscale_ writes past that."""
    gradient = parameter.grad
    return (0.0,) if gradient is None else (*version(parameter), float(local_part(gradient).sum()))
