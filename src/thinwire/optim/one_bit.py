"""OneBitOptimizer: the two stages that 1-bit Adam and 1-bit LAMB share.

    warm-up      g = mean_i g_i, dense ;  the method's own update of m, v and x
    freeze       v is kept from here on, lifted to a floor:  v = max(v, FLOOR mean(v)) per bucket
    compressed   M = compressed mean of (b1 m + (1-b1) g_i) ;  the method's update with v frozen

A method says how m and v learn and how the weights move; when things are sent, skipped, clipped and
frozen is here. Groups with compress=False stay in the first stage. With `shard_state` every rank
keeps m and v of its own part alone, and the compressed stage is another: owners.py.

[Note: floor] A value that saw hardly any gradient before the freeze has v near 0, but its share of
the one-bit momentum is as large as any other's: divided by sqrt(v) it would grow without limit.

[Note: clipping] Dense: by the norm of the mean gradient, as data parallelism does. Compressed: no
rank knows that norm; all estimate it from mean_i ||g_i||², one number in a reduction of its own,
and from what the two had to do with each other at the last dense steps: mean_norm.py. It is known
only after the whole backward pass, so with `clip` compressed buckets are launched by step().

[Note: nodes] With `inside`, gradients are averaged densely inside a node first. Each of its L ranks
then sends its own Lth of a bucket between the nodes, with the ranks that have the same part there,
and the parts meet again inside: the traffic between nodes divides by L. Bucket k-1 is passed on
between the nodes when bucket k is launched, so both wires keep one order on all ranks.

[Note: late] With `late` the momentum of backward pass t is used by the step after pass t+1: its
exchange has a whole step of compute to hide behind, and nothing waits for the last bucket. Most of
what is on its way is known, m_t = b1 m_(t-1) + (1-b1) g_t, so the weights are kept that far ahead:

    X_(t+1) = X_t - lr m_t / w ;   x = X - lr b1 m / w     gradients are those at x; w = sqrt(v)+eps
    x = x - lr ((1 + b1) m_t - b1 m_(t-1)) / w             when m_t has landed, on all ranks alike

Pass t+1 lands m_t before its own first bucket leaves, whose payload is made from it. finish() takes
the last step and goes back to X. What has landed and was not used yet is saved as such, so that a
resumed run goes on as if it had not been stopped. The norm to clip by is not waited for either: the
payloads are made, in a thread of the wire, when it has arrived.

[Note: skipped steps] A NaN or an infinity on any rank makes the mean of its bucket one on all
ranks. All buckets have landed before anything is changed: a step is taken everywhere or nowhere.
"""

import math
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.bucketed import BucketedOptimizer
from thinwire.optim.checks import (
    require_bool,
    require_codec,
    require_count,
    require_group,
    require_positive,
)
from thinwire.optim.departures import State
from thinwire.optim.freeze import FreezeRule
from thinwire.optim.mean_norm import MeanNorm, shortening
from thinwire.optim.moment_bucket import MomentBucket
from thinwire.optim.node import Node
from thinwire.optim.owners import Owners
from thinwire.wire.agreement import require_same, require_same_values
from thinwire.wire.codecs import Codec, Dense
from thinwire.wire.flight import Flight
from thinwire.wire.scratch import Scratch
from thinwire.wire.wire import Group

FLOOR = 0.01
_scratch = Scratch()


class OneBitOptimizer(BucketedOptimizer):
    """See `OneBitAdam` for the settings."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        freeze_at: int | None = None,
        clip: float | None = None,
        dense: Codec | None = None,
        bucket_mb: float | None = None,
        overlap: bool = True,
        group: Group = None,
        inside: Group = None,
        shard_state: bool = False,
        late: bool = False,
    ) -> None:
        name = type(self).__name__
        if freeze_at is not None:
            freeze_at = require_count(name, "freeze_at", freeze_at)
        if clip is not None:
            clip = require_positive(name, "clip", clip)
        require_codec(name, "dense", dense, memory=False, why="the warm-up's errors end with it")
        require_group(name, "inside", inside)
        shard_state = require_bool(name, "shard_state", shard_state)
        late = require_bool(name, "late", late)
        if shard_state:
            self._check_sharding(name, dense, inside, late)
        super().__init__(params, defaults, bucket_mb=bucket_mb, overlap=overlap, group=group)
        self.freeze_at, self.clip, self.dense, self.late = freeze_at, clip, dense, late
        self.frozen_at: int | None = None
        """The step after which the variance was frozen; None in the warm-up."""
        self.grad_norm = math.nan
        """By which the last step was clipped, see [Note: clipping]; this rank's own without it.
        With `late` and `clip` that of the step before."""
        self._rule = FreezeRule(max(g["betas"][1] for g in self.param_groups))
        self._nodes = None if inside is None else Node(inside, f"{name} inside")
        self._norms = MeanNorm(self.wire, self._nodes)
        self._waiting: MomentBucket | None = None  # for its mean inside the node
        self._owners = Owners(self.wire, dense) if shard_state else None
        self._factor = 1.0  # on the gradients of this step, before they are compressed
        self._square = 0.0  # of the mean gradient's norm at this step
        self._squares: Flight | None = None  # sum_i ||g_i||² on its way, with `clip` and `late`
        # See [Note: late]: in the air; landed and not used yet; the weights are ahead.
        self._away = self._arrived = self._leaning = False

    @property
    def compressing(self) -> bool:
        """Whether the variance is frozen and one bit a value is sent."""
        return self.frozen_at is not None

    @torch.no_grad()
    def _step(self) -> None:
        self._require_usable_gradients()
        if not self.buckets:
            self._begin()
        if self.compressing:
            self._measure()
        self._launch_rest()
        spread = 0.0 if self.compressing else self._spread()
        if self.late and self.compressing:
            self._away = True
            self._catch_up()
            return
        self._stand()  # after a state that was saved with `late`
        if not self._land():
            self.grad_norm = math.nan
            return
        self.steps += 1
        if not self.compressing:
            self._clip_mean(spread)
        self._learn()
        self._move()
        if not self.compressing and self._due():
            self._freeze()

    # -- what travels -----------------------------------------------------------------------------

    def _launch(self, bucket: MomentBucket) -> None:
        self._arrive()
        self._unscaled(bucket.take_gradients())
        if self._factor != 1.0:
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

    def _send(self, bucket: MomentBucket, part: Tensor) -> None:
        if self._owners is not None and self._frozen(bucket):
            self._owners.send_bits(bucket, partial(self._make_direction, self.steps + 1))
        elif self._owners is not None:
            self._owners.send_gradients(bucket)
        elif self._squares is not None:
            codec = bucket.feedback if self._frozen(bucket) else self.dense
            prepare = partial(self._make_payload, bucket, self._squares, self.clip)
            bucket.flight = self.wire.mean(part, codec, prepare=prepare)
        elif self._frozen(bucket):
            self._payload(bucket)
            bucket.flight = self.wire.mean(part, bucket.feedback)
        else:
            bucket.flight = self.wire.mean(part, self.dense)

    @torch.no_grad()
    def _make_payload(self, bucket: MomentBucket, squares: Flight, clip: float | None) -> None:
        """In a thread of the wire: what `_launch` leaves undone while the norm is on its way."""
        factor = shortening(self._norms.polled(squares.peek()), clip)
        if factor != 1.0:
            bucket.buffer.mul_(factor)
        if self._frozen(bucket):
            self._payload(bucket)

    def _launch_rest(self) -> None:
        super()._launch_rest()
        self._pass_on()

    def _land(self) -> bool:
        if self._nodes is not None:
            self._nodes.reunite(self.buckets)
        return super()._land()

    @torch.no_grad()
    def _arrive(self) -> None:
        """Lands what left at the step before, see [Note: late]."""
        if not self._away:
            return
        self._away = False
        if self._squares is not None:
            self.grad_norm, self._squares = self._norms.polled(self._squares.wait()), None
        if self._land():
            self.steps += 1
            self._arrived = True
            for bucket in self.buckets:
                b1 = bucket.betas[0]
                torch.mul(bucket.m, -b1 if self._leaning else 0.0, out=bucket.ahead)
                self._learn_moments(bucket)
                bucket.ahead.add_(bucket.m, alpha=1 + b1)

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Takes the step of a momentum that has arrived."""
        if not self._arrived:
            return
        self._arrived, self._leaning = False, True
        for bucket in self.buckets:
            out = _scratch.take(bucket.buffer, "directions")
            self._direct(bucket, bucket.ahead, out, self.steps)
            self._move_bucket(bucket, out)

    @torch.no_grad()
    def _stand(self) -> None:
        """Takes the last step, and takes back what the weights are ahead."""
        self._arrive()
        if not (self._arrived or self._leaning):
            return
        for bucket in self.buckets:
            if not self._arrived:
                bucket.ahead.zero_()
            bucket.ahead.sub_(bucket.m, alpha=bucket.betas[0])
        self._arrived = True
        self._catch_up()
        self._leaning = False

    def _agreed(self, finite: bool) -> bool:
        """Also finds the norm of the mean gradients, and which parameters still have none."""
        dense = [bucket for bucket in self.buckets if not self._frozen(bucket)]
        if self.compressing and (self._owners is None or not dense):
            return finite  # everybody has seen the same bits
        idle = sorted(self._idle & self._place.keys())
        used = [float(self._has_gradient(index)) for index in idle]
        square = squared_norm([bucket.mine for bucket in dense]) if finite else 0.0
        if self._owners is not None:  # see [Note: verdicts] in owners.py
            bad, square, *used = self.wire.agree([float(not finite), square, *used], "sum")
            finite = not bad
        self._square = square
        if finite:
            self._idle -= {index for index, count in zip(idle, used, strict=True) if count}
        return finite

    def _has_gradient(self, index: int) -> bool:
        bucket = self._bucket(index)
        return bool(bucket.pieces(bucket.mine)[bucket.indices.index(index)].any())

    def _frozen(self, bucket: MomentBucket) -> bool:
        return self.compressing and bucket.compress

    def _count(self) -> int:
        """Nothing waits for the last bucket if `late`: then fewer ones disturb the compute less."""
        return 2 if self.late and self.compressing else 4

    def _overlaps(self) -> bool:
        return self.overlap and not (self.compressing and self.clip is not None)

    # -- what a method defines --------------------------------------------------------------------

    def _payload(self, bucket: MomentBucket) -> None:
        """This rank's gradient is in the buffer; what is to be averaged takes its place."""
        bucket.buffer.lerp_(bucket.m, bucket.betas[0])

    def _learn_frozen(self, bucket: MomentBucket) -> None:
        """The mean of the payloads is in the buffer."""
        bucket.m.copy_(bucket.buffer)

    def _move_dense(self, bucket: MomentBucket, directions: list[Tensor]) -> None:
        """Changes the weights of a bucket; `directions` may be overwritten."""
        raise NotImplementedError

    def _move_frozen(self, bucket: MomentBucket, directions: list[Tensor]) -> None:
        raise NotImplementedError

    def _freeze_bucket(self, bucket: MomentBucket) -> None:
        """See [Note: floor]. The bias correction of this step stays in v."""
        bucket.v.div_(self._corrections(bucket, self.steps)[1])
        mean = float(bucket.v.mean()) if self._owners is None else self._owners.equalise(bucket)
        bucket.v.clamp_(min=FLOOR * mean)

    # -- what methods share -----------------------------------------------------------------------

    def _learn(self) -> None:
        """m, v and, into the buffers of all ranks, the directions m̂ / (sqrt(v̂) + eps)."""
        for bucket in self.buckets:
            if self._owners is None or not self._frozen(bucket):  # its owners did it on the way
                self._learn_moments(bucket)
                self._direct_landed(bucket)
        if self._owners is not None:
            self._owners.spread([bucket for bucket in self.buckets if not self._frozen(bucket)])

    def _learn_moments(self, bucket: MomentBucket) -> None:
        if self._frozen(bucket):
            self._learn_frozen(bucket)
        else:
            self._average_moments(bucket)

    def _direct_landed(self, bucket: MomentBucket) -> None:
        """The direction into the buffer, right after m was learnt from it."""
        self._direct(bucket, bucket.m, bucket.mine, self.steps)

    def _move(self) -> None:
        for bucket in self.buckets:
            self._move_bucket(bucket, bucket.buffer)

    def _move_bucket(self, bucket: MomentBucket, directions: Tensor) -> None:
        move = self._move_frozen if self._frozen(bucket) else self._move_dense
        move(bucket, bucket.views(directions))

    def _make_direction(self, step: int, bucket: MomentBucket, mean: Tensor) -> Tensor:
        """An owner's d from the mean gradient of its part; see owners.py."""
        m = torch.lerp(bucket.m, mean, 1 - bucket.betas[0])
        bucket.tentative["exp_avg"] = m
        return self._direct(bucket, m, mean, step)

    def _average_moments(self, bucket: MomentBucket) -> None:
        """m and v with the mean gradient of the rank's own values in the buffer."""
        b1, b2 = bucket.betas
        bucket.m.lerp_(bucket.mine, 1 - b1)
        bucket.v.mul_(b2).addcmul_(bucket.mine, bucket.mine, value=1 - b2)

    def _corrections(self, bucket: MomentBucket, step: int) -> tuple[float, float]:
        """What m and v are divided by; a frozen v holds its correction."""
        if not bucket.groups[0]["bias_correction"]:
            return 1.0, 1.0
        b1, b2 = bucket.betas
        frozen = bucket.compress and self.frozen_at is not None and self.frozen_at < step
        return 1 - b1**step, 1.0 if frozen else 1 - b2**step

    def _direct(self, bucket: MomentBucket, m: Tensor, out: Tensor, step: int) -> Tensor:
        """m̂ / (sqrt(v̂) + eps) of this rank's own values."""
        first, second = self._corrections(bucket, step)
        if self._frozen(bucket):
            zero = out.new_zeros(())
            return torch.addcdiv(zero, m, bucket.roots(), value=1 / first, out=out)
        torch.sqrt(bucket.v, out=out)
        if second != 1.0:
            out.div_(math.sqrt(second))
        for piece, group in zip(bucket.pieces(out), bucket.groups, strict=True):
            piece.add_(group["eps"])
        return torch.div(m, out, out=out).div_(first)

    def _used(self, bucket: MomentBucket) -> Iterable[tuple[int, Tensor, dict[str, Any]]]:
        """(position, parameter, its group) of the tensors that have had a gradient."""
        for at, index in enumerate(bucket.indices):
            if index not in self._idle:
                yield at, bucket.parameters[at], bucket.groups[at]

    # -- clipping ---------------------------------------------------------------------------------

    def _squared_gradients(self) -> float:
        """||g_i||² of this rank."""
        scale = 1.0 if self._scale is None else float(self._scale)
        return squared_norm([p.grad for p in self._parameters if p.grad is not None]) / scale**2

    def _spread(self) -> float:
        """mean_i ||g_i||², where it is needed."""
        return 0.0 if self.clip is None else self._norms.spread(self._squared_gradients())

    def _measure(self) -> None:
        """The norm of this step's gradients before they are compressed, and what it asks for."""
        self._factor = 1.0
        if self.clip is None:
            square = self._squared_gradients()
            self.grad_norm = math.sqrt(square) if square >= 0 else math.nan
        elif self.late and self._nodes is None:
            self._arrive()
            self._squares = self._norms.poll(self._squared_gradients())
        else:
            self.grad_norm = self._norms.estimate(self._spread())
            self._factor = shortening(self.grad_norm, self.clip)

    def _clip_mean(self, spread: float) -> None:
        """Clips the mean gradients in the buffers; `spread` is mean_i ||g_i||²."""
        self.grad_norm = math.sqrt(self._square)
        if self.clip is None:
            return
        self._norms.observe(self._square, spread)
        if self.grad_norm > self.clip:
            for bucket in self.buckets:
                bucket.mine.mul_(self.clip / self.grad_norm)

    # -- the freeze -------------------------------------------------------------------------------

    def _due(self) -> bool:
        lr = max(float(group["lr"]) for group in self.param_groups)
        settled = self._rule.observe(self._square, lr)
        return settled if self.freeze_at is None else self.steps >= self.freeze_at

    def _freeze(self) -> None:
        self.frozen_at = self.steps
        # Without a gradient they would get their share of the noise. `late` has larger buckets.
        if self._idle or self.late:
            self._arrange([i for b in self.buckets for i in b.indices if i not in self._idle])
        for bucket in self.buckets:
            if bucket.compress:
                self._freeze_bucket(bucket)
            if self.late:
                torch.mul(bucket.m, bucket.betas[0], out=bucket.ahead)
        self._arrived = self.late
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
        self._stand()
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

    # -- shards -----------------------------------------------------------------------------------

    def _check_sharding(self, name: str, dense: Codec | None, inside: Group, late: bool) -> None:
        if late:
            raise ValueError(
                f"{name}(shard_state=True, late=True): with shards directions travel, which leave "
                "no momentum to wait with; leave one of the two out"
            )
        if dense is not None and not isinstance(dense, Dense):
            raise ValueError(
                f"{name}(shard_state=True) sends directions in the form of `dense`, which must not "
                f"lose them: it takes Dense(...) there, got {dense!r}"
            )
        if inside is not None:
            raise ValueError(
                f"{name}(shard_state=True, inside=...): the state is spread over one group of "
                "ranks; leave one of the two out"
            )

    def _ownership(self) -> dict[str, int]:
        if self._owners is None:
            return super()._ownership()
        return {"size": self.wire.size, "rank": self.wire.rank}

    def _whole_entries(self) -> dict[int, dict[str, Tensor]]:
        """With shards, or nodes and `late`, a collective: all ranks call it, and get the same."""
        self._arrive()
        entries = super()._whole_entries()
        if self._owners is None:
            return entries
        for bucket in self.buckets:
            for name, own in bucket.moments.items():
                whole = bucket.views(self._owners.whole(bucket, own, self.meeting))
                for index, view in zip(bucket.indices, whole, strict=True):
                    entries[index][name] = view
        return entries

    # -- state ------------------------------------------------------------------------------------

    def _layout(self) -> int | list[int]:
        return self.wire.size if self._nodes is None else [self.wire.size, self._nodes.wire.size]

    def _has_errors(self, bucket: MomentBucket) -> bool:
        here = super()._has_errors(bucket)
        if self._nodes is None:
            return here
        return bool(self._nodes.wire.agree([float(here)])[0])  # a rank's part may be empty

    def _sent(self, whole: Tensor) -> Tensor:
        return whole if self._nodes is None else self._nodes.part(whole)

    def _assembled(self, whole: Tensor) -> Tensor:
        return whole if self._nodes is None else self._nodes.whole(whole)

    def _settings(self) -> dict[str, Any]:
        own = {
            "freeze_at": self.freeze_at,
            "clip": self.clip,
            "dense": repr(self.dense),
            "shard_state": self._owners is not None,
            "late": self.late,
        }
        return super()._settings() | own

    def _kept(self) -> State:
        return {
            "frozen_at": self.frozen_at,
            "sharded": self._owners is not None,
            "rule": self._rule.state_dict(),
            "norms": self._norms.state_dict(),
            "arrived": self._arrived,
            "leaning": self._leaning,
        }

    def _restore(self, kept: State) -> None:
        sharded = kept.get("sharded", False)
        if kept["frozen_at"] is not None and sharded != (self._owners is not None):
            raise ValueError(
                f"{type(self).__name__}: the state was saved with shard_state={sharded} after the "
                "variance was frozen, when m and the errors mean another thing than with "
                f"shard_state={not sharded}; load it as it was saved"
            )
        self.frozen_at = kept["frozen_at"]
        self._away = False
        self._arrived, self._leaning = kept.get("arrived", False), kept.get("leaning", False)
        self._rule.load_state_dict(kept["rule"])
        self._norms.load_state_dict(kept.get("norms", {"dense": []}))


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """The squared norm of them all; one wait for the device."""
    norms = [torch.linalg.vector_norm(t.float()).double() for t in tensors]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
