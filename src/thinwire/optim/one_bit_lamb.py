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

Paper: 1-bit LAMB, arXiv 2104.06069.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.buckets import Bucket
from thinwire.optim.checks import require_bounds, require_share
from thinwire.optim.lamb import Bounds, coefficients
from thinwire.optim.one_bit import OneBitOptimizer
from thinwire.wire.codecs import Codec
from thinwire.wire.wire import Group


class OneBitLamb(OneBitOptimizer):
    """1-bit LAMB: large batches at 32x less traffic than float32 after a dense warm-up.

    A parameter group may set `compress=False`: it is then trained by plain LAMB throughout.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction, coefficient, phi: as in `Lamb`.
        coefficient_beta: b3, the memory of c_avg. Raise it when c swings from step to step.
        factor: (r_min, r_max), the bounds of r.
        factor_threshold: how much r may change in a step. Lower it when the loss jumps after the
            freeze.
        freeze_at, clip, dense, bucket_mb, overlap, group, inside: as in `OneBitAdam`.
    """

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
        freeze_at: int | None = None,
        clip: float | None = None,
        dense: Codec | None = None,
        bucket_mb: float | None = None,
        overlap: bool = True,
        group: Group = None,
        inside: Group = None,
    ) -> None:
        require_share("OneBitLamb", "coefficient_beta", coefficient_beta)
        require_bounds("OneBitLamb", "factor", factor)
        require_share("OneBitLamb", "factor_threshold", factor_threshold)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "coefficient": coefficient, "phi": phi}
        self._b3, self._bounds, self._threshold = coefficient_beta, factor, factor_threshold
        super().__init__(
            params,
            defaults,
            freeze_at=freeze_at,
            clip=clip,
            dense=dense,
            bucket_mb=bucket_mb,
            overlap=overlap,
            group=group,
            inside=inside,
        )

    def _check_group(self, name: str, group: dict[str, Any]) -> None:
        super()._check_group(name, group)
        require_bounds(name, "coefficient", group["coefficient"])
        if group["phi"] is not None:
            require_bounds(name, "phi", group["phi"])

    # -- warm-up ----------------------------------------------------------------------------------

    def _update_dense(self, bucket: Bucket) -> None:
        self._average_moments(bucket)
        updates = self._directions(bucket)
        self._add_decay(bucket, updates)
        c = self._coefficients(bucket, updates)
        average = self._scalar(bucket, "coefficient", 0.0)
        average.lerp_(c, 1 - self._b3)
        self._move(bucket, updates, c)

    def _coefficients(self, bucket: Bucket, updates: list[Tensor]) -> Tensor:
        each = [
            coefficients([x], [u], group["coefficient"], group["phi"])
            for x, u, group in zip(bucket.parameters, updates, bucket.groups, strict=True)
        ]
        return torch.cat(each)

    # -- freeze -----------------------------------------------------------------------------------

    def _freeze_bucket(self, bucket: Bucket) -> None:
        super()._freeze_bucket(bucket)
        bucket.new_moment("fresh_sq").copy_(bucket.v)
        bucket.new_scalar("factor", 1.0)
        self._scalar(bucket, "coefficient", 0.0).div_(1 - self._b3**self.steps)
        sizes = torch.stack([m.norm() / m.numel() ** 0.5 for m in bucket.views(bucket.m)])
        # A tensor without momentum has no size to bring to the others'.
        moving = sizes > 0
        mean = sizes.sum() / moving.sum().clamp(min=1)
        bucket.new_scalar("scale", 1.0).copy_(torch.where(moving, mean / sizes, 1.0))

    # -- compressed -------------------------------------------------------------------------------

    def _payload(self, bucket: Bucket) -> None:
        super()._payload(bucket)
        for view, k in zip(bucket.views(bucket.buffer), bucket.scalars["scale"], strict=True):
            view.mul_(k)

    def _update_frozen(self, bucket: Bucket) -> None:
        self._refresh(bucket)
        updates = self._directions(bucket)
        plain = torch.stack([u.norm() for u in updates])  # ||u0||
        self._add_decay(bucket, updates)
        r = self._factors(bucket, plain / torch.stack([u.norm() for u in updates]))
        self._move(bucket, updates, r * bucket.scalars["coefficient"])

    def _refresh(self, bucket: Bucket) -> None:
        """The new momentum, and the gradient it implies into the fresh variance."""
        (b1, b2), new, m = bucket.betas, bucket.buffer, bucket.m
        for view, k in zip(bucket.views(new), bucket.scalars["scale"], strict=True):
            view.div_(k)
        m.mul_(-b1).add_(new).div_(1 - b1)  # the gradient
        bucket.moments["fresh_sq"].mul_(b2).addcmul_(m, m, value=1 - b2)
        m.copy_(new)

    def _factors(self, bucket: Bucket, rho: Tensor) -> Tensor:
        fresh = bucket.views(bucket.moments["fresh_sq"])
        frozen = bucket.views(bucket.v)
        ratios = [
            ((v.sqrt() + group["eps"]) / (vf.sqrt() + group["eps"])).max()
            for v, vf, group in zip(frozen, fresh, bucket.groups, strict=True)
        ]
        rho = rho.nan_to_num(1.0).clamp(max=1.0)  # no update at all: nothing to mix
        decayed = torch.tensor([g["weight_decay"] > 0 for g in bucket.groups], device=rho.device)
        rho = torch.where(decayed, rho, 1.0)
        r = torch.stack(ratios) * rho + 1 - rho
        before = bucket.scalars["factor"]
        r = r.clamp(*self._bounds)
        r = torch.minimum(
            torch.maximum(r, before * (1 - self._threshold)), before * (1 + self._threshold)
        )
        return before.copy_(r)

    # -- both -------------------------------------------------------------------------------------

    def _add_decay(self, bucket: Bucket, updates: list[Tensor]) -> None:
        for u, x, group in zip(updates, bucket.parameters, bucket.groups, strict=True):
            if group["weight_decay"]:
                u.add_(x, alpha=group["weight_decay"])

    def _move(self, bucket: Bucket, updates: list[Tensor], lengths: Tensor) -> None:
        for at, x, group in self._used(bucket):
            x.sub_(updates[at].mul_(group["lr"] * lengths[at]))

    def _scalar(self, bucket: Bucket, name: str, start: float) -> Tensor:
        held = bucket.scalars.get(name)
        return bucket.new_scalar(name, start) if held is None else held

    def _settings(self) -> dict[str, Any]:
        own = {
            "coefficient_beta": self._b3,
            "factor": self._bounds,
            "factor_threshold": self._threshold,
        }
        return super()._settings() | own
