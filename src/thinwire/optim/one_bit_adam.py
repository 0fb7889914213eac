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
        self._paces: dict[int, float] = {}  # on the directions in a bucket's buffer, by its id
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction}, **stages)
        known = sorted({group["betas"][1] for group in self.param_groups})
        self._levels = {b2: VarianceLevel(b2) for b2 in known}

    def _move_dense(self, bucket: MomentBucket, directions: list[Tensor]) -> None:
        pace = self._paces.pop(id(bucket), 1.0)
        for at, x, group in self._used(bucket):
            lr = float(group["lr"])
            x.mul_(1 - lr * group["weight_decay"])
            x.sub_(directions[at], alpha=lr * pace)

    _move_frozen = _move_dense

    def _clip_mean(self, spread: float) -> None:
        super()._clip_mean(spread)
        norm = self.grad_norm if self.clip is None else min(self.grad_norm, self.clip)
        for level in self._levels.values():
            level.observe(norm**2)

    def _payload(self, bucket: MomentBucket) -> None:
        super()._payload(bucket)
        if self.whiten:
            bucket.buffer.div_(bucket.roots())

    def _learn_frozen(self, bucket: MomentBucket) -> None:
        if self.whiten:
            torch.mul(bucket.buffer, bucket.roots(), out=bucket.m)
        else:
            super()._learn_frozen(bucket)

    def _direct_landed(self, bucket: MomentBucket) -> None:
        if self.whiten and self._frozen(bucket):  # the buffer holds m in units of steps
            self._paces[id(bucket)] = 1 / self._corrections(bucket, self.steps)[0]
        else:
            super()._direct_landed(bucket)

    def _corrections(self, bucket: MomentBucket, step: int) -> tuple[float, float]:
        first, second = super()._corrections(bucket, step)
        level = self._levels.get(bucket.betas[1]) if self.forget else None
        if level is not None and self._frozen(bucket) and bucket.groups[0]["bias_correction"]:
            first *= math.sqrt(level.factor(step))
        return first, second

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"whiten": self.whiten, "forget": self.forget}

    def _kept(self) -> State:
        levels = [level.state_dict() for level in self._levels.values()]
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
        self._levels = {}  # none in states from before there was forgetting: v stays as it is
        for saved in kept.get("levels", []):
            level = self._levels[saved["beta2"]] = VarianceLevel(saved["beta2"])
            level.load_state_dict(saved)
