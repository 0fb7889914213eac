"""OneBitOptimizer: the two stages that 1-bit Adam and 1-bit LAMB share.

    warm-up      g = mean_i g_i, dense ;  the method's own update of m, v and x
    freeze       v is kept from here on, lifted to a floor:  v = max(v, floor mean(v))
    compressed   M = compressed mean of (b1 m + (1-b1) g_i) ;  the method's update with v frozen

A method says how m and v learn and how the weights move; when things are sent, skipped, clipped and
frozen is here. Groups with compress=False stay in the first stage. With `shard_state` every rank
keeps m and v of its own part alone, and the compressed stage is another: owners.py.

[Note: floor] A value that saw hardly any gradient before the freeze has v near 0, but its share of
the one-bit momentum is as large as any other's: divided by sqrt(v) it would grow without limit. The
floor is a share of the mean of v over the values whose payloads are of one size: the tensor where
tensors are brought to one size before they share a scale, the bucket where they are not. (Over the
bucket it would lift all of a tensor with small gradients, such as a transformer's Q and K.) A
tensor that has seen no gradient at all takes the bucket's. The published methods have no floor:
`floor=0.0`.

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
from collections.abc import Iterable, Sequence
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
    require_share,
)
from thinwire.optim.departures import State
from thinwire.optim.flat import local_part
from thinwire.optim.freeze import FreezeRule
from thinwire.optim.mean_norm import MeanNorm, shortening
from thinwire.optim.moment_bucket import MomentBucket
from thinwire.optim.node import Node
from thinwire.optim.owners import Owners
from thinwire.optim.shards import Shards
from thinwire.wire.agreement import require_same, require_same_values
from thinwire.wire.codecs import Codec, Dense
from thinwire.wire.flight import Flight
from thinwire.wire.scratch import Scratch
from thinwire.wire.wire import Group

_scratch = Scratch()


class OneBitOptimizer(BucketedOptimizer):
    """See `OneBitAdam` for the settings."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        freeze_at: int | None = None,
        floor: float = 0.01,
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
        floor = require_share(name, "floor", floor)
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
        self.floor = floor
        self.frozen_at: int | None = None
        """The step after which the variance was frozen; None in the warm-up."""
        self.grad_norm = math.nan
        """By which the last step was clipped, see [Note: clipping]; this rank's own without it.
        With `late` and `clip` that of the step before."""
        self._rule = FreezeRule(max(g["betas"][1] for g in self.param_groups))
        self._shards = self._replica_shards(name, inside, shard_state)
        self._nodes = None if inside is None else Node(inside, f"{name} inside")
        self._latecomers: set[int] = set()  # first used after the freeze, and so without a variance
        self._norms = MeanNorm(self.wire, self._nodes)
        self._waiting: MomentBucket | None = None  # for its mean inside the node
        self._owners = Owners(self.wire, dense) if shard_state else None
        self._factor = 1.0  # on the gradients of this step, before they are compressed
        # Gradients of parameters in no bucket yet, by index: `late` launches them a step later.
        self._held: dict[int, Tensor] | None = None
        self._newcomers: dict[int, Tensor] = {}
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
        self._factor = 1.0
        if self.compressing:
            self._measure()
        self._launch_rest()
        spread = 0.0 if self.compressing else self._spread()
        if self.late and self.compressing:
            self._away, self._newcomers = True, self._unplaced_gradients()
            self._catch_up()
            return
        self._stand()  # after a state that was saved with `late`
        if not self._land():
            self.grad_norm = math.nan
            return
        self._count_step()
        if not self.compressing:
            self._clip_mean(spread)
        self._learn()
        self._move()
        if not self.compressing and self._due():
            self._freeze()

    def _count_step(self) -> None:
        self.steps += 1
        for bucket in self.buckets:
            bucket.count("step")

    # -- what travels -----------------------------------------------------------------------------

    def _launch(self, bucket: MomentBucket) -> None:
        self._arrive()
        bucket.take_betas()
        if self._held is None:
            self._unscaled(bucket.take_gradients())
        else:
            bucket.take_gradients(self._held)
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
            self._owners.send_bits(bucket, self._make_direction)
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

    def _ask_usage(self) -> None:
        self._pass_on()
        flags = [p.grad is not None for p in self._parameters]
        if self._nodes is not None:
            flags = self._nodes.wire.union(flags).wait().bool().tolist()
        self._usage = self.wire.union(flags)

    def _landed(self, buckets: Sequence[MomentBucket]) -> bool:
        if self._nodes is not None:
            self._pass_on()
            self._nodes.reunite(buckets)
        return super()._landed(buckets)

    def _admit(self, indices: Sequence[int]) -> Sequence[MomentBucket]:
        """After the freeze such a parameter stays dense: it has no variance to be frozen."""
        if self.compressing:
            self._latecomers |= set(indices)
            warnings.warn(
                f"{type(self).__name__}: parameters {list(indices)} got their first gradient after "
                "the variance was frozen; their gradients travel dense from here on, as in a group "
                "with compress=False",
                stacklevel=4,
            )
        return super()._admit(indices)

    def _compresses(self, index: int) -> bool:
        return super()._compresses(index) and index not in self._latecomers

    @torch.no_grad()
    def _arrive(self) -> None:
        """Lands what left at the step before, see [Note: late]."""
        if not self._away:
            return
        self._away, ours = False, self._factor  # of the step that is about to leave
        self._held, self._factor = self._newcomers, 1.0
        if self._squares is not None:
            self.grad_norm, self._squares = self._norms.polled(self._squares.wait()), None
            self._factor = shortening(self.grad_norm, self.clip)
        if self._land():
            self._count_step()
            self._arrived = True
            for bucket in self.buckets:
                self._look_ahead(bucket)
        self._held, self._factor = None, ours

    def _unplaced_gradients(self) -> dict[int, Tensor]:
        """Copies of the gradients that no bucket has room for; hardly ever there are any."""
        fresh = {i: p.grad for i, p in enumerate(self._parameters) if i not in self._place}
        return {
            i: self._unscaled(local_part(gradient).clone())
            for i, gradient in fresh.items()
            if gradient is not None
        }

    def _look_ahead(self, bucket: MomentBucket) -> None:
        """Learns m, and what the weights move by: by m, and from b1 m before to b1 m now."""
        leaned = bucket.scalar("leaned", 0.0).tolist()
        bucket.ahead.zero_()
        for part, before in bucket.runs(leaned.__getitem__):
            torch.mul(bucket.m[part], -before, out=bucket.ahead[part])
        self._learn_moments(bucket)
        for part, (b1, _) in bucket.runs(bucket.betas.__getitem__):
            bucket.ahead[part].add_(bucket.m[part], alpha=1 + b1)
        for at in set(range(len(leaned))) - bucket.resting:
            bucket.scalars["leaned"][at] = bucket.betas[at][0]

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Takes the step of a momentum that has arrived."""
        if not self._arrived:
            return
        self._arrived, self._leaning = False, True
        for bucket in self.buckets:
            out = _scratch.take(bucket.buffer, "directions")
            self._direct(bucket, bucket.ahead, out)
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
            bucket.resting = frozenset()  # tensors that rest go back as well
            leaned = bucket.scalar("leaned", 0.0)
            for part, b1 in bucket.runs(leaned.tolist().__getitem__):
                bucket.ahead[part].sub_(bucket.m[part], alpha=b1)
            leaned.zero_()
        self._arrived = True
        self._catch_up()
        self._leaning = False

    def _agreed(self, finite: bool) -> bool:
        """Also finds the norm of the mean gradients."""
        dense = [bucket for bucket in self.buckets if not self._frozen(bucket)]
        if self.compressing and (self._owners is None or not dense):
            return self._shards.all(finite)  # all replicas have seen the same bits
        square = squared_norm([bucket.mine for bucket in dense]) if finite else 0.0
        verdict = [float(not finite), square]
        if self._owners is not None:  # see [Note: verdicts] in owners.py
            verdict = self.wire.agree(verdict, "sum")
        bad, self._square = self._shards.sum(verdict)
        return not bad

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
        for part, (b1, _) in bucket.runs(bucket.betas.__getitem__, resting=True):
            bucket.buffer[part].lerp_(bucket.m[part], b1)

    def _learn_frozen(self, bucket: MomentBucket) -> None:
        """The mean of the payloads is in the buffer."""
        for part, _ in bucket.runs(lambda at: None):
            bucket.m[part] = bucket.buffer[part]

    def _move_dense(self, bucket: MomentBucket, directions: list[Tensor]) -> None:
        """Changes the weights of a bucket; `directions` may be overwritten."""
        raise NotImplementedError

    def _move_frozen(self, bucket: MomentBucket, directions: list[Tensor]) -> None:
        raise NotImplementedError

    def _freeze_bucket(self, bucket: MomentBucket) -> None:
        """See [Note: floor]. The bias correction of this step stays in v."""
        for part, second in bucket.runs(
            lambda at: self._variance_correction(bucket, at), resting=True
        ):
            bucket.v[part].div_(second)
        self._lift(bucket, bucket.v)

    def _lift(self, bucket: MomentBucket, variance: Tensor) -> None:
        """See [Note: floor]."""
        sums = torch.stack([piece.double().sum() for piece in bucket.pieces(variance)]).tolist()
        if self._owners is not None:
            sums = self._owners.equalise(bucket, sums)
            sizes = [float(size) for size in bucket.flat.sizes]
        else:
            totals = self._shards.sum([*sums, *map(float, bucket.flat.sizes)])
            sums, sizes = totals[: len(sums)], totals[len(sums) :]
        whole = sum(sums) / max(1.0, sum(sizes))
        each = self._one_size(bucket)
        for piece, total, size in zip(bucket.pieces(variance), sums, sizes, strict=True):
            piece.clamp_(min=self.floor * (total / size if each and total > 0 else whole))

    def _one_size(self, bucket: MomentBucket) -> bool:
        """Whether payloads of all tensors are brought to one size before they share a scale."""
        return self._owners is not None

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
        self._direct(bucket, bucket.m, bucket.mine)

    def _move(self) -> None:
        for bucket in self.buckets:
            self._move_bucket(bucket, bucket.buffer)

    def _move_bucket(self, bucket: MomentBucket, directions: Tensor) -> None:
        move = self._move_frozen if self._frozen(bucket) else self._move_dense
        move(bucket, bucket.views(directions))

    def _make_direction(self, bucket: MomentBucket, mean: Tensor) -> Tensor:
        """An owner's d from the mean gradient of its part; see owners.py."""
        m = bucket.m.clone()
        for part, (b1, _) in bucket.runs(bucket.betas.__getitem__, resting=True):
            m[part].lerp_(mean[part], 1 - b1)
        bucket.tentative["exp_avg"] = m
        return self._direct(bucket, m, mean, coming=1)

    def _average_moments(self, bucket: MomentBucket) -> None:
        """m and v with the mean gradient of the rank's own values in the buffer."""
        for part, (b1, b2) in bucket.runs(bucket.betas.__getitem__):
            g = bucket.mine[part]
            bucket.m[part].lerp_(g, 1 - b1)
            bucket.v[part].mul_(b2).addcmul_(g, g, value=1 - b2)

    def _correction(self, bucket: MomentBucket, at: int, coming: int = 0) -> float:
        """What m of a tensor is divided by, at its last step or `coming` ones later."""
        steps = bucket.counts["step"][at] + coming
        return 1 - bucket.betas[at][0] ** steps if bucket.groups[at]["bias_correction"] else 1.0

    def _variance_correction(self, bucket: MomentBucket, at: int) -> float:
        """What v of a tensor is divided by; a frozen one holds its correction."""
        steps = max(1, bucket.counts["step"][at])
        return 1 - bucket.betas[at][1] ** steps if bucket.groups[at]["bias_correction"] else 1.0

    def _direct(self, bucket: MomentBucket, m: Tensor, out: Tensor, coming: int = 0) -> Tensor:
        """m̂ / (sqrt(v̂) + eps) of this rank's own values, the last step's or one to come: then it
        is not yet known which tensors rest."""
        if self._frozen(bucket):
            zero, roots = out.new_zeros(()), bucket.roots()
            for part, first in bucket.runs(
                lambda at: self._correction(bucket, at, coming), resting=coming > 0
            ):
                torch.addcdiv(zero, m[part], roots[part], value=1 / first, out=out[part])
            return out
        torch.sqrt(bucket.v, out=out)
        for part, (first, second, eps) in bucket.runs(
            lambda at: (
                self._correction(bucket, at),
                self._variance_correction(bucket, at),
                bucket.groups[at]["eps"],
            )
        ):
            root = out[part]
            if second != 1.0:
                root.div_(math.sqrt(second))
            root.add_(eps)
            torch.div(m[part], root, out=root).div_(first)
        return out

    def _used(self, bucket: MomentBucket) -> Iterable[tuple[int, Tensor, dict[str, Any]]]:
        """(position, what this rank has of the parameter, its group) of the tensors in use."""
        for at, parameter in enumerate(bucket.parameters):
            if at not in bucket.resting:
                yield at, local_part(parameter), bucket.groups[at]

    # -- clipping ---------------------------------------------------------------------------------

    def _squared_gradients(self) -> float:
        """||g_i||² of this rank."""
        scale = 1.0 if self._scale is None else float(self._scale)
        gradients = [local_part(p.grad) for p in self._parameters if p.grad is not None]
        return self._shards.sum([squared_norm(gradients)])[0] / scale**2

    def _spread(self) -> float:
        """mean_i ||g_i||², where it is needed."""
        return 0.0 if self.clip is None else self._norms.spread(self._squared_gradients())

    def _measure(self) -> None:
        """The norm of this step's gradients before they are compressed, and what it asks for."""
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
        settled = self._rule.observe(self._square, lr, self.steps)
        return settled if self.freeze_at is None else self.steps >= self.freeze_at

    def _freeze(self) -> None:
        self.frozen_at = self.steps
        if self.late:  # it has larger buckets
            self._arrange([i for bucket in self.buckets for i in bucket.indices])
        for bucket in self.buckets:
            if bucket.compress:
                self._freeze_bucket(bucket)
            if self.late:
                self._begin_to_lean(bucket)
        self._arrived = self.late
        self._show_state()

    def _begin_to_lean(self, bucket: MomentBucket) -> None:
        for part, (b1, _) in bucket.runs(bucket.betas.__getitem__):
            torch.mul(bucket.m[part], b1, out=bucket.ahead[part])
        leaned = [0.0 if at in bucket.resting else b1 for at, (b1, _) in enumerate(bucket.betas)]
        bucket.scalar("leaned", 0.0).copy_(torch.tensor(leaned))

    def finish(self) -> None:
        self._stand()
        if self.freeze_at is not None and not self.compressing:
            warnings.warn(
                f"{type(self).__name__}(freeze_at={self.freeze_at}): the run ended after "
                f"{self.steps} steps, all of them dense; set freeze_at below that, or leave it out",
                stacklevel=2,
            )

    def _replica_shards(self, name: str, inside: Group, shard_state: bool) -> Shards:
        """Of parameters that FSDP2 has spread over the ranks of a replica."""
        shards = Shards(self._parameters)
        if shards.several and (inside is not None or shard_state):
            raise ValueError(
                f"{name}: FSDP2 has spread the parameters over the ranks of a replica already; "
                f"leave {'inside=' if inside is not None else 'shard_state='} out, and give the "
                "replica dimension of the mesh as group="
            )
        return shards

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
            "floor": self.floor,
            "clip": self.clip,
            "dense": repr(self.dense),
            "shard_state": self._owners is not None,
            "late": self.late,
        }
        return super()._settings() | own

    def _kept(self) -> State:
        return {
            "frozen_at": self.frozen_at,
            "latecomers": sorted(self._latecomers),
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
        self._latecomers = set(kept.get("latecomers", ()))
        self._away, self._factor, self._squares, self._waiting = False, 1.0, None, None
        self._held, self._newcomers = None, {}
        self._arrived, self._leaning = kept.get("arrived", False), kept.get("leaning", False)
        self._rule.load_state_dict(kept["rule"])
        self._norms.load_state_dict(kept.get("norms", {"dense": []}))


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """The squared norm of them all; one wait for the device."""
    norms = [torch.linalg.vector_norm(t.float()).double() for t in tensors]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
