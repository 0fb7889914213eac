"""OneBitLamb: LAMB whose momentum travels in one bit once the variance has settled.

Per tensor x (the stages, the freeze and the floor are in two_stages.py):

    warm-up      m, v, u and c as in LAMB with the mean gradient
                 c_avg = b3 c_avg + (1-b3) c ;   x = x - lr c u
    freeze       vf = v ;  s = ||m|| / sqrt(numel) ;  k = mean of s over the bucket / s
    compressed   M = compressed mean of k (b1 m + (1-b1) g_i) ;   m' = M / k
                 g = (m' - b1 m) / (1-b1) ;  vf = b2 vf + (1-b2) g² ;  m = m'
                 u0 = m̂ / (sqrt(v) + eps) ;  u = u0 + lam x
                 r = max_j (sqrt(v) + eps) / (sqrt(vf) + eps) ;   rho = min(1, ||u0|| / ||u||)
                 r = clip(r rho + 1 - rho, r_min, r_max), then to r_prev (1 ± r_threshold)
                 x = x - lr r ĉ u

One scale serves a whole bucket, so k brings its tensors to one size before they are compressed. r
follows how far the variance has gone since it was frozen. c_avg is de-biased (ĉ) and averaged at
every step: an average that starts from 0, or skips a c of exactly 1, would hold a tensor for ever.
`debias=False` leaves the bias in, as published.

Paper: 1-bit LAMB, arXiv 2104.06069.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.deprecated import renamed_arguments
from thinwire.flat import local_part
from thinwire.methods.base import Shown, WireOptimizer
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.onebit.progress import Progress
from thinwire.methods.onebit.rule import Learned, Rule, State
from thinwire.methods.onebit.sharded_moments import equalising
from thinwire.methods.onebit.two_stages import StageOptions, TwoStages
from thinwire.methods.shared.shards import Shards
from thinwire.optim.checks import require_bool, require_bounds, require_share
from thinwire.optim.lamb import Bounds, coefficients
from thinwire.wire.codecs import Codec
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire


class OneBitLamb(WireOptimizer):
    """1-bit LAMB: large batches at 32x less traffic than float32 after a dense warm-up.

    A parameter group may set `compress=False`: it is then trained by plain LAMB throughout.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction, coefficient, phi: as in `Lamb`.
        coefficient_beta: b3, the memory of c_avg. Raise it when c swings from step to step.
        factor: (r_min, r_max), the bounds of r.
        factor_threshold: how much r may change in a step. Lower it when the loss jumps after the
            freeze.
        debias: divide c_avg by 1 - b3^t at the freeze. False leaves it too short by that, as
            published; it matters if the freeze comes within some 30 steps.
        floor, freeze_at, clip, dense, bucket_mb, overlap, group, inside, shard_state,
            delayed_step: as in `OneBitAdam`.
    """

    engine: TwoStages
    steps = Shown[int]("progress.steps", "Steps taken, without those skipped.")
    frozen_at = Shown[int | None]("progress.frozen_at", "Step of the freeze; None before it.")
    freeze_at = Shown[int | None]("options.freeze_at", "Dense steps, as asked for.")
    dense = Shown[Codec | None]("options.dense", "Form of the gradients until the freeze.")
    compressing = Shown[bool]("progress.compressing", "Whether v is frozen, and bits are sent.")
    grad_norm = Shown[float]("clipping.grad_norm", "Of the last step; docs/methods/one-bit.md.")
    clip = Shown[float | None]("clipping.clip", "Largest norm of the gradient.", settable=True)
    buckets = Shown[list[MomentBucket]]("reducer.buckets", "What travels together.")

    @renamed_arguments(late="delayed_step")
    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        coefficient: Bounds = (0.01, 10.0),
        phi: Bounds | None = None,
        coefficient_beta: float = 0.9,
        factor: Bounds = (0.5, 4.0),
        factor_threshold: float = 0.1,
        debias: bool = True,
        floor: float = 0.01,
        freeze_at: int | None = None,
        clip: float | None = None,
        dense: Codec | None = None,
        bucket_mb: float | None = None,
        overlap: bool = True,
        group: Group = None,
        inside: Group = None,
        shard_state: bool = False,
        delayed_step: bool = False,
    ) -> None:
        name = type(self).__name__
        settings = {
            "coefficient_beta": require_share(name, "coefficient_beta", coefficient_beta),
            "factor": require_bounds(name, "factor", factor),
            "factor_threshold": require_share(name, "factor_threshold", factor_threshold),
            "debias": require_bool(name, "debias", debias),
        }
        options = StageOptions(
            name, freeze_at, floor, clip, dense, bucket_mb, overlap, inside, shard_state,
            delayed_step,
        )  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "compress": True}
        super().__init__(params, defaults | {"coefficient": coefficient, "phi": phi}, group=group)
        for settings_of_group in self.session.groups:
            LambRule.check_group(name, settings_of_group)
        shards, progress = options.shards_of(self.session.parameters), Progress()
        rule = LambRule(progress, shards, settings, sharded=options.shard_state)
        self.engine = TwoStages(self.session, rule, progress, options)


class LambRule(Rule):
    """The equations above, in their order."""

    def __init__(
        self, progress: Progress, shards: Shards, settings: dict[str, Any], *, sharded: bool
    ) -> None:
        super().__init__(progress, shards, sharded=sharded)
        self._settings = settings
        self._b3: float = settings["coefficient_beta"]
        self._bounds: Bounds = settings["factor"]
        self._threshold: float = settings["factor_threshold"]
        self._debias: bool = settings["debias"]

    @classmethod
    def check_group(cls, name: str, group: dict[str, Any]) -> None:
        super().check_group(name, group)
        group["coefficient"] = require_bounds(name, "coefficient", group["coefficient"])
        if group["phi"] is not None:
            group["phi"] = require_bounds(name, "phi", group["phi"])

    def settings(self) -> State:
        return dict(self._settings)

    @property
    def equalises(self) -> bool:
        return True

    def move(self, bucket: MomentBucket, directions: list[Tensor], learned: Learned) -> None:
        if self.progress.frozen(bucket):
            self._move_frozen(bucket, directions, learned.ratios)
        else:
            self._move_dense(bucket, directions)

    # -- warm-up ----------------------------------------------------------------------------------

    def _move_dense(self, bucket: MomentBucket, directions: list[Tensor]) -> None:
        self._add_decay(bucket, directions)
        c = self._coefficients(bucket, directions)
        average = bucket.scalar("coefficient", 0.0)
        bucket.set_scalar("coefficient", average.lerp(c, 1 - self._b3))
        self._shift(bucket, directions, c)

    def _coefficients(self, bucket: MomentBucket, updates: list[Tensor]) -> Tensor:
        """c of every tensor, (L,)."""
        lengths = self.norms_of([local_part(x) for x in bucket.parameters])
        steps = self.norms_of(updates)
        each = [
            coefficients(lengths[at], steps[at], group["coefficient"], group["phi"])
            for at, group in enumerate(bucket.groups)
        ]
        return torch.stack(each)

    # -- freeze -----------------------------------------------------------------------------------

    def freeze(self, bucket: MomentBucket) -> None:
        bucket.new_moment("fresh_sq").copy_(bucket.v)
        bucket.new_scalar("factor", 1.0)
        average = bucket.scalar("coefficient", 0.0)
        for at, steps in enumerate(bucket.counts["step"] if self._debias else ()):
            average[at].div_(1 - self._b3 ** max(1, steps))
        if not self.sharded:
            bucket.new_scalar("scale", 1.0).copy_(equalising(self._momentum_sizes(bucket)))

    def _momentum_sizes(self, bucket: MomentBucket) -> Tensor:
        """s of every tensor, (L,)."""
        pieces = bucket.pieces(bucket.m)
        counts = torch.tensor(self.shards.sum([float(m.numel()) for m in pieces]))
        norms = self.norms_of(pieces)
        return norms / counts.to(norms).clamp(min=1).sqrt()

    # -- compressed -------------------------------------------------------------------------------

    def payload(self, bucket: MomentBucket) -> None:
        super().payload(bucket)
        for view, k in zip(bucket.views(bucket.buffer), bucket.scalars["scale"], strict=True):
            view.mul_(k)

    def learn_frozen(self, bucket: MomentBucket) -> Learned:
        """The new momentum, and the gradient it implies into the fresh variance."""
        for view, k in zip(bucket.views(bucket.buffer), bucket.scalars["scale"], strict=True):
            view.div_(k)
        for part, (b1, b2) in bucket.runs(bucket.betas.__getitem__):
            new, m, fresh = bucket.buffer[part], bucket.m[part], bucket.moments["fresh_sq"][part]
            torch.sub(new, m, alpha=b1, out=m)  # the gradient, times 1-b1
            fresh.mul_(b2).addcmul_(m, m, value=(1 - b2) / (1 - b1) ** 2)
            m.copy_(new)
        return Learned(self._own_ratios(bucket, scratch=bucket.buffer))

    def own_direction(self, bucket: MomentBucket, mean: Tensor) -> Tensor:
        fresh = bucket.moments["fresh_sq"].clone()
        for part, (_, b2) in bucket.runs(bucket.betas.__getitem__, resting=True):
            fresh[part].mul_(b2).addcmul_(mean[part], mean[part], value=1 - b2)
        bucket.tentative["fresh_sq"] = fresh
        return super().own_direction(bucket, mean)

    def _move_frozen(
        self, bucket: MomentBucket, directions: list[Tensor], ratios: Tensor | None
    ) -> None:
        plain = self.norms_of(directions)  # ||u0||
        self._add_decay(bucket, directions)
        rho = plain / self.norms_of(directions)
        if ratios is None:  # of a momentum that had landed when the state was saved
            ratios = self._own_ratios(bucket, torch.empty_like(bucket.v))
        r = self._factors(bucket, ratios, rho)
        self._shift(bucket, directions, r * bucket.scalars["coefficient"])

    def learned_by_owners(self, buckets: Sequence[MomentBucket], wire: Wire) -> list[Learned]:
        """With shards a rank knows the ratios of its own values."""
        if not buckets:
            return []
        own = [self._own_ratios(bucket, torch.empty_like(bucket.v)) for bucket in buckets]
        values = wire.agree(torch.cat(own).tolist())
        together = torch.tensor(values, dtype=torch.float32).split([r.numel() for r in own])
        pairs = zip(buckets, together, strict=True)
        return [Learned(ratios.to(bucket.buffer.device)) for bucket, ratios in pairs]

    def _own_ratios(self, bucket: MomentBucket, scratch: Tensor) -> Tensor:
        """max_j (sqrt(v) + eps) / (sqrt(vf) + eps) of every tensor, (L,), over this rank's own
        values; 0 for a tensor of which it has none."""
        torch.sqrt(bucket.moments["fresh_sq"], out=scratch)
        for piece, group in zip(bucket.pieces(scratch), bucket.groups, strict=True):
            piece.add_(group["eps"])
        torch.div(bucket.roots(), scratch, out=scratch)
        none = scratch.new_zeros(())
        own = torch.stack([p.amax() if p.numel() else none for p in bucket.pieces(scratch)])
        if not self.shards.several:
            return own
        return torch.tensor(self.shards.largest(own.tolist()), device=own.device).to(own.dtype)

    def _factors(self, bucket: MomentBucket, ratios: Tensor, rho: Tensor) -> Tensor:
        rho = rho.nan_to_num(1.0).clamp(max=1.0)  # no update at all: nothing to mix
        decayed = torch.tensor([g["weight_decay"] > 0 for g in bucket.groups], device=rho.device)
        rho = torch.where(decayed, rho, 1.0)
        r = ratios * rho + 1 - rho
        before = bucket.scalars["factor"]
        r = r.clamp(*self._bounds)
        r = torch.minimum(
            torch.maximum(r, before * (1 - self._threshold)), before * (1 + self._threshold)
        )
        return bucket.set_scalar("factor", r)

    # -- both -------------------------------------------------------------------------------------

    def _add_decay(self, bucket: MomentBucket, updates: list[Tensor]) -> None:
        for at, x, group in self.used(bucket):
            if group["weight_decay"]:
                updates[at].add_(x, alpha=group["weight_decay"])

    def _shift(self, bucket: MomentBucket, updates: list[Tensor], lengths: Tensor) -> None:
        for at, x, group in self.used(bucket):
            x.addcmul_(updates[at], lengths[at], value=-float(group["lr"]))
