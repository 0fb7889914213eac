"""OneBitAdam: Adam whose momentum travels in one bit once the variance has settled.

    warm-up      m = b1 m + (1-b1) g ;  v = b2 v + (1-b2) g² ;       g = mean_i g_i, dense
                 x = x - lr (m̂ / (sqrt(v̂) + eps) + lam x)            AdamW
    compressed   m = compressed mean of (b1 m + (1-b1) g_i)          one bit a value
                 x = x - lr (m̂ / (sqrt(v_frozen) + eps) + lam x)

Paper: 1-bit Adam, arXiv 2102.02888. The stages are in one_bit.py.

[Note: whitening] One scale for all values of a bucket makes the loss of the compression as large
for values with small gradients as for those with large ones, and the division by sqrt(v) makes it
larger still for the former. With w = sqrt(v_frozen) + eps, which does not change any more,

    m = w · compressed mean of (b1 m + (1-b1) g_i) / w

is the same momentum, rounded where all values are about of one size: in the steps they make.

[Note: forgetting] v_frozen keeps the large gradients of the first steps, which AdamW's v forgets.
With phi_t, one number that says how v would have gone on (variance_level.py), the step is

    x = x - lr (m̂ / (sqrt(phi_t) (sqrt(v_frozen) + eps)) + lam x)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.checks import require_bool
from thinwire.optim.departures import State
from thinwire.optim.moment_bucket import MomentBucket
from thinwire.optim.one_bit import OneBitOptimizer
from thinwire.optim.stage_settings import StageSettings, spelled_out
from thinwire.optim.variance_level import VarianceLevel

if TYPE_CHECKING:
    from typing_extensions import Unpack


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam: 32x less traffic than float32 after a dense warm-up.

    A parameter group may set `compress=False`: its gradients stay dense and its variance alive.

    Args:
        params: tensors or groups of them, as for any torch optimizer.
        lr, betas, eps, weight_decay: as in AdamW.
        bias_correction: m̂ and v̂ as in AdamW. Without it the first 1/(1-b2) steps are long ones.
        whiten: round the momentum in units of the steps it makes, see [Note: whitening]. False
            rounds it as it is, as published. No effect with shard_state, where steps travel anyhow.
        forget: let the frozen variance forget the large gradients of the first steps, see
            [Note: forgetting]. False keeps it as it is, as published. No effect without
            bias_correction.
        floor: least variance of a value at the freeze, as a share of the mean over its tensor, or
            its bucket if not `whiten`: [Note: floor] in one_bit.py. 0 freezes it as it is, as
            published.
        freeze_at: number of dense steps. Set it when the automatic rule freezes too late for your
            traffic, or so early that the loss falls behind AdamW's: 15 % of the run is usual.
        clip: largest norm of the gradient of all replicas. Compressed buckets then leave only after
            the backward pass, since its norm must be known: leave it out for full overlap.
        dense: form of the gradients in the warm-up; float32 by default. Dense(torch.bfloat16)
            halves its traffic, Int8() quarters it.
        bucket_mb: size of the buckets, in MB of float32; each has one scale. About four of 1 to
            25 MB by default. Raise it when latency dominates, lower it to start earlier.
        overlap: send buckets during the backward pass. Then gradients must not be changed between
            backward and step (use clip=), and gradient accumulation needs `accumulating()`.
        group: a ProcessGroup or one dimension of a DeviceMesh; all ranks by default.
        inside: the other dimension of a (node, rank in the node) mesh, whose first is `group`:
            gradients are averaged densely there, and only a part goes between the nodes from each
            rank. For nodes whose ranks have a fast link to each other.
        shard_state: every rank keeps m and v of its own part of the values alone, 1/n of them, at
            the same traffic. For models whose state does not fit. In the one-bit stage this is
            another method than the paper's: owners.py has the equations.
        late: in the one-bit stage use a momentum one step later, so that its exchange hides behind
            a whole step of compute: for links with a long delay, or when workers wait for each
            other. One more float a value; call finish() at the end. [Note: late] in one_bit.py.
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
        whiten: bool = True,
        forget: bool = True,
        **stages: Unpack[StageSettings],
    ) -> None:
        self.whiten = require_bool("OneBitAdam", "whiten", whiten)
        self.forget = require_bool("OneBitAdam", "forget", forget)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction}, **stages)
        # By the group's b2, each group with its own: a scheduler may change some of them.
        self._levels = [VarianceLevel(group["betas"][1]) for group in self.param_groups]

    def _move_dense(self, bucket: MomentBucket, directions: list[Tensor]) -> None:
        paces, bucket.paces = bucket.paces, {}
        for at, x, group in self._used(bucket):
            lr = float(group["lr"])
            x.mul_(1 - lr * group["weight_decay"])
            x.sub_(directions[at], alpha=lr * paces.get(at, 1.0))

    _move_frozen = _move_dense

    def _clip_mean(self, spread: float) -> None:
        super()._clip_mean(spread)
        norm = self.grad_norm if self.clip is None else min(self.grad_norm, self.clip)
        for level, group in zip(self._levels, self.param_groups, strict=bool(self._levels)):
            level.observe(norm**2, group["betas"][1])

    def _payload(self, bucket: MomentBucket) -> None:
        super()._payload(bucket)
        if self.whiten:
            bucket.buffer.div_(bucket.roots())

    def _learn_frozen(self, bucket: MomentBucket) -> None:
        if not self.whiten:
            super()._learn_frozen(bucket)
            return
        for part, _ in bucket.runs(lambda at: None):
            torch.mul(bucket.buffer[part], bucket.roots()[part], out=bucket.m[part])

    def _one_size(self, bucket: MomentBucket) -> bool:
        return self.whiten or super()._one_size(bucket)

    def _direct_landed(self, bucket: MomentBucket) -> None:
        if not (self.whiten and self._frozen(bucket)):
            super()._direct_landed(bucket)
            return
        # The buffer holds m in units of steps already: all but m's correction, one number.
        used = set(range(len(bucket.indices))) - bucket.resting
        bucket.paces = {at: 1 / self._correction(bucket, at) for at in used}

    def _correction(self, bucket: MomentBucket, at: int, coming: int = 0) -> float:
        first = super()._correction(bucket, at, coming)
        group = bucket.groups[at]
        if self.forget and self._frozen(bucket) and group["bias_correction"] and self._levels:
            level = self._levels[self._number_of(group)]
            first *= math.sqrt(level.factor(self.steps + coming))
        return first

    def _number_of(self, group: dict[str, Any]) -> int:
        return next(n for n, other in enumerate(self.param_groups) if other is group)

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"whiten": self.whiten, "forget": self.forget}

    def _kept(self) -> State:
        levels = [level.state_dict() for level in self._levels]
        return super()._kept() | {"whiten": self.whiten, "levels": levels}

    def _restore(self, kept: State) -> None:
        whitened = kept.get("whiten", False)  # states from before there was a choice
        compressed = kept["frozen_at"] is not None and self._owners is None
        if compressed and whitened != self.whiten:
            raise ValueError(
                f"OneBitAdam: the state was saved with whiten={whitened} after the variance "
                "was frozen, and its errors are in those units; load it as it was saved"
            )
        super()._restore(kept)
        # None in states from before there was forgetting: v stays as it is. Others once had one
        # level for all groups of the same b2.
        saved = kept.get("levels", [])
        if len(saved) != len(self.param_groups):
            by_beta = {level["beta2"]: level for level in saved}
            found = [by_beta.get(group["betas"][1]) for group in self.param_groups]
            saved = [level for level in found if level is not None] if all(found) else []
        self._levels = [VarianceLevel(level["beta2"]) for level in saved]
        for level, values in zip(self._levels, saved, strict=True):
            level.load_state_dict(values)
