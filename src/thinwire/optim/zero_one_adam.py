"""ZeroOneAdam: Adam that sends one bit a value from early on, and then not at every step.

    learning v   at refresh steps    g = mean_i g_i, dense ;  m, v and x as in AdamW
                 at the others       g = compressed mean of g_i ;  m and x as in AdamW, v stays
    local        m_i = b1 m_i + (1-b1) g_i ;  x_i = x_i - lr (m̂_i / (sqrt(v) + eps) + lam x_i)
                 U_i = sum of lr m̂_i ,  L = sum of lr     since the last exchange
    exchange     U = compressed mean of U_i ;  x = anchor - U / (sqrt(v) + eps) ;  m = U / L

The spacing of refreshes starts at 1 and doubles after every `double_after` of them; after the
freeze (one_bit.py) v stays, and the spacing of exchanges starts at 1 and doubles in the same way up
to `longest`. `anchor` is x at the last exchange; weight decay shrinks anchor, U and L like x, so
that all of them meet again exactly. Below the floor of one_bit.py no v is ever used with one-bit
gradients.

Replicas differ between exchanges: evaluate under `consensus()`, and call `finish()` at the end. A
replica whose own gradient is not finite takes that step with the momentum it has. Errors of the
first part are in units of gradients and are dropped at the freeze.

[Note: other numbers of workers] anchor, v, L and the step are the same on all replicas, and
x_i = anchor - U_i / (sqrt(v) + eps). So the mean of the replicas' weights goes with the mean of
their U_i, and an exchange uses nothing else of them: workers that all start from those means, of
m_i too, go on from where the old ones stood together. `portable_state_dict` holds the means; the
weights for it are those under `consensus()`. What is lost is how far the replicas were apart.

Paper: 0/1 Adam, arXiv 2202.06009.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.checks import require_count
from thinwire.optim.consensus import mean_of_replicas
from thinwire.optim.departures import State
from thinwire.optim.moment_bucket import MomentBucket
from thinwire.optim.one_bit import FLOOR, OneBitOptimizer, squared_norm
from thinwire.optim.stage_settings import CommonStageSettings, spelled_out

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam: less traffic than 1-bit Adam, with replicas that part for a few steps.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction: as in AdamW.
        double_after: refreshes, and later exchanges, after which their spacing doubles. Raise it
            when the loss falls behind 1-bit Adam's, lower it in short runs.
        longest: largest number of steps between two exchanges.
        freeze_at, clip, dense, bucket_mb, overlap, group: as in `OneBitAdam`. With `clip` each
            replica clips by its own norm once steps are local.
    """

    @spelled_out(OneBitOptimizer, CommonStageSettings)
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
        longest: int = 16,
        **stages: Unpack[CommonStageSettings],
    ) -> None:
        for name in ("inside", "shard_state", "late"):
            if name in stages:
                raise ValueError(
                    f"ZeroOneAdam({name}=...): its replicas take steps of their own, for which "
                    "each needs all of m and v and its own gradients; use OneBitAdam for that"
                )
        self.double_after = require_count("ZeroOneAdam", "double_after", double_after)
        self.longest = require_count("ZeroOneAdam", "longest", longest)
        self.refreshes, self.exchanges = 0, 0
        self._next_refresh = 1  # the step it happens at, counted from 1
        self._since = 0  # local steps since the last exchange
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction}, **stages)

    def _check_group(self, name: str, group: dict[str, Any]) -> None:
        super()._check_group(name, group)
        if not group["compress"]:
            raise ValueError(
                f"{name}(compress=False): local steps send nothing that could stay dense; use "
                "OneBitAdam for such groups"
            )

    @torch.no_grad()
    def _step(self) -> None:
        if self.compressing:
            self._local_step()
        else:
            self._common_step()

    # -- learning v -------------------------------------------------------------------------------

    def _refreshing(self) -> bool:
        """Whether the step that comes next is a dense one."""
        return self.steps + 1 >= self._next_refresh

    def _common_step(self) -> None:
        self._require_usable_gradients()
        if not self.buckets:
            self._begin()
        refreshing = self._refreshing()
        if not refreshing:
            self._measure()
        self._launch_rest()
        spread = self._spread() if refreshing else 0.0
        if not self._land():
            self.grad_norm = math.nan
            return
        self.steps += 1
        if refreshing:
            self._clip_mean(spread)
        for bucket in self.buckets:
            self._update(bucket, refreshing)
        if refreshing:
            self.refreshes += 1
            self._next_refresh = self.steps + 2 ** (self.refreshes // self.double_after)
        if (refreshing and self._due()) or self.steps == self.freeze_at:
            self._freeze()

    def _agreed(self, finite: bool) -> bool:
        # What arrives in one bit has no zeros: it says nothing of unused parameters.
        return super()._agreed(finite) if self._refreshing() else finite

    def _launch(self, bucket: MomentBucket) -> None:
        self._unscaled(bucket.take_gradients())
        if self._refreshing():
            bucket.flight = self.wire.mean(bucket.buffer, self.dense)
            return
        if self._factor != 1.0:
            bucket.buffer.mul_(self._factor)
        bucket.flight = self.wire.mean(bucket.buffer, bucket.feedback)

    def _overlaps(self) -> bool:
        if self.compressing:
            return False
        return self.overlap and (self.clip is None or self._refreshing())

    def _update(self, bucket: MomentBucket, refreshing: bool) -> None:
        if refreshing:
            b2 = bucket.betas[1]
            bucket.v.mul_(b2).addcmul_(bucket.buffer, bucket.buffer, value=1 - b2)
        bucket.m.lerp_(bucket.buffer, 1 - bucket.betas[0])
        later = self.refreshes + (1 if refreshing else 0)
        first, second = self._divisors(bucket, later)
        steps = bucket.views(self._scaled(bucket, bucket.m, first, second))
        for at, x, group in self._used(bucket):
            lr = float(group["lr"])
            x.mul_(1 - lr * group["weight_decay"])
            x.sub_(steps[at], alpha=lr)

    def _divisors(self, bucket: MomentBucket, refreshes: int) -> tuple[float, float]:
        if not bucket.groups[0]["bias_correction"]:
            return 1.0, 1.0
        b1, b2 = bucket.betas
        frozen = self.frozen_at is not None
        return 1 - b1**self.steps, 1.0 if frozen else 1 - b2**refreshes

    def _scaled(self, bucket: MomentBucket, source: Tensor, first: float, second: float) -> Tensor:
        """source / first / (sqrt(v / second) + eps), into the buffer; `source` may not be it."""
        if self.compressing:
            zero, out = source.new_zeros(()), bucket.buffer
            return torch.addcdiv(zero, source, bucket.roots(), value=1 / first, out=out)
        out = torch.div(bucket.v, second, out=bucket.buffer)
        if not self.compressing and self.steps > self.double_after:  # one-bit gradients meet v
            out.clamp_(min=FLOOR * float(out.mean()))
        out.sqrt_()
        for view, group in zip(bucket.views(out), bucket.groups, strict=True):
            view.add_(group["eps"])
        return torch.div(source, out, out=out).div_(first)

    def _corrections(self, bucket: MomentBucket, step: int) -> tuple[float, float]:
        correct = bucket.groups[0]["bias_correction"]
        return 1.0, 1 - bucket.betas[1] ** self.refreshes if correct else 1.0

    # -- local steps ------------------------------------------------------------------------------

    def _freeze_bucket(self, bucket: MomentBucket) -> None:
        super()._freeze_bucket(bucket)
        bucket.flat.pack(bucket.parameters, bucket.new_moment("anchor"))
        bucket.new_moment("update")
        bucket.new_scalar("weight", 0.0)
        bucket.reset_feedback()

    def _local_step(self) -> None:
        self._require_usable_gradients()
        self.steps += 1
        factor = self._own_factor()
        for bucket in self.buckets:
            if factor is not None:
                self._unscaled(bucket.take_gradients())
                if factor != 1.0:
                    bucket.buffer.mul_(factor)
                bucket.m.lerp_(bucket.buffer, 1 - bucket.betas[0])
            self._move_alone(bucket)
        self._since += 1
        if self._since >= min(self.longest, 2 ** (self.exchanges // self.double_after)):
            self._exchange()

    def _own_factor(self) -> float | None:
        """On this replica's gradients; None if they are not finite."""
        scale = 1.0 if self._scale is None else float(self._scale)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.grad_norm = math.sqrt(squared_norm(gradients)) / scale
        if not math.isfinite(self.grad_norm):
            self.account.skipped += 1
            return None
        return 1.0 if self.clip is None else min(1.0, self.clip / max(self.grad_norm, 1e-30))

    def _move_alone(self, bucket: MomentBucket) -> None:
        first, _ = self._divisors(bucket, self.refreshes)
        steps = bucket.views(self._scaled(bucket, bucket.m, first, 1.0))
        m, weight = bucket.views(bucket.m), bucket.scalars["weight"]
        update, anchor = (bucket.views(bucket.moments[k]) for k in ("update", "anchor"))
        for at, x, group in self._used(bucket):
            lr = float(group["lr"])
            keep = 1 - lr * group["weight_decay"]
            x.mul_(keep).sub_(steps[at], alpha=lr)
            update[at].mul_(keep).add_(m[at], alpha=lr / first)
            anchor[at].mul_(keep)
            weight[at] = weight[at] * keep + lr / first

    def _exchange(self) -> None:
        """All replicas at one point again."""
        for bucket in self.buckets:
            bucket.buffer.copy_(bucket.moments["update"])
            bucket.flight = self.wire.mean(bucket.buffer, bucket.feedback)
        finite = self._land()
        for bucket in self.buckets:
            update, anchor = bucket.moments["update"], bucket.moments["anchor"]
            mean = bucket.buffer if finite else bucket.buffer.zero_()
            update.copy_(mean)
            triples = zip(
                bucket.views(bucket.m), bucket.views(update), bucket.scalars["weight"], strict=True
            )
            for m, u, weight in triples:
                torch.div(u, weight.clamp(min=1e-30), out=m)
            anchor.sub_(self._scaled(bucket, update, 1.0, 1.0))
            bucket.flat.unpack(anchor, bucket.parameters)
            update.zero_()
            bucket.scalars["weight"].zero_()
        self._since = 0
        self.exchanges += 1

    @contextmanager
    def consensus(self) -> Iterator[None]:
        if not self.apart:
            yield
            return
        with mean_of_replicas(self.meeting, self._parameters):
            yield

    @torch.no_grad()
    def finish(self) -> None:
        super().finish()
        if self._since:
            self._exchange()

    # -- state ------------------------------------------------------------------------------------

    @property
    def apart(self) -> bool:
        """Whether the replicas differ at present: between two exchanges."""
        return self._since > 0 and self.wire.size > 1

    def _common_entries(self) -> dict[int, dict[str, Tensor]]:
        """See [Note: other numbers of workers]."""
        entries = super()._common_entries()
        if not self.apart:
            return entries
        for bucket in self.buckets:
            for name in ("exp_avg", "update"):
                mean = self.meeting.mean(bucket.moments[name].clone()).wait()
                for index, view in zip(bucket.indices, bucket.views(mean), strict=True):
                    entries[index][name] = view
        return entries

    def _settings(self) -> dict[str, Any]:
        own = {"double_after": self.double_after, "longest": self.longest}
        return super()._settings() | own

    def _kept(self) -> State:
        return super()._kept() | {
            "refreshes": self.refreshes,
            "next_refresh": self._next_refresh,
            "exchanges": self.exchanges,
            "since": self._since,
        }

    def _restore(self, kept: State) -> None:
        super()._restore(kept)
        self.refreshes, self._next_refresh = kept["refreshes"], kept["next_refresh"]
        self.exchanges, self._since = kept["exchanges"], kept["since"]
        if self._since:
            self._checked = True  # replicas differ, and the check of the start would refuse it
