"""OneBitOptimizer: the two stages that 1-bit Adam and 1-bit LAMB share.

    warm-up      g = mean_i g_i, dense ;  the method's own update of m, v and x
    freeze       v is kept from here on, lifted to a floor:  v = max(v, FLOOR mean(v)) per bucket
    compressed   M = compressed mean of (b1 m + (1-b1) g_i) ;  the method's update with v frozen

A method is `_update_dense`, `_payload` and `_update_frozen`; when things are sent, skipped, clipped
and frozen is here. Groups with compress=False stay in the first stage.

[Note: floor] A value that saw hardly any gradient before the freeze has v near 0, but its share of
the one-bit momentum is as large as any other's: divided by sqrt(v) it would grow without limit.

[Note: clipping] Dense: by the norm of the mean gradient, as data parallelism does. Compressed: no
rank knows that norm, so all use sqrt(mean_i ||g_i||²), one number in a reduction of its own. It is
known only after the whole backward pass, so with `clip` compressed buckets are launched by step().

[Note: nodes] With `inside`, gradients are averaged densely inside a node first. Each of its L ranks
then sends its own Lth of a bucket between the nodes, with the ranks that have the same part there,
and the parts meet again inside: the traffic between nodes divides by L. Bucket k-1 is passed on
between the nodes when bucket k is launched, so both wires keep one order on all ranks.

[Note: skipped steps] A NaN or an infinity on any rank makes the mean of its bucket one on all
ranks. All buckets have landed before anything is changed: a step is taken everywhere or nowhere.
"""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.bucketed import BucketedOptimizer, State
from thinwire.optim.buckets import Bucket
from thinwire.optim.checks import require_count, require_positive
from thinwire.optim.freeze import FreezeRule
from thinwire.optim.node import Node
from thinwire.wire.agreement import require_same, require_same_values
from thinwire.wire.codecs import Codec
from thinwire.wire.wire import Group

FLOOR = 0.01


class OneBitOptimizer(BucketedOptimizer):
    """See `OneBitAdam` for the settings."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        freeze_at: int | None,
        clip: float | None,
        dense: Codec | None,
        bucket_mb: float | None,
        overlap: bool,
        group: Group,
        inside: Group = None,
    ) -> None:
        name = type(self).__name__
        if freeze_at is not None:
            require_count(name, "freeze_at", freeze_at)
        if clip is not None:
            require_positive(name, "clip", clip)
        if dense is not None and not isinstance(dense, Codec):
            raise ValueError(
                f"{name}(dense=...) takes a codec without memory, such as Dense(torch.bfloat16), "
                f"got {dense!r}"
            )
        super().__init__(params, defaults, bucket_mb=bucket_mb, overlap=overlap, group=group)
        self.freeze_at, self.clip, self.dense = freeze_at, clip, dense
        self.frozen_at: int | None = None
        """The step after which the variance was frozen; None in the warm-up."""
        self.grad_norm = math.nan
        """By which the last step was clipped, see [Note: clipping]; this rank's own without it."""
        self._rule = FreezeRule(max(g["betas"][1] for g in self.param_groups))
        self._nodes = None if inside is None else Node(inside, f"{name} inside")
        self._waiting: Bucket | None = None  # for its mean inside the node
        self._factor = 1.0  # on the gradients of this step, before they are compressed

    @property
    def compressing(self) -> bool:
        """Whether the variance is frozen and momentum travels in one bit."""
        return self.frozen_at is not None

    @torch.no_grad()
    def _step(self) -> None:
        self._require_usable_gradients()
        if not self.buckets:
            self._begin()
        if self.compressing:
            self._measure()
        self._launch_rest()
        if not self._land():
            self.grad_norm = math.nan
            return
        self.steps += 1
        square = 0.0 if self.compressing else self._clip_mean()
        for bucket in self.buckets:
            if self._frozen(bucket):
                self._update_frozen(bucket)
            else:
                self._update_dense(bucket)
        if not self.compressing and self._due(square):
            self._freeze()

    def _launch(self, bucket: Bucket) -> None:
        self._unscaled(bucket.take_gradients())
        if self._frozen(bucket) and self._factor != 1.0:
            bucket.buffer.mul_(self._factor)
        if self._nodes is None:
            self._send(bucket, bucket.buffer)
            return
        bucket.flight = self._nodes.wire.mean(bucket.buffer)
        self._pass_on()
        self._waiting = bucket

    def _pass_on(self) -> None:
        """See [Note: nodes]."""
        bucket, self._waiting = self._waiting, None
        if bucket is not None and self._nodes is not None and bucket.flight is not None:
            bucket.flight.wait()
            self._send(bucket, self._nodes.part(bucket.buffer))

    def _send(self, bucket: Bucket, part: Tensor) -> None:
        if self._frozen(bucket):
            self._payload(bucket)
            bucket.flight = self.wire.mean(part, bucket.feedback)
        else:
            bucket.flight = self.wire.mean(part, self.dense)

    def _launch_rest(self) -> None:
        super()._launch_rest()
        self._pass_on()

    def _land(self) -> bool:
        if self._nodes is not None:
            self._nodes.reunite(self.buckets)
        return super()._land()

    def _frozen(self, bucket: Bucket) -> bool:
        return self.compressing and bucket.compress

    def _overlaps(self) -> bool:
        return self.overlap and not (self.compressing and self.clip is not None)

    # -- what a method defines --------------------------------------------------------------------

    def _update_dense(self, bucket: Bucket) -> None:
        """The mean gradient is in the bucket's buffer."""
        raise NotImplementedError

    def _payload(self, bucket: Bucket) -> None:
        """This rank's gradient is in the buffer; what is to be averaged takes its place."""
        b1 = bucket.betas[0]
        bucket.buffer.mul_(1 - b1).add_(bucket.m, alpha=b1)

    def _update_frozen(self, bucket: Bucket) -> None:
        """The mean of the payloads is in the bucket's buffer."""
        raise NotImplementedError

    def _freeze_bucket(self, bucket: Bucket) -> None:
        """See [Note: floor]. The bias correction of this step stays in v."""
        bucket.v.div_(self._corrections(bucket)[1])
        bucket.v.clamp_(min=FLOOR * float(bucket.v.mean()))

    # -- what methods share -----------------------------------------------------------------------

    def _average_moments(self, bucket: Bucket) -> None:
        """m and v with the mean gradient in the buffer."""
        b1, b2 = bucket.betas
        bucket.m.lerp_(bucket.buffer, 1 - b1)
        bucket.v.mul_(b2).addcmul_(bucket.buffer, bucket.buffer, value=1 - b2)

    def _corrections(self, bucket: Bucket) -> tuple[float, float]:
        """What m and v are divided by; a frozen v holds its correction."""
        if not bucket.groups[0]["bias_correction"]:
            return 1.0, 1.0
        b1, b2 = bucket.betas
        frozen = bucket.compress and self.frozen_at is not None and self.frozen_at < self.steps
        return 1 - b1**self.steps, 1.0 if frozen else 1 - b2**self.steps

    def _directions(self, bucket: Bucket) -> list[Tensor]:
        """m̂ / (sqrt(v̂) + eps) of every tensor, in the buffer."""
        first, second = self._corrections(bucket)
        torch.sqrt(bucket.v, out=bucket.buffer)
        views = bucket.views(bucket.buffer)
        for view, m, group in zip(views, bucket.views(bucket.m), bucket.groups, strict=True):
            view.div_(math.sqrt(second)).add_(group["eps"])
            torch.div(m, view, out=view).div_(first)
        return views

    def _used(self, bucket: Bucket) -> Iterable[tuple[int, Tensor, dict[str, Any]]]:
        """(position, parameter, its group) of the tensors that have had a gradient."""
        for at, index in enumerate(bucket.indices):
            if index not in self._idle:
                yield at, bucket.parameters[at], bucket.groups[at]

    # -- clipping ---------------------------------------------------------------------------------

    def _measure(self) -> None:
        """The norm of this step's gradients before they are compressed, and what it asks for."""
        scale = 1.0 if self._scale is None else float(self._scale)
        square = squared_norm([p.grad for p in self._parameters if p.grad is not None]) / scale**2
        self._factor = 1.0
        if self.clip is None:
            self.grad_norm = math.sqrt(square) if square >= 0 else math.nan
            return
        total, count = square, self.wire.size
        if self._nodes is not None:
            total = self._nodes.wire.agree([total], "sum")[0]
            count *= self._nodes.wire.size
        total = self.wire.agree([total], "sum")[0]
        self.grad_norm = math.sqrt(total / count) if total >= 0 else math.nan
        # One that is not finite scales nothing: all ranks will find the payloads so, and skip.
        if self.clip < self.grad_norm < math.inf:
            self._factor = self.clip / self.grad_norm

    def _clip_mean(self) -> float:
        """Clips the mean gradients in the buffers; their squared norm before that."""
        square = squared_norm([bucket.buffer for bucket in self.buckets])
        self.grad_norm = math.sqrt(square)
        self._idle = self._still_idle()
        if self.clip is not None and self.grad_norm > self.clip:
            for bucket in self.buckets:
                bucket.buffer.mul_(self.clip / self.grad_norm)
        return square

    # -- the freeze -------------------------------------------------------------------------------

    def _due(self, square: float) -> bool:
        lr = max(float(group["lr"]) for group in self.param_groups)
        settled = self._rule.observe(square, lr)
        return settled if self.freeze_at is None else self.steps >= self.freeze_at

    def _freeze(self) -> None:
        self.frozen_at = self.steps
        if self._idle:  # they would get their share of the one-bit noise, and no gradient
            self._arrange([i for b in self.buckets for i in b.indices if i not in self._idle])
        for bucket in self.buckets:
            if bucket.compress:
                self._freeze_bucket(bucket)
        self._show_state()

    def _require_usable_gradients(self) -> None:
        super()._require_usable_gradients()
        if not self.compressing:
            return
        for index in self._idle:
            gradient = self._parameters[index].grad
            if gradient is not None and bool(gradient.any()):
                raise RuntimeError(
                    f"{type(self).__name__}: parameter {index} of shape {tuple(gradient.shape)} "
                    "got its first gradient after the variance was frozen, and has none; put it "
                    "into a group with compress=False, or set freeze_at= later"
                )

    def finish(self) -> None:
        if self.freeze_at is not None and not self.compressing:
            warnings.warn(
                f"{type(self).__name__}(freeze_at={self.freeze_at}): the run ended after "
                f"{self.steps} steps, all of them dense; set freeze_at below that, or leave it out",
                stacklevel=2,
            )

    def _check_start(self) -> None:
        if self._nodes is not None:
            require_same(self._nodes.wire, self._settings())
            require_same_values(self._nodes.wire, self._parameters, "the weights at the first step")
        super()._check_start()

    def _agree_on_start(self, order: str, used: list[float]) -> tuple[str, list[float]]:
        if self._nodes is not None:
            order = self._nodes.wire.gather_bytes(order.encode())[0].decode()
            used = self._nodes.wire.agree(used)
        return super()._agree_on_start(order, used)

    def portable_errors(self) -> list[State]:
        if self._nodes is not None:
            raise RuntimeError(
                "with inside= each rank keeps the errors of its own part: save state_dict() of "
                "each rank, and resume on as many"
            )
        return super().portable_errors()

    def _settings(self) -> dict[str, Any]:
        own = {"freeze_at": self.freeze_at, "clip": self.clip, "dense": repr(self.dense)}
        return super()._settings() | own

    def _kept(self) -> State:
        return {"frozen_at": self.frozen_at, "rule": self._rule.state_dict()}

    def _restore(self, kept: State) -> None:
        self.frozen_at = kept["frozen_at"]
        self._rule.load_state_dict(kept["rule"])


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """The squared norm of them all; one wait for the device."""
    norms = [torch.linalg.vector_norm(t.float()).double() for t in tensors]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
