"""ZeroOneAdam: Adam that sends one bit a value from early on, and then not at every step.

    learning v   at refresh steps    g = mean_i g_i, dense ;  m, v and x as in AdamW
                 at the others       g = compressed mean of g_i ;  m and x as in AdamW, v stays
    local        m_i = b1 m_i + (1-b1) g_i ;  x_i = x_i - lr (m̂_i / (sqrt(v) + eps) + lam x_i)
                 U_i = sum of lr m̂_i ,  L = sum of lr     since the last exchange
    exchange     U = compressed mean of U_i ;  x = anchor - U / (sqrt(v) + eps) ;  m = U / L

The spacing of refreshes starts at 1 and doubles after every `double_after` of them. After the
freeze v stays, and the spacing of exchanges starts at 1 and doubles every
`local_double_after` steps up to `longest`. `anchor` is x at the last exchange; weight decay shrinks
anchor, U and L like x, so that all of them meet again exactly. Below its floor (floor.py) no v
is ever used with one-bit gradients.

Replicas differ between exchanges: evaluate under `consensus()`, and call `finish()` at the end. A
replica whose own gradient is not finite takes that step with the momentum it has. Errors of the
first part are in units of gradients and are dropped at the freeze.

[Note: unused] Between exchanges nobody knows what the others have gradients for: a parameter that
has none here counts as one of zeros. The exchange tells which parameters no replica has used since
the last one; those go back to where they stood then, with their momentum.

[Note: other numbers of workers] anchor, v, L and the step are the same on all replicas, and
x_i = anchor - U_i / (sqrt(v) + eps). So the mean of the replicas' weights goes with the mean of
their U_i, and an exchange uses nothing else of them: workers that all start from those means, of
m_i too, go on from where the old ones stood together. `portable_state_dict` holds the means; the
weights for it are those under `consensus()`. What is lost is how far the replicas were apart.

Paper: 0/1 Adam, arXiv 2202.06009.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.methods.base import Shown, WireOptimizer
from thinwire.methods.engine import State
from thinwire.methods.onebit.clipping import Clipping
from thinwire.methods.onebit.floor import lift, sums_of
from thinwire.methods.onebit.freeze import FreezeRule
from thinwire.methods.onebit.local_steps import LocalSteps
from thinwire.methods.onebit.mean_norm import MeanNorm
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.onebit.progress import Progress
from thinwire.methods.onebit.rule import Rule
from thinwire.methods.onebit.sharded_moments import WholeMoments
from thinwire.methods.onebit.stage_state import StageState
from thinwire.methods.onebit.store import MomentStore
from thinwire.methods.onebit.two_stages import StageOptions, warn_if_all_dense
from thinwire.methods.overlap.engine import Kept, ReducingEngine
from thinwire.methods.overlap.reducer import GradientReducer
from thinwire.methods.session import Session
from thinwire.methods.shared.consensus import mean_of_replicas
from thinwire.methods.shared.shards import Shards
from thinwire.optim.checks import require_count
from thinwire.wire.codecs import Codec
from thinwire.wire.ranks import Group


class ZeroOneAdam(WireOptimizer):
    """0/1 Adam: less traffic than 1-bit Adam, with replicas that part for a few steps.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction: as in AdamW.
        double_after: refreshes of the variance after which their spacing doubles; published 16.
            Raise it when the loss falls behind 1-bit Adam's before the freeze.
        local_double_after: steps after which the spacing of exchanges doubles; published 32678, for
            runs of a hundred thousand. Raise it when the loss falls behind 1-bit Adam's after the
            freeze, lower it in short runs.
        longest: largest number of steps between two exchanges; published 16.
        floor, freeze_at, clip, dense, bucket_mb, overlap, group: as in `OneBitAdam`. With `clip`
            each replica clips by its own norm once steps are local.
    """

    engine: "ZeroOneStages"
    steps = Shown[int]("progress.steps", "Steps taken, without those skipped.")
    frozen_at = Shown[int | None]("progress.frozen_at", "Step of the freeze; None before it.")
    freeze_at = Shown[int | None]("options.freeze_at", "Dense steps, as asked for.")
    dense = Shown[Codec | None]("options.dense", "Form of the gradients until the freeze.")
    compressing = Shown[bool]("progress.compressing", "Whether v is frozen, and steps are local.")
    refreshes = Shown[int]("refreshes", "Dense steps so far.")
    exchanges = Shown[int]("local.exchanges", "Exchanges of local steps so far.")
    apart = Shown[bool]("apart", "Whether the replicas differ at present: between two exchanges.")
    grad_norm = Shown[float]("clipping.grad_norm", "Of the last step; docs/methods/one-bit.md.")
    clip = Shown[float | None]("clipping.clip", "Largest norm of the gradient.", settable=True)
    buckets = Shown[list[MomentBucket]]("reducer.buckets", "What travels together.")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        double_after: int = 16,
        local_double_after: int = 64,
        longest: int = 16,
        floor: float = 0.01,
        freeze_at: int | None = None,
        clip: float | None = None,
        dense: Codec | None = None,
        bucket_mb: float | None = None,
        overlap: bool = True,
        group: Group = None,
    ) -> None:
        name = type(self).__name__
        spacing = {
            "double_after": require_count(name, "double_after", double_after),
            "longest": require_count(name, "longest", longest),
            "local_double_after": require_count(name, "local_double_after", local_double_after),
        }
        options = StageOptions(name, freeze_at, floor, clip, dense, bucket_mb, overlap)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "compress": True}
        super().__init__(params, defaults, group=group)
        for settings_of_group in self.session.groups:
            _check_group(name, settings_of_group)
        self.engine = ZeroOneStages(self.session, options, spacing)


def _check_group(name: str, group: dict[str, Any]) -> None:
    Rule.check_group(name, group)
    if not group["compress"]:
        raise ValueError(
            f"{name}(compress=False): local steps send nothing that could stay dense; use "
            "OneBitAdam for such groups"
        )


class RefreshedRule(Rule):
    """Adam's, with a variance that learns at refreshes alone."""

    def variance_correction(self, bucket: MomentBucket, at: int) -> float:
        refreshes = max(1, bucket.counts["refreshes"][at])
        return 1 - bucket.betas[at][1] ** refreshes if bucket.groups[at]["bias_correction"] else 1.0


class ZeroOneStages(ReducingEngine[MomentBucket]):
    """Dense and one-bit gradients while v is learnt; then local steps and exchanges."""

    def __init__(self, session: Session, options: StageOptions, spacing: dict[str, int]) -> None:
        super().__init__(session)
        self.options, self._spacing_settings = options, spacing
        self._double_after = spacing["double_after"]
        self._shards = Shards(session.parameters)
        self.progress = Progress()
        self.rule = RefreshedRule(self.progress, self._shards, sharded=False)
        self.reducer = GradientReducer(
            session, self, bucket_mb=options.bucket_mb, overlap=options.overlap
        )
        self._placement = WholeMoments(session.wire, options.dense, self._shards)
        self.store = MomentStore(session, self.reducer, self._placement.parts)
        norms = MeanNorm(session.wire, None)
        self.clipping = Clipping(session, self._shards, norms, options.clip)
        self._freezing = FreezeRule(max(g["betas"][1] for g in session.groups))
        self.refreshes = 0
        self._next_refresh = 1  # the step it happens at, counted from 1
        self.local = LocalSteps(
            session,
            self.reducer,
            self.rule,
            self.clipping,
            double_after=spacing["local_double_after"],
            longest=spacing["longest"],
        )
        self.saved = StageState(self)

    @property
    def apart(self) -> bool:
        """Whether the replicas differ at present: between two exchanges."""
        return self.local.since > 0 and self.wire.size > 1

    @torch.no_grad()
    def step(self) -> None:
        if self.progress.compressing:
            self.reducer.require_usable_gradients()
            self.local.step()
        else:
            self._common_step()

    # -- learning v -------------------------------------------------------------------------------

    def _refreshing(self) -> bool:
        """Whether the step that comes next is a dense one."""
        return self.progress.steps + 1 >= self._next_refresh

    def _common_step(self) -> None:
        reducer, clipping = self.reducer, self.clipping
        reducer.require_usable_gradients()
        if not self.buckets:
            reducer.begin()
        refreshing = self._refreshing()
        clipping.factor = 1.0
        if not refreshing:
            clipping.measure()
        reducer.launch_rest()
        spread = clipping.spread() if refreshing else 0.0
        if not reducer.land():
            self.session.account.skipped += 1
            clipping.grad_norm = math.nan
            return
        self.progress.count_step(self.buckets)
        if refreshing:
            clipping.clip_mean(self.buckets, spread)
        for bucket in self.buckets:
            self._update(bucket, refreshing)
        if refreshing:
            self.refreshes += 1
            self._next_refresh = self.progress.steps + 2 ** (self.refreshes // self._double_after)
        if (refreshing and self._due()) or self.progress.steps == self.options.freeze_at:
            self._freeze()

    def agreed(self, finite: bool) -> bool:
        # What arrives in one bit does not have the norm of the mean gradient.
        if self.progress.compressing or not self._refreshing():
            return self._shards.all(finite)
        finite, self.clipping.square = self._placement.verdict(finite, self.buckets)
        return finite

    def _learns(self, bucket: MomentBucket) -> bool:
        """Whether its variance learns from this step: at refreshes, and from its first gradient."""
        return self._refreshing() or not any(bucket.counts["refreshes"])

    def launch(self, bucket: MomentBucket) -> None:
        bucket.take_betas()
        self.session.unscaled(bucket.take_gradients())
        if self._learns(bucket):
            bucket.flight = self.wire.mean(bucket.buffer, self.options.dense)
            return
        if self.clipping.factor != 1.0:
            bucket.buffer.mul_(self.clipping.factor)
        bucket.flight = self.wire.mean(bucket.buffer, bucket.feedback)

    def make_buckets(self, order: Sequence[int], whole: bool = False) -> list[MomentBucket]:
        buckets = self.store.make_buckets(order, whole, count=4)
        for bucket in buckets:
            bucket.counts["refreshes"] = [0] * len(bucket.indices)
        return buckets

    def admitting(self, indices: Sequence[int]) -> None:
        if self.progress.compressing:
            raise RuntimeError(
                f"ZeroOneAdam: parameters {list(indices)} got their first gradient after the "
                "variance was frozen, and local steps have no dense gradients to learn one from; "
                "set freeze_at= later, or use OneBitAdam, which trains such parameters densely"
            )

    def may_overlap(self) -> bool:
        if self.progress.compressing:
            return False
        return self.overlap and (self.clipping.clip is None or self._refreshing())

    def _update(self, bucket: MomentBucket, refreshing: bool) -> None:
        learns = refreshing or not any(bucket.counts["refreshes"])
        if learns:
            bucket.count("refreshes")
        for part, (b1, b2) in bucket.runs(bucket.betas.__getitem__):
            g = bucket.buffer[part]
            if learns:
                bucket.v[part].mul_(b2).addcmul_(g, g, value=1 - b2)
            bucket.m[part].lerp_(g, 1 - b1)
        steps = bucket.views(self._directed(bucket))
        for at, x, group in self.rule.used(bucket):
            lr = float(group["lr"])
            x.mul_(1 - lr * group["weight_decay"])
            x.sub_(steps[at], alpha=lr)

    def _directed(self, bucket: MomentBucket) -> Tensor:
        """m̂ / (sqrt(v̂) + eps) into the buffer, with v̂ above its floor once one-bit gradients have
        come."""
        rule = self.rule
        if self.progress.steps <= self._double_after:
            return rule.direct(bucket, bucket.m, bucket.buffer)
        out = bucket.buffer
        for part, second in bucket.runs(lambda at: rule.variance_correction(bucket, at)):
            torch.div(bucket.v[part], second, out=out[part])
        for at in bucket.resting:
            bucket.pieces(out)[at].zero_()  # what they sent is no variance
        self._lift(bucket, out)
        out.sqrt_()
        for part, eps in bucket.runs(lambda at: bucket.groups[at]["eps"]):
            out[part].add_(eps)
        for part, first in bucket.runs(lambda at: rule.correction(bucket, at)):
            torch.div(bucket.m[part], out[part], out=out[part]).div_(first)
        return out

    def _lift(self, bucket: MomentBucket, variance: Tensor) -> None:
        sums, sizes = self._placement.totals(bucket, sums_of(bucket, variance))
        lift(bucket, variance, self.options.floor, sums, sizes, by_tensor=False)

    # -- the freeze -------------------------------------------------------------------------------

    def _due(self) -> bool:
        lr = max(float(group["lr"]) for group in self.session.groups)
        settled = self._freezing.observe(self.clipping.square, lr, self.progress.steps)
        freeze_at = self.options.freeze_at
        return settled if freeze_at is None else self.progress.steps >= freeze_at

    def _freeze(self) -> None:
        self.progress.frozen_at = self.progress.steps
        for bucket in self.buckets:
            self._freeze_bucket(bucket)
        self.store.show()

    def _freeze_bucket(self, bucket: MomentBucket) -> None:
        """The bias correction of this step stays in v."""
        rule = self.rule
        for part, second in bucket.runs(
            lambda at: rule.variance_correction(bucket, at), resting=True
        ):
            bucket.v[part].div_(second)
        self._lift(bucket, bucket.v)
        self.local.begin(bucket)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        if not self.apart:
            yield
            return
        with mean_of_replicas(self.session.evaluation, self.session.parameters, self._shards):
            yield

    @torch.no_grad()
    def finish(self) -> None:
        warn_if_all_dense(self.name, self.options.freeze_at, self.progress)
        if self.local.since:
            self.local.exchange()

    # -- state ------------------------------------------------------------------------------------

    def held(self) -> Kept:
        return self.store.entries()

    def take_over(self, held: Kept) -> None:
        self.store.adopt(held)

    def rearranged(self) -> None:
        self.store.show()

    def held_in_common(self) -> Kept:
        """See [Note: other numbers of workers]."""
        entries = self.held()
        if not self.apart:
            return entries
        for bucket in self.buckets:
            for name in ("exp_avg", "update"):
                mean = self.session.evaluation.mean(bucket.moments[name].clone()).wait()
                for index, view in zip(bucket.indices, bucket.views(mean), strict=True):
                    entries[index][name] = view
        return entries

    def settings(self) -> dict[str, Any]:
        options = self.options
        own = {
            "freeze_at": options.freeze_at,
            "floor": options.floor,
            "clip": self.clipping.clip,
            "dense": repr(options.dense),
        }
        return super().settings() | self.group_settings() | own | self._spacing_settings

    def kept(self) -> State:
        return {
            "steps": self.progress.steps,
            "frozen_at": self.progress.frozen_at,
            "rule": self._freezing.state_dict(),
            "norms": self.clipping.norms.state_dict(),
            "refreshes": self.refreshes,
            "next_refresh": self._next_refresh,
        } | self.local.state()

    def restore(self, kept: State) -> None:
        self.progress.steps, self.progress.frozen_at = kept["steps"], kept["frozen_at"]
        self.clipping.factor = 1.0
        self._freezing.load_state_dict(kept["rule"])
        self.clipping.norms.load_state_dict(kept.get("norms", {"dense": []}))
        self.refreshes, self._next_refresh = kept["refreshes"], kept["next_refresh"]
        self.local.load_state(kept)
        if self.local.since:
            self.session.checked = True  # replicas differ: the check of the start would refuse it

    def state_dict(self) -> State:
        return self.saved.own()

    def portable_state_dict(self) -> State:
        return self.saved.portable()

    def load_state_dict(self, state: State) -> None:
        self.saved.load(state)
