"""The outer optimizer: how an anchor moves by the mean progress of the replicas.

    L = penalty                              >= 1, divides a mean that arrives a round late
    m = momentum * m + d / L                 d: the mean progress (x - y), a pseudo-gradient
    m = clip(m)
    x = x - lr * m                           heavy ball
    x = x - lr * (d / L + momentum * m)      Nesterov

`penalty="gap"` sets L = clamp(1 + |x_t - x_{t-1}| / |d|, 1, 8): how far the anchor has moved since
the base of the late mean, in rounds of progress. CO2's paper divides by a staleness gap too, but
its closed form could not be read there; this one is ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from thinwire.methods.shared.shards import Shards
from thinwire.optim.checks import (
    plain_number,
    refusal,
    require_bool,
    require_choice,
    require_positive,
    require_share,
)

_LARGEST_GAP = 8.0
_NORM_MEMORY = 0.9  # of the average norm that clipping by norm compares with
_MARGIN = 0.8  # settings are called stable up to this share of the exact limit


@dataclass(frozen=True)
class Outer:
    """Settings of the outer optimizer."""

    lr: float = 1.0
    """Share of the mean progress that is taken over. Lower it when the loss swings from round to
    round, before lowering the inner learning rate."""
    momentum: float = 0.0
    """Raise it with the number of replicas; too high shows as a loss that overshoots after the
    learning rate's warm-up."""
    nesterov: bool = False
    penalty: float | Literal["gap"] = 1.0
    """Divides a mean that is a round old: a constant >= 1, or "gap". Raise it when the loss
    diverges with an overlapped method and not with its blocking counterpart."""
    clip: float | None = None
    """Bound of the outer momentum; see clip_by. Lower it when single rounds throw the loss up."""
    clip_by: Literal["norm", "value"] = "norm"
    """norm: |m| <= clip * average |d| / (1 - momentum), free of units. value: each element within
    +-clip, in units of the weights, as CO2's paper has it (its 1.0 almost never binds)."""
    follow_lr: bool = False
    """Keep the momentum in units of the inner learning rate, as SlowMo is published: when the
    schedule lowers the rate, old momentum shrinks with it. Each parameter group has its own."""

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "lr": require_positive("Outer", "lr", self.lr),
            "momentum": require_share("Outer", "momentum", self.momentum),
            "nesterov": require_bool("Outer", "nesterov", self.nesterov),
            "penalty": require_penalty("Outer", self.penalty),
            "clip": None if self.clip is None else require_positive("Outer", "clip", self.clip),
            "clip_by": require_choice("Outer", "clip_by", self.clip_by, ("norm", "value")),
            "follow_lr": require_bool("Outer", "follow_lr", self.follow_lr),
        }
        for key, value in checked.items():
            object.__setattr__(self, key, value)
        if self.nesterov and self.momentum == 0:
            raise ValueError("Outer(nesterov=True) needs a momentum (outer_momentum) > 0")


def require_penalty(name: str, penalty: Any) -> float | Literal["gap"]:
    if isinstance(penalty, str) and penalty == "gap":
        return "gap"
    number = plain_number(penalty)
    if number is None or number < 1:
        raise refusal(name, "penalty", 'a number >= 1 or "gap"', penalty)
    return number


class OuterState:
    """The outer optimizer of one flat anchor: its momentum and a few scalars.

    A step has two halves, so that a heavy ball's mean is used up - and its buffer free for the next
    flight - before the anchor moves. `members` are (values, parameter group) of each tensor in the
    anchor.
    """

    def __init__(
        self,
        settings: Outer,
        anchor: Tensor,
        shards: Shards,
        members: Sequence[tuple[int, int]],
        *,
        always: bool,
    ) -> None:
        self.settings = settings
        runs = groupby(members, key=lambda member: member[1])
        self._runs = [(sum(values for values, _ in run), group) for group, run in runs]
        self._norm = shards.norm
        # A norm is a pass over the buffer, and a collective among shards.
        self._uses_norms = settings.penalty == "gap" or settings.clip is not None
        keeps = always or settings.momentum > 0 or settings.clip is not None
        self.momentum = torch.zeros_like(anchor) if keeps else None
        self.moved = 0.0  # |x_t - x_{t-1}|
        self.usual = 0.0  # average |d|
        self.lrs: list[float] = []  # inner rates of the groups at the last round, none before it
        self.penalty = 1.0  # the one applied last

    def absorb(self, mean: Tensor, inner_lrs: Sequence[float]) -> None:
        """The first half: penalty, momentum, clipping. `mean` is only read. `inner_lrs` are those
        of the parameter groups."""
        s = self.settings
        size = self._norm(mean) if self._uses_norms else 0.0
        self.penalty = self._penalty(size)
        norm = 0.0
        if self.momentum is not None:
            self._fade(self.momentum, inner_lrs)
            self.momentum.add_(mean, alpha=1 / self.penalty)
            norm = self._clipped(size) if self._uses_norms else 0.0
        direct = size / self.penalty if s.nesterov or self.momentum is None else 0.0
        carried = s.momentum * norm if s.nesterov else norm
        self.moved = s.lr * (direct + carried)  # for Nesterov an upper bound

    def move(self, anchor: Tensor, mean: Tensor | None = None) -> None:
        """The second half. A heavy ball needs no mean any more, the others do."""
        s = self.settings
        if self.needs_mean:
            assert mean is not None
            anchor.sub_(mean, alpha=s.lr / self.penalty)
        if self.momentum is not None:
            anchor.sub_(self.momentum, alpha=s.lr * (s.momentum if s.nesterov else 1.0))

    @property
    def needs_mean(self) -> bool:
        return self.settings.nesterov or self.momentum is None

    def scalars(self) -> dict[str, Any]:
        return {
            "moved": self.moved,
            "usual": self.usual,
            "lr": list(self.lrs),
            "penalty": self.penalty,
        }

    def load_scalars(self, state: dict[str, Any]) -> None:
        self.moved, self.usual = state["moved"], state["usual"]
        lr, self.penalty = state["lr"], state["penalty"]
        self.lrs = list(lr) if isinstance(lr, list | tuple) else [float(lr)]

    def _penalty(self, size: float) -> float:
        if self.settings.penalty != "gap":
            return float(self.settings.penalty)
        return min(_LARGEST_GAP, 1 + self.moved / (size + 1e-12)) if size > 0 else 1.0

    def _fade(self, momentum: Tensor, inner_lrs: Sequence[float]) -> None:
        """momentum <- b momentum, with `follow_lr` in units of the rate of each group."""
        factors = [self.settings.momentum] * len(inner_lrs)
        if self.settings.follow_lr:
            # No rate before this one, or a rate of 0, is no unit: nothing to convert from.
            before = self.lrs or [0.0]
            if len(before) != len(inner_lrs):  # none yet, or the one rate of an older checkpoint
                before = before[:1] * len(inner_lrs)
            pairs = zip(inner_lrs, before, strict=True)
            ratios = [now / then if then > 0 else 1.0 for now, then in pairs]
            factors = [self.settings.momentum * ratio for ratio in ratios]
            self.lrs = list(inner_lrs)
        if len({factors[group] for _, group in self._runs}) == 1:
            momentum.mul_(factors[self._runs[0][1]])
            return
        sizes = [values for values, _ in self._runs]
        for view, (_, group) in zip(momentum.split(sizes), self._runs, strict=True):
            view.mul_(factors[group])

    def _clipped(self, size: float) -> float:
        """Clips the momentum in place and returns its norm."""
        s = self.settings
        assert self.momentum is not None
        self.usual = _NORM_MEMORY * self.usual + (1 - _NORM_MEMORY) * size if self.usual else size
        if s.clip is not None and s.clip_by == "value":
            self.momentum.clamp_(-s.clip, s.clip)
        norm = self._norm(self.momentum)
        if s.clip is None or s.clip_by == "value":
            return norm
        limit = s.clip * self.usual / (1 - s.momentum)
        if norm > limit:
            self.momentum.mul_(limit / norm)
        return min(norm, limit)


def preset_outer(
    name: str, lr: float, momentum: float = 0.0, *, nesterov: bool = False, **more: Any
) -> Outer:
    """Checked under the names that presets give them; no Nesterov without a momentum."""
    lr = require_positive(name, "outer_lr", lr)
    momentum = require_share(name, "outer_momentum", momentum)
    return Outer(lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0, **more)


def largest_stable_lr(momentum: float, nesterov: bool, own_weight: float) -> float:
    """The outer lr / penalty below which rounds converge on a quadratic.

    One mode, of which a round of inner steps removes the share rho: with k = lr rho / L the error
    obeys e_{t+1} = (1 + b) e_t - b e_{t-1} - k a_t, where a_t = f e_t + (1 - f) e_{t-1} (f is
    own_weight, b the momentum) for heavy ball and (1 + b) a_t - b a_{t-1} with it for Nesterov.
    Stable if all roots lie in the unit circle for every rho in (0, 1]; found by bisection on lr.
    """
    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        if _stable(middle, momentum, nesterov, own_weight):
            low = middle
        else:
            high = middle
    return low


def _stable(lr: float, b: float, nesterov: bool, f: float) -> bool:
    for k in lr * np.linspace(0.05, 1.0, 20):
        drive = np.convolve([f, 1 - f], [1 + b, -b] if nesterov else [1, 0])  # e_t .. e_{t-2}
        characteristic = np.array([1.0, -(1 + b), b, 0.0])
        characteristic[1:] += k * drive
        if np.abs(np.roots(characteristic)).max() >= 1:
            return False
    return True


def stability_warning(settings: Outer, own_weight: float) -> str | None:
    """What to change when a round of delay makes these settings unstable; None if it does not."""
    limit = _MARGIN * largest_stable_lr(settings.momentum, settings.nesterov, own_weight)
    penalty = _expected_penalty(settings)
    if settings.lr / penalty <= limit * (1 + 1e-6):
        return None
    return (
        f"outer_lr={settings.lr:g} with outer_momentum={settings.momentum:g} and a penalty of "
        f"about {penalty:.2g} is beyond what a mean that arrives a round late allows with "
        f"own_weight={own_weight:g}: rounds may swing or diverge. Within it: "
        f"outer_lr <= {limit * penalty:.2g} at this momentum"
        + _momentum_hint(settings, own_weight, penalty)
        + ", or own_weight=1 (tw.Overlapped)"
    )


def _momentum_hint(settings: Outer, own_weight: float, penalty: float) -> str:
    for twentieths in range(math.floor(settings.momentum * 20), -1, -1):
        momentum = twentieths / 20
        nesterov = settings.nesterov and momentum > 0
        if settings.lr / penalty <= _MARGIN * largest_stable_lr(momentum, nesterov, own_weight):
            return f", outer_momentum <= {momentum:.2g} at this outer_lr"
    return ""


def _expected_penalty(settings: Outer) -> float:
    """The gap settles where L = 1 + lr / ((1 - momentum) L), if all rounds progress alike."""
    if settings.penalty != "gap":
        return float(settings.penalty)
    return (1 + math.sqrt(1 + 4 * settings.lr / (1 - settings.momentum))) / 2
