"""The published methods, and ours, as settings of `LocalUpdates`.

preset           delay     fresh  merge  outer                         waits for the network
---------------  --------  -----  -----  ----------------------------  ---------------------
LocalSGD         0                       1                             every round
SlowMo           0                       1, momentum .5                every round
DiLoCo           0                       .7, Nesterov .9               every round
StreamingDiLoCo  5 steps          .5     .4, Nesterov .9               hardly
SparseLoCo       0                       1                             every round, briefly
CO2              a round   0             1, momentum .2, gap, clipped  never
Eager            a round   1/M           .4, Nesterov .9               never
Overlapped       a round   1             1, momentum .5                never

Every preset also takes codec, buffers, offload and group, as `LocalUpdates` does.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.optim.checks import require_choice, require_group, require_positive, require_share
from thinwire.optim.local_updates import Every, LocalUpdates
from thinwire.optim.outer import Outer, require_penalty
from thinwire.wire.codecs import Codec, ErrorFeedback, Feedback, Int4, TopK
from thinwire.wire.wire import group_size

Inner = torch.optim.Optimizer
Penalty = float | Literal["gap"]


def _outer(
    name: str, lr: float, momentum: float = 0.0, *, nesterov: bool = False, **more: Any
) -> Outer:
    """Checked under the names that presets give them; no Nesterov without a momentum."""
    lr = require_positive(name, "outer_lr", lr)
    momentum = require_share(name, "outer_momentum", momentum)
    return Outer(lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0, **more)


class LocalSGD(LocalUpdates):
    """Plain parameter averaging every few steps."""

    def __init__(self, inner: Inner, *, every: Every = 8, **shared: Any) -> None:
        super().__init__(inner, every=every, **shared)


class SlowMo(LocalUpdates):
    """Blocking averages with a heavy-ball outer momentum in units of the inner learning rate."""

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 48,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.5,
        **shared: Any,
    ) -> None:
        outer = _outer("SlowMo", outer_lr, outer_momentum, follow_lr=True)
        super().__init__(inner, every=every, outer=outer, **shared)


class DiLoCo(LocalUpdates):
    """Long rounds, blocking averages, Nesterov outer momentum."""

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        **shared: Any,
    ) -> None:
        outer = _outer("DiLoCo", outer_lr, outer_momentum, nesterov=True)
        super().__init__(inner, every=every, outer=outer, **shared)


class StreamingDiLoCo(LocalUpdates):
    """DiLoCo by fragments: each has its own phase in the round and lands a few steps later."""

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 100,
        fragments: int | Sequence[Sequence[Tensor]] = 4,
        delay: int = 5,
        merge: float = 0.5,
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        codec: Codec | Feedback | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(
            inner,
            every=every,
            fragments=fragments,
            delay=delay,
            merge=merge,
            outer=_outer("StreamingDiLoCo", outer_lr, outer_momentum, nesterov=True),
            codec=Int4() if codec is None else codec,
            **shared,
        )


class SparseLoCo(LocalUpdates):
    """Of the progress of a round the largest 1.6 %, in two bits; the rest later, and fading."""

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 24,
        outer_lr: float = 1.0,
        codec: Codec | Feedback | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(
            inner,
            every=every,
            outer=_outer("SparseLoCo", outer_lr),
            codec=ErrorFeedback(TopK(), decay=0.95) if codec is None else codec,
            **shared,
        )


class CO2(LocalUpdates):
    """The averaging of a round overlaps the whole next round; the anchor is the same everywhere."""

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 24,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.2,
        penalty: Penalty = "gap",
        clip: float | None = 2.0,
        clip_by: Literal["norm", "value"] = "norm",
        **shared: Any,
    ) -> None:
        require_penalty("CO2", penalty)
        if clip is not None:
            require_positive("CO2", "clip", clip)
        require_choice("CO2", "clip_by", clip_by, ("norm", "value"))
        outer = _outer("CO2", outer_lr, outer_momentum, penalty=penalty, clip=clip, clip_by=clip_by)
        super().__init__(inner, every=every, delay="round", outer=outer, **shared)


class Eager(LocalUpdates):
    """A round late, with each replica's own newest progress in its share of the mean."""

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 30,
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        **shared: Any,
    ) -> None:
        require_group("Eager", "group", shared.get("group"))
        super().__init__(
            inner,
            every=every,
            delay="round",
            fresh=1 / group_size(shared.get("group")),
            outer=_outer("Eager", outer_lr, outer_momentum, nesterov=True),
            **shared,
        )


class Overlapped(LocalUpdates):
    """Ours, and what we recommend: nobody waits, and on average nothing is late."""

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 24,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.5,
        **shared: Any,
    ) -> None:
        outer = _outer("Overlapped", outer_lr, outer_momentum)
        super().__init__(inner, every=every, delay="round", fresh=1.0, outer=outer, **shared)
