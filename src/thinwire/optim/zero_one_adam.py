"""ZeroOneAdam: Adam that sends one bit a value from early on, and then not at every step.

    learning v   at refresh steps    g = mean_i g_i, dense ;  m, v and x as in AdamW
                 at the others       g = compressed mean of g_i ;  m and x as in AdamW, v stays
    local        m_i = b1 m_i + (1-b1) g_i ;  x_i = x_i - lr (m̂_i / (sqrt(v) + eps) + lam x_i)
                 U_i = sum of lr m̂_i ,  L = sum of lr     since the last exchange
    exchange     U = compressed mean of U_i ;  x = anchor - U / (sqrt(v) + eps) ;  m = U / L

The spacing of refreshes starts at 1 and doubles after every `double_after` of them. After the
freeze (one_bit.py) v stays, and the spacing of exchanges starts at 1 and doubles every
`local_double_after` steps up to `longest`. `anchor` is x at the last exchange; weight decay shrinks
anchor, U and L like x, so that all of them meet again exactly. Below the floor of one_bit.py no v
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

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.checks import require_count
from thinwire.optim.consensus import mean_of_replicas
from thinwire.optim.departures import State
from thinwire.optim.flat import local_part
from thinwire.optim.moment_bucket import MomentBucket
from thinwire.optim.one_bit import OneBitOptimizer
from thinwire.optim.stage_settings import CommonStageSettings, spelled_out

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ZeroOneAdam(OneBitOptimizer):
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
        local_double_after: int = 64,
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
        self.local_double_after = require_count(
            "ZeroOneAdam", "local_double_after", local_double_after
        )
        self.refreshes, self.exchanges = 0, 0
        self._seen: set[int] = set()  # parameters with a gradient here since the last exchange
        self._before: dict[int, tuple[Tensor, ...]] = {}  # the others as they were then
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
        self._factor = 1.0
        if not refreshing:
            self._measure()
        self._launch_rest()
        spread = self._spread() if refreshing else 0.0
        if not self._land():
            self.grad_norm = math.nan
            return
        self._count_step()
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
        # What arrives in one bit does not have the norm of the mean gradient.
        return super()._agreed(finite) if self._refreshing() else self._shards.all(finite)

    def _learns(self, bucket: MomentBucket) -> bool:
        """Whether its variance learns from this step: at refreshes, and from its first gradient."""
        return self._refreshing() or not any(bucket.counts["refreshes"])

    def _launch(self, bucket: MomentBucket) -> None:
        bucket.take_betas()
        self._unscaled(bucket.take_gradients())
        if self._learns(bucket):
            bucket.flight = self.wire.mean(bucket.buffer, self.dense)
            return
        if self._factor != 1.0:
            bucket.buffer.mul_(self._factor)
        bucket.flight = self.wire.mean(bucket.buffer, bucket.feedback)

    def _make_buckets(self, order: Sequence[int], whole: bool = False) -> list[MomentBucket]:
        buckets = super()._make_buckets(order, whole)
        for bucket in buckets:
            bucket.counts["refreshes"] = [0] * len(bucket.indices)
        return buckets

    def _admit(self, indices: Sequence[int]) -> Sequence[MomentBucket]:
        if self.compressing:
            raise RuntimeError(
                f"ZeroOneAdam: parameters {list(indices)} got their first gradient after the "
                "variance was frozen, and local steps have no dense gradients to learn one from; "
                "set freeze_at= later, or use OneBitAdam, which trains such parameters densely"
            )
        return super()._admit(indices)

    def _overlaps(self) -> bool:
        if self.compressing:
            return False
        return self.overlap and (self.clip is None or self._refreshing())

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
        for at, x, group in self._used(bucket):
            lr = float(group["lr"])
            x.mul_(1 - lr * group["weight_decay"])
            x.sub_(steps[at], alpha=lr)

    def _variance_correction(self, bucket: MomentBucket, at: int) -> float:
        """v learns at refreshes alone."""
        refreshes = max(1, bucket.counts["refreshes"][at])
        return 1 - bucket.betas[at][1] ** refreshes if bucket.groups[at]["bias_correction"] else 1.0

    def _directed(self, bucket: MomentBucket) -> Tensor:
        """m̂ / (sqrt(v̂) + eps) into the buffer, with v̂ above its floor once one-bit gradients have
        come."""
        if self.steps <= self.double_after:
            return self._direct(bucket, bucket.m, bucket.buffer)
        out = bucket.buffer
        for part, second in bucket.runs(lambda at: self._variance_correction(bucket, at)):
            torch.div(bucket.v[part], second, out=out[part])
        for at in bucket.resting:
            bucket.pieces(out)[at].zero_()  # what they sent is no variance
        self._lift(bucket, out)
        out.sqrt_()
        for part, eps in bucket.runs(lambda at: bucket.groups[at]["eps"]):
            out[part].add_(eps)
        for part, first in bucket.runs(lambda at: self._correction(bucket, at)):
            torch.div(bucket.m[part], out[part], out=out[part]).div_(first)
        return out

    # -- local steps ------------------------------------------------------------------------------

    def _freeze_bucket(self, bucket: MomentBucket) -> None:
        super()._freeze_bucket(bucket)
        bucket.flat.pack(bucket.parameters, bucket.new_moment("anchor"))
        bucket.new_moment("update")
        bucket.new_scalar("weight", 0.0)
        bucket.reset_feedback()

    def _local_step(self) -> None:
        self._require_usable_gradients()
        self._note_gradients()
        self.steps += 1
        factor = self._own_factor()
        for bucket in self.buckets:
            bucket.resting = frozenset()
            bucket.count("step")
            bucket.take_betas()
            if factor is not None:
                self._unscaled(bucket.take_gradients())
                if factor != 1.0:
                    bucket.buffer.mul_(factor)
                for part, (b1, _) in bucket.runs(bucket.betas.__getitem__):
                    bucket.m[part].lerp_(bucket.buffer[part], 1 - b1)
            self._move_alone(bucket)
        self._since += 1
        if self._since >= self._spacing():
            self._exchange()

    def _spacing(self) -> int:
        """Steps from one exchange to the next."""
        assert self.frozen_at is not None
        begun = self.steps - self._since - self.frozen_at  # steps before this round
        doublings = min(begun // self.local_double_after, self.longest.bit_length())
        return int(min(self.longest, 2**doublings))

    def _note_gradients(self) -> None:
        """See [Note: unused]: keeps what was, until there is a gradient."""
        for bucket in self.buckets:
            for at, index in enumerate(bucket.indices):
                if bucket.parameters[at].grad is not None:
                    self._before.pop(index, None)
                    self._seen.add(index)
                elif index not in self._seen and index not in self._before:
                    kept = [local_part(bucket.parameters[at]), *self._round_state(bucket, at)]
                    self._before[index] = tuple(value.clone() for value in kept)
        unplaced = set(range(len(self._parameters))) - self._place.keys()
        self._seen |= {i for i in unplaced if self._parameters[i].grad is not None}

    def _round_state(self, bucket: MomentBucket, at: int) -> list[Tensor]:
        """What a local step changes of a tensor, the weights excepted."""
        values = (bucket.m, bucket.moments["anchor"], bucket.moments["update"])
        return [bucket.views(value)[at] for value in values] + [bucket.scalars["weight"][at]]

    def _ask_usage(self) -> None:
        if not self.compressing:
            super()._ask_usage()
            return
        self._usage = self.wire.union([i in self._seen for i in range(len(self._parameters))])

    def _own_factor(self) -> float | None:
        """On this replica's gradients; None if they are not finite."""
        square = self._squared_gradients()
        self.grad_norm = math.sqrt(square) if square >= 0 else math.nan
        if not math.isfinite(self.grad_norm):
            self.account.skipped += 1
            return None
        return 1.0 if self.clip is None else min(1.0, self.clip / max(self.grad_norm, 1e-30))

    def _move_alone(self, bucket: MomentBucket) -> None:
        steps = bucket.views(self._direct(bucket, bucket.m, bucket.buffer))
        m, weight = bucket.views(bucket.m), bucket.scalars["weight"]
        update, anchor = (bucket.views(bucket.moments[k]) for k in ("update", "anchor"))
        for at, x, group in self._used(bucket):
            lr, first = float(group["lr"]), self._correction(bucket, at)
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
        self._ask_usage()
        finite = self._land()
        for bucket in self.buckets:
            self._meet_again(bucket, finite)
        self._seen, self._before = set(), {}
        self._since = 0
        self.exchanges += 1

    def _meet_again(self, bucket: MomentBucket, finite: bool) -> None:
        roots = bucket.views(bucket.roots())
        tensors = zip(
            bucket.views(bucket.buffer), bucket.views(bucket.m), roots,
            bucket.views(bucket.moments["anchor"]), bucket.scalars["weight"], strict=True,
        )  # fmt: skip
        for at, (mean, m, root, anchor, weight) in enumerate(tensors):
            here = local_part(bucket.parameters[at])
            if at in bucket.resting:
                self._go_back(bucket, at)
                continue
            if not finite:
                mean.zero_()
            torch.div(mean, weight.clamp(min=1e-30), out=m)
            here.copy_(anchor.sub_(mean.div_(root)))
        bucket.moments["update"].zero_()
        bucket.scalars["weight"].zero_()

    def _go_back(self, bucket: MomentBucket, at: int) -> None:
        """A tensor that nobody has used since the last exchange: as if there had been no steps."""
        weights, *values = self._before[bucket.indices[at]]
        local_part(bucket.parameters[at]).copy_(weights)
        for held, value in zip(self._round_state(bucket, at), values, strict=True):
            held.copy_(value)
        bucket.counts["step"][at] -= self._since

    @contextmanager
    def consensus(self) -> Iterator[None]:
        if not self.apart:
            yield
            return
        with mean_of_replicas(self.meeting, self._parameters, self._shards):
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
        own = {
            "double_after": self.double_after,
            "local_double_after": self.local_double_after,
            "longest": self.longest,
        }
        return super()._settings() | own

    def _run_counts(self) -> dict[str, Tensor]:
        return super()._run_counts() | {"refreshes": torch.tensor(float(self.refreshes))}

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
        # What was used so far in this round is not saved: all of it counts as used.
        self._seen, self._before = set(range(len(self._parameters))), {}
        if self._since:
            self._checked = True  # replicas differ, and the check of the start would refuse it
        else:
            self._seen = set()
