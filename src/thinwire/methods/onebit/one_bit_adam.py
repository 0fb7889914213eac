"""OneBitAdam: Adam whose momentum travels in one bit once the variance has settled.

    warm-up      m = b1 m + (1-b1) g ;  v = b2 v + (1-b2) g² ;       g = mean_i g_i, dense
                 x = x - lr (m̂ / (sqrt(v̂) + eps) + lam x)            AdamW
    compressed   m = compressed mean of (b1 m + (1-b1) g_i)          one bit a value
                 x = x - lr (m̂ / (sqrt(v_frozen) + eps) + lam x)

Paper: 1-bit Adam, arXiv 2102.02888. The stages are in two_stages.py.

[Note: whitening] One scale for all values of a bucket makes the loss of the compression as large
for values with small gradients as for those with large ones, and the division by sqrt(v) makes it
larger still for the former. With w = sqrt(v_frozen) + eps, which does not change any more,

    m = w · compressed mean of (b1 m + (1-b1) g_i) / w

is the same momentum, rounded where all values are about of one size: in the steps they make.

[Note: forgetting] v_frozen keeps the large gradients of the first steps, which AdamW's v forgets.
With phi_t, one number that says how v would have gone on (variance_level.py), the step is

    x = x - lr (m̂ / (sqrt(phi_t) (sqrt(v_frozen) + eps)) + lam x)
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.deprecated import renamed_arguments
from thinwire.methods.base import Shown, WireOptimizer
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.onebit.progress import Progress
from thinwire.methods.onebit.rule import Learned, Rule, State
from thinwire.methods.onebit.two_stages import StageOptions, TwoStages
from thinwire.methods.onebit.variance_level import VarianceLevel
from thinwire.methods.shared.shards import Shards
from thinwire.optim.checks import require_bool
from thinwire.wire.codecs import Codec
from thinwire.wire.ranks import Group


class OneBitAdam(WireOptimizer):
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
            its bucket if not `whiten`: floor.py. 0 freezes it as it is, as
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
            another method than the paper's: sharded_moments.py has the equations.
        delayed_step: in the one-bit stage use a momentum one step later, so that its exchange
            hides behind a whole step of compute: for links with a long delay, or when workers wait
            for each other. One more float a value; call finish() at the end. See delayed_step.py.
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
        whiten: bool = True,
        forget: bool = True,
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
        whiten = require_bool(name, "whiten", whiten)
        forget = require_bool(name, "forget", forget)
        options = StageOptions(
            name, freeze_at, floor, clip, dense, bucket_mb, overlap, inside, shard_state,
            delayed_step,
        )  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "compress": True}
        super().__init__(params, defaults, group=group)
        for settings_of_group in self.session.groups:
            AdamRule.check_group(name, settings_of_group)
        shards, progress = options.shards_of(self.session.parameters), Progress()
        rule = AdamRule(
            progress,
            shards,
            self.session.groups,
            whiten=whiten,
            forget=forget,
            sharded=options.shard_state,
        )
        self.engine = TwoStages(self.session, rule, progress, options)


class AdamRule(Rule):
    """AdamW's step, with the two changes above in the compressed stage."""

    def __init__(
        self,
        progress: Progress,
        shards: Shards,
        groups: list[dict[str, Any]],
        *,
        whiten: bool,
        forget: bool,
        sharded: bool,
    ) -> None:
        super().__init__(progress, shards, sharded=sharded)
        self.whiten, self.forget = whiten, forget
        self._groups = groups
        # By the group's b2, each group with its own: a scheduler may change some of them.
        self.levels = [VarianceLevel(group["betas"][1]) for group in groups]

    @property
    def equalises(self) -> bool:
        return self.whiten or self.sharded

    def observe(self, norm: float) -> None:
        for level, group in zip(self.levels, self._groups, strict=bool(self.levels)):
            level.observe(norm**2, group["betas"][1])

    def payload(self, bucket: MomentBucket) -> None:
        super().payload(bucket)
        if self.whiten:
            bucket.buffer.div_(bucket.roots())

    def learn_frozen(self, bucket: MomentBucket) -> Learned:
        if not self.whiten:
            return super().learn_frozen(bucket)
        for part, _ in bucket.runs(lambda at: None):
            torch.mul(bucket.buffer[part], bucket.roots()[part], out=bucket.m[part])
        return Learned()

    def direct_landed(self, bucket: MomentBucket, learned: Learned) -> Learned:
        if not (self.whiten and self.progress.frozen(bucket)):
            return super().direct_landed(bucket, learned)
        # The buffer holds m in units of steps already: all but m's correction, one number.
        return Learned(paces={at: 1 / self.correction(bucket, at) for at in bucket.used})

    def correction(self, bucket: MomentBucket, at: int, coming: int = 0) -> float:
        first = super().correction(bucket, at, coming)
        group = bucket.groups[at]
        forgets = self.forget and self.progress.frozen(bucket) and group["bias_correction"]
        if forgets and self.levels:
            level = self.levels[self._number_of(group)]
            first *= math.sqrt(level.factor(self.progress.steps + coming))
        return first

    def _number_of(self, group: dict[str, Any]) -> int:
        return next(n for n, other in enumerate(self._groups) if other is group)

    def move(self, bucket: MomentBucket, directions: list[Tensor], learned: Learned) -> None:
        for at, x, group in self.used(bucket):
            lr = float(group["lr"])
            x.mul_(1 - lr * group["weight_decay"])
            x.sub_(directions[at], alpha=lr * learned.paces.get(at, 1.0))

    def settings(self) -> State:
        return {"whiten": self.whiten, "forget": self.forget}

    def state(self) -> State:
        return {"whiten": self.whiten, "levels": [level.state_dict() for level in self.levels]}

    def require(self, kept: State, compressed: bool) -> None:
        whitened = kept.get("whiten", False)  # states from before there was a choice
        if compressed and whitened != self.whiten:
            raise ValueError(
                f"OneBitAdam: the state was saved with whiten={whitened} after the variance "
                "was frozen, and its errors are in those units; load it as it was saved"
            )

    def load_state(self, kept: State) -> None:
        # None in states from before there was forgetting: v stays as it is. Others once had one
        # level for all groups of the same b2.
        saved = kept.get("levels", [])
        if len(saved) != len(self._groups):
            by_beta = {level["beta2"]: level for level in saved}
            found = [by_beta.get(group["betas"][1]) for group in self._groups]
            saved = [level for level in found if level is not None] if all(found) else []
        self.levels = [VarianceLevel(level["beta2"]) for level in saved]
        for level, values in zip(self.levels, saved, strict=True):
            level.load_state_dict(values)
