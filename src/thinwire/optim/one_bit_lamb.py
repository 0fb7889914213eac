"""OneBitLamb: LAMB whose momentum travels in one bit once the variance has settled.

Per tensor x (the stages, the freeze and the floor are in one_bit.py):

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

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.checks import require_bool, require_bounds, require_share
from thinwire.optim.flat import local_part
from thinwire.optim.lamb import Bounds, coefficients
from thinwire.optim.moment_bucket import MomentBucket
from thinwire.optim.one_bit import OneBitOptimizer
from thinwire.optim.owners import equalising
from thinwire.optim.stage_settings import StageSettings, spelled_out

if TYPE_CHECKING:
    from typing_extensions import Unpack


class OneBitLamb(OneBitOptimizer):
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
        floor, freeze_at, clip, dense, bucket_mb, overlap, group, inside, shard_state, late: as in
            `OneBitAdam`.
    """

    @spelled_out(OneBitOptimizer, StageSettings)
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
        **stages: Unpack[StageSettings],
    ) -> None:
        coefficient_beta = require_share("OneBitLamb", "coefficient_beta", coefficient_beta)
        factor = require_bounds("OneBitLamb", "factor", factor)
        factor_threshold = require_share("OneBitLamb", "factor_threshold", factor_threshold)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "coefficient": coefficient, "phi": phi}
        self._b3, self._bounds, self._threshold = coefficient_beta, factor, factor_threshold
        self.debias = require_bool("OneBitLamb", "debias", debias)
        super().__init__(params, defaults, **stages)

    def _check_group(self, name: str, group: dict[str, Any]) -> None:
        super()._check_group(name, group)
        group["coefficient"] = require_bounds(name, "coefficient", group["coefficient"])
        if group["phi"] is not None:
            group["phi"] = require_bounds(name, "phi", group["phi"])

    # -- warm-up ----------------------------------------------------------------------------------

    def _move_dense(self, bucket: MomentBucket, directions: list[Tensor]) -> None:
        self._add_decay(bucket, directions)
        c = self._coefficients(bucket, directions)
        average = bucket.scalar("coefficient", 0.0)
        bucket.set_scalar("coefficient", average.lerp(c, 1 - self._b3))
        self._shift(bucket, directions, c)

    def _coefficients(self, bucket: MomentBucket, updates: list[Tensor]) -> Tensor:
        """c of every tensor, (L,)."""
        lengths = self._norms_of([local_part(x) for x in bucket.parameters])
        steps = self._norms_of(updates)
        each = [
            coefficients(lengths[at], steps[at], group["coefficient"], group["phi"])
            for at, group in enumerate(bucket.groups)
        ]
        return torch.stack(each)

    def _norms_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """(L,), of which FSDP2 may have left this rank a part of each."""
        norms = torch.stack([torch.linalg.vector_norm(t.float()) for t in tensors])
        if not self._shards.several:
            return norms
        squares = self._shards.sum(norms.double().square().tolist())
        return torch.tensor(squares, device=norms.device).sqrt().to(norms.dtype)

    # -- freeze -----------------------------------------------------------------------------------

    def _freeze_bucket(self, bucket: MomentBucket) -> None:
        super()._freeze_bucket(bucket)
        bucket.new_moment("fresh_sq").copy_(bucket.v)
        bucket.new_scalar("factor", 1.0)
        average = bucket.scalar("coefficient", 0.0)
        for at, steps in enumerate(bucket.counts["step"] if self.debias else ()):
            average[at].div_(1 - self._b3 ** max(1, steps))
        if self._owners is None:
            bucket.new_scalar("scale", 1.0).copy_(equalising(self._momentum_sizes(bucket)))

    def _one_size(self, bucket: MomentBucket) -> bool:
        return True

    def _momentum_sizes(self, bucket: MomentBucket) -> Tensor:
        """s of every tensor, (L,)."""
        pieces = bucket.pieces(bucket.m)
        counts = torch.tensor(self._shards.sum([float(m.numel()) for m in pieces]))
        norms = self._norms_of(pieces)
        return norms / counts.to(norms).clamp(min=1).sqrt()

    # -- compressed -------------------------------------------------------------------------------

    def _payload(self, bucket: MomentBucket) -> None:
        super()._payload(bucket)
        for view, k in zip(bucket.views(bucket.buffer), bucket.scalars["scale"], strict=True):
            view.mul_(k)

    def _learn_frozen(self, bucket: MomentBucket) -> None:
        """The new momentum, and the gradient it implies into the fresh variance."""
        for view, k in zip(bucket.views(bucket.buffer), bucket.scalars["scale"], strict=True):
            view.div_(k)
        for part, (b1, b2) in bucket.runs(bucket.betas.__getitem__):
            new, m, fresh = bucket.buffer[part], bucket.m[part], bucket.moments["fresh_sq"][part]
            torch.sub(new, m, alpha=b1, out=m)  # the gradient, times 1-b1
            fresh.mul_(b2).addcmul_(m, m, value=(1 - b2) / (1 - b1) ** 2)
            m.copy_(new)
        bucket.ratios = self._own_ratios(bucket, scratch=bucket.buffer)

    def _make_direction(self, bucket: MomentBucket, mean: Tensor) -> Tensor:
        fresh = bucket.moments["fresh_sq"].clone()
        for part, (_, b2) in bucket.runs(bucket.betas.__getitem__, resting=True):
            fresh[part].mul_(b2).addcmul_(mean[part], mean[part], value=1 - b2)
        bucket.tentative["fresh_sq"] = fresh
        return super()._make_direction(bucket, mean)

    def _move(self) -> None:
        if self._owners is not None:
            self._share_ratios([bucket for bucket in self.buckets if self._frozen(bucket)])
        super()._move()

    def _move_frozen(self, bucket: MomentBucket, directions: list[Tensor]) -> None:
        plain = self._norms_of(directions)  # ||u0||
        self._add_decay(bucket, directions)
        rho = plain / self._norms_of(directions)
        ratios, bucket.ratios = bucket.ratios, None
        if ratios is None:  # of a momentum that had landed when the state was saved
            ratios = self._own_ratios(bucket, torch.empty_like(bucket.v))
        r = self._factors(bucket, ratios, rho)
        self._shift(bucket, directions, r * bucket.scalars["coefficient"])

    def _share_ratios(self, buckets: list[MomentBucket]) -> None:
        """With shards a rank knows those of its own values."""
        if not buckets:
            return
        own = [self._own_ratios(bucket, torch.empty_like(bucket.v)) for bucket in buckets]
        values = self.wire.agree(torch.cat(own).tolist())
        together = torch.tensor(values, dtype=torch.float32).split([r.numel() for r in own])
        for bucket, ratios in zip(buckets, together, strict=True):
            bucket.ratios = ratios.to(bucket.buffer.device)

    def _own_ratios(self, bucket: MomentBucket, scratch: Tensor) -> Tensor:
        """max_j (sqrt(v) + eps) / (sqrt(vf) + eps) of every tensor, (L,), over this rank's own
        values; 0 for a tensor of which it has none."""
        torch.sqrt(bucket.moments["fresh_sq"], out=scratch)
        for piece, group in zip(bucket.pieces(scratch), bucket.groups, strict=True):
            piece.add_(group["eps"])
        torch.div(bucket.roots(), scratch, out=scratch)
        none = scratch.new_zeros(())
        own = torch.stack([p.amax() if p.numel() else none for p in bucket.pieces(scratch)])
        if not self._shards.several:
            return own
        return torch.tensor(self._shards.largest(own.tolist()), device=own.device).to(own.dtype)

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
        for at, x, group in self._used(bucket):
            if group["weight_decay"]:
                updates[at].add_(x, alpha=group["weight_decay"])

    def _shift(self, bucket: MomentBucket, updates: list[Tensor], lengths: Tensor) -> None:
        for at, x, group in self._used(bucket):
            x.addcmul_(updates[at], lengths[at], value=-float(group["lr"]))

    def _settings(self) -> dict[str, Any]:
        own = {
            "coefficient_beta": self._b3,
            "factor": self._bounds,
            "factor_threshold": self._threshold,
            "debias": self.debias,
        }
        return super()._settings() | own
