"""LocalSteps: 0/1 Adam's steps after the freeze, and the exchanges that bring replicas together.

The equations are at the top of zero_one_adam.py.
"""

import math
from typing import Any

import torch

from thinwire.flat import local_part
from thinwire.methods.onebit.clipping import Clipping
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.onebit.rule import Rule
from thinwire.methods.onebit.used_since import UsedSince
from thinwire.methods.overlap.reducer import GradientReducer
from thinwire.methods.session import Session


class LocalSteps:
    """
    since       local steps since the last exchange
    exchanges   so far
    """

    def __init__(
        self,
        session: Session,
        reducer: GradientReducer[MomentBucket],
        rule: Rule,
        clipping: Clipping,
        *,
        double_after: int,
        longest: int,
    ) -> None:
        self._session, self._reducer = session, reducer
        self._rule, self._clipping = rule, clipping
        self._double_after, self._longest = double_after, longest
        self._used = UsedSince(session, reducer)
        self.since, self.exchanges = 0, 0

    def begin(self, bucket: MomentBucket) -> None:
        """At the freeze."""
        bucket.flat.pack(bucket.parameters, bucket.new_moment("anchor"))
        bucket.new_moment("update")
        bucket.new_scalar("weight", 0.0)
        bucket.reset_feedback()

    def step(self) -> None:
        self._used.note()
        self._rule.progress.steps += 1
        factor = self._own_factor()
        for bucket in self._reducer.buckets:
            bucket.resting = frozenset()
            bucket.count("step")
            bucket.take_betas()
            if factor is not None:
                self._learn(bucket, factor)
            self._move(bucket)
        self.since += 1
        if self.since >= self._spacing():
            self.exchange()

    def _spacing(self) -> int:
        """Steps from one exchange to the next."""
        progress = self._rule.progress
        assert progress.frozen_at is not None
        begun = progress.steps - self.since - progress.frozen_at  # steps before this round
        doublings = min(begun // self._double_after, self._longest.bit_length())
        return int(min(self._longest, 2**doublings))

    def _own_factor(self) -> float | None:
        """On this replica's gradients; None if they are not finite."""
        clipping = self._clipping
        square = clipping.squared_gradients()
        norm = clipping.grad_norm = math.sqrt(square) if square >= 0 else math.nan
        if not math.isfinite(norm):
            self._session.account.skipped += 1
            return None
        return 1.0 if clipping.clip is None else min(1.0, clipping.clip / max(norm, 1e-30))

    def _learn(self, bucket: MomentBucket, factor: float) -> None:
        self._session.unscaled(bucket.take_gradients())
        if factor != 1.0:
            bucket.buffer.mul_(factor)
        for part, (b1, _) in bucket.runs(bucket.betas.__getitem__):
            bucket.m[part].lerp_(bucket.buffer[part], 1 - b1)

    def _move(self, bucket: MomentBucket) -> None:
        steps = bucket.views(self._rule.direct(bucket, bucket.m, bucket.buffer))
        m, weight = bucket.views(bucket.m), bucket.scalars["weight"]
        update, anchor = (bucket.views(bucket.moments[k]) for k in ("update", "anchor"))
        for at, x, group in self._rule.used(bucket):
            lr, first = float(group["lr"]), self._rule.correction(bucket, at)
            keep = 1 - lr * group["weight_decay"]
            x.mul_(keep).sub_(steps[at], alpha=lr)
            update[at].mul_(keep).add_(m[at], alpha=lr / first)
            anchor[at].mul_(keep)
            weight[at] = weight[at] * keep + lr / first

    def exchange(self) -> None:
        """All replicas at one point again."""
        reducer, wire = self._reducer, self._session.wire
        for bucket in reducer.buckets:
            bucket.buffer.copy_(bucket.moments["update"])
            bucket.flight = wire.mean(bucket.buffer, bucket.feedback)
        reducer.ask_usage(self._used.flags())
        finite = reducer.land()
        self._session.account.skipped += not finite
        for bucket in reducer.buckets:
            self._meet_again(bucket, finite)
        self._used.forget()
        self.since = 0
        self.exchanges += 1

    def _meet_again(self, bucket: MomentBucket, finite: bool) -> None:
        tensors = zip(
            bucket.views(bucket.buffer), bucket.views(bucket.m), bucket.views(bucket.roots()),
            bucket.views(bucket.moments["anchor"]), bucket.scalars["weight"], strict=True,
        )  # fmt: skip
        for at, (mean, m, root, anchor, weight) in enumerate(tensors):
            here = local_part(bucket.parameters[at])
            if at in bucket.resting:
                self._used.go_back(bucket, at)
                bucket.counts["step"][at] -= self.since
                continue
            if not finite:
                mean.zero_()
            torch.div(mean, weight.clamp(min=1e-30), out=m)
            here.copy_(anchor.sub_(mean.div_(root)))
        bucket.moments["update"].zero_()
        bucket.scalars["weight"].zero_()

    def state(self) -> dict[str, Any]:
        return {"exchanges": self.exchanges, "since": self.since}

    def load_state(self, kept: dict[str, Any]) -> None:
        self.exchanges, self.since = kept["exchanges"], kept["since"]
        # What was used so far in this round is not saved: all of it counts as used.
        self._used.forget(all_used=self.since > 0)
