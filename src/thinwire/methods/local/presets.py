"""The published methods, and ours, as settings of the engine in rounds.py.

preset           delay     own    merge  outer                         waits for the network
---------------  --------  -----  -----  ----------------------------  ---------------------
LocalSGD         0                       1                             every round
SlowMo           0                       1, momentum .5                every round
DiLoCo           0                       .7, Nesterov .9               every round
StreamingDiLoCo  5 steps          .5     .4, Nesterov .9               hardly
SparseLoCo       0                       1                             every round, briefly
CO2              a round   0             1, momentum .2, gap, clipped  never
Eager            a round   1/M           .4, Nesterov .9               never
Overlapped       a round   1             1, momentum .5                never

"own" is own_weight, how much of its own newest progress a replica uses before the others' arrives.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.methods.base import Shown, WireOptimizer, require_wrapped
from thinwire.methods.local.fragment import Fragment
from thinwire.methods.local.outer import Outer, require_penalty
from thinwire.methods.local.rounds import Every, LocalRounds, RoundOptions
from thinwire.optim.checks import (
    require_choice,
    require_group,
    require_positive,
    require_share,
)
from thinwire.wire.codecs import Codec, ErrorFeedback, Feedback, Int4, TopK
from thinwire.wire.wire import Group, group_size

Inner = torch.optim.Optimizer
Penalty = float | Literal["gap"]


def _outer(
    name: str, lr: float, momentum: float = 0.0, *, nesterov: bool = False, **more: Any
) -> Outer:
    """Checked under the names that presets give them; no Nesterov without a momentum."""
    lr = require_positive(name, "outer_lr", lr)
    momentum = require_share(name, "outer_momentum", momentum)
    return Outer(lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0, **more)


class LocalSGD(WireOptimizer):
    """Plain parameter averaging every few steps.

    Args:
        inner: any torch optimizer over the model's parameters.
        every: inner steps in a round. Raise it while `account.exposed` grows, lower it when the
            loss falls behind data parallelism; "auto" measures it.
        fragments, codec, buffers, offload, group: as in `LocalUpdates`.
    """

    engine: LocalRounds
    every = Shown[int | None]("every", "Inner steps in a round; None while it is measured.")
    outer = Shown[Outer]("outer", "The outer optimizer's settings.")
    rounds = Shown[int]("rounds", "Rounds ended so far.")
    fragments = Shown[list[Fragment]]("fragments", "What is averaged together.")
    outer_bytes = Shown[int]("outer_bytes", "Memory of the outer state on this rank.")

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 8,
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        codec: Codec | Feedback | None = None,
        buffers: Iterable[Tensor] = (),
        offload: bool = False,
        group: Group = None,
    ) -> None:
        require_wrapped("LocalSGD", inner)
        options = RoundOptions(
            "LocalSGD",
            inner,
            every,
            fragments=fragments,
            codec=codec,
            buffers=buffers,
            offload=offload,
            group=group,
        )
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = LocalRounds(self.session, options)


class SlowMo(WireOptimizer):
    """Blocking averages with a heavy-ball outer momentum in units of the inner learning rate.

    Args:
        inner: any torch optimizer over the model's parameters.
        every: inner steps in a round. Raise it while `account.exposed` grows, lower it when the
            loss falls behind data parallelism; "auto" measures it.
        outer_lr, outer_momentum: of the outer optimizer. Lower either when the loss swings with
            the rounds.
        fragments, codec, buffers, offload, group: as in `LocalUpdates`.
    """

    engine: LocalRounds
    every = Shown[int | None]("every", "Inner steps in a round; None while it is measured.")
    outer = Shown[Outer]("outer", "The outer optimizer's settings.")
    rounds = Shown[int]("rounds", "Rounds ended so far.")
    fragments = Shown[list[Fragment]]("fragments", "What is averaged together.")
    outer_bytes = Shown[int]("outer_bytes", "Memory of the outer state on this rank.")

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 48,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.5,
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        codec: Codec | Feedback | None = None,
        buffers: Iterable[Tensor] = (),
        offload: bool = False,
        group: Group = None,
    ) -> None:
        require_wrapped("SlowMo", inner)
        outer = _outer("SlowMo", outer_lr, outer_momentum, follow_lr=True)
        options = RoundOptions(
            "SlowMo",
            inner,
            every,
            outer=outer,
            fragments=fragments,
            codec=codec,
            buffers=buffers,
            offload=offload,
            group=group,
        )
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = LocalRounds(self.session, options)


class DiLoCo(WireOptimizer):
    """Long rounds, blocking averages, Nesterov outer momentum.

    Args:
        inner: any torch optimizer over the model's parameters.
        every: inner steps in a round. Raise it while `account.exposed` grows, lower it when the
            loss falls behind data parallelism; "auto" measures it.
        outer_lr, outer_momentum: of the outer optimizer. Lower either when the loss swings with
            the rounds.
        fragments, codec, buffers, offload, group: as in `LocalUpdates`.
    """

    engine: LocalRounds
    every = Shown[int | None]("every", "Inner steps in a round; None while it is measured.")
    outer = Shown[Outer]("outer", "The outer optimizer's settings.")
    rounds = Shown[int]("rounds", "Rounds ended so far.")
    fragments = Shown[list[Fragment]]("fragments", "What is averaged together.")
    outer_bytes = Shown[int]("outer_bytes", "Memory of the outer state on this rank.")

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        codec: Codec | Feedback | None = None,
        buffers: Iterable[Tensor] = (),
        offload: bool = False,
        group: Group = None,
    ) -> None:
        require_wrapped("DiLoCo", inner)
        outer = _outer("DiLoCo", outer_lr, outer_momentum, nesterov=True)
        options = RoundOptions(
            "DiLoCo",
            inner,
            every,
            outer=outer,
            fragments=fragments,
            codec=codec,
            buffers=buffers,
            offload=offload,
            group=group,
        )
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = LocalRounds(self.session, options)


class StreamingDiLoCo(WireOptimizer):
    """DiLoCo by fragments: each has its own phase in the round and lands a few steps later.

    Args:
        inner: any torch optimizer over the model's parameters.
        every: inner steps in a round. Raise it while `account.exposed` grows, lower it when the
            loss falls behind data parallelism; "auto" measures it.
        fragments, delay, merge: as in `LocalUpdates`.
        outer_lr, outer_momentum: of the outer optimizer. Lower either when the loss swings with
            the rounds.
        codec, buffers, offload, group: as in `LocalUpdates`.
    """

    engine: LocalRounds
    every = Shown[int | None]("every", "Inner steps in a round; None while it is measured.")
    outer = Shown[Outer]("outer", "The outer optimizer's settings.")
    rounds = Shown[int]("rounds", "Rounds ended so far.")
    fragments = Shown[list[Fragment]]("fragments", "What is averaged together.")
    outer_bytes = Shown[int]("outer_bytes", "Memory of the outer state on this rank.")

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
        buffers: Iterable[Tensor] = (),
        offload: bool = False,
        group: Group = None,
    ) -> None:
        require_wrapped("StreamingDiLoCo", inner)
        outer = _outer("StreamingDiLoCo", outer_lr, outer_momentum, nesterov=True)
        options = RoundOptions(
            "StreamingDiLoCo",
            inner,
            every,
            delay,
            merge=merge,
            fragments=fragments,
            outer=outer,
            codec=Int4() if codec is None else codec,
            buffers=buffers,
            offload=offload,
            group=group,
        )
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = LocalRounds(self.session, options)


class SparseLoCo(WireOptimizer):
    """Of the progress of a round the largest 1.6 %, in two bits; the rest later, and fading.

    Args:
        inner: any torch optimizer over the model's parameters.
        every: inner steps in a round. Raise it while `account.exposed` grows, lower it when the
            loss falls behind data parallelism; "auto" measures it.
        outer_lr: of the outer optimizer. Lower it when the loss swings with the rounds.
        fragments, codec, buffers, offload, group: as in `LocalUpdates`.
    """

    engine: LocalRounds
    every = Shown[int | None]("every", "Inner steps in a round; None while it is measured.")
    outer = Shown[Outer]("outer", "The outer optimizer's settings.")
    rounds = Shown[int]("rounds", "Rounds ended so far.")
    fragments = Shown[list[Fragment]]("fragments", "What is averaged together.")
    outer_bytes = Shown[int]("outer_bytes", "Memory of the outer state on this rank.")

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 24,
        outer_lr: float = 1.0,
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        codec: Codec | Feedback | None = None,
        buffers: Iterable[Tensor] = (),
        offload: bool = False,
        group: Group = None,
    ) -> None:
        require_wrapped("SparseLoCo", inner)
        outer = _outer("SparseLoCo", outer_lr)
        options = RoundOptions(
            "SparseLoCo",
            inner,
            every,
            outer=outer,
            fragments=fragments,
            codec=ErrorFeedback(TopK(), decay=0.95) if codec is None else codec,
            buffers=buffers,
            offload=offload,
            group=group,
        )
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = LocalRounds(self.session, options)


class CO2(WireOptimizer):
    """The averaging of a round overlaps the whole next round; the anchor is the same everywhere.

    Args:
        inner: any torch optimizer over the model's parameters.
        every: inner steps in a round. Raise it while `account.exposed` grows, lower it when the
            loss falls behind data parallelism; "auto" measures it.
        outer_lr, outer_momentum: of the outer optimizer. Lower either when the loss swings with
            the rounds.
        penalty, clip, clip_by: as in `Outer`.
        fragments, codec, buffers, offload, group: as in `LocalUpdates`.
    """

    engine: LocalRounds
    every = Shown[int | None]("every", "Inner steps in a round; None while it is measured.")
    outer = Shown[Outer]("outer", "The outer optimizer's settings.")
    rounds = Shown[int]("rounds", "Rounds ended so far.")
    fragments = Shown[list[Fragment]]("fragments", "What is averaged together.")
    outer_bytes = Shown[int]("outer_bytes", "Memory of the outer state on this rank.")

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
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        codec: Codec | Feedback | None = None,
        buffers: Iterable[Tensor] = (),
        offload: bool = False,
        group: Group = None,
    ) -> None:
        require_wrapped("CO2", inner)
        require_penalty("CO2", penalty)
        if clip is not None:
            require_positive("CO2", "clip", clip)
        require_choice("CO2", "clip_by", clip_by, ("norm", "value"))
        outer = _outer("CO2", outer_lr, outer_momentum, penalty=penalty, clip=clip, clip_by=clip_by)
        options = RoundOptions(
            "CO2",
            inner,
            every,
            "round",
            outer=outer,
            fragments=fragments,
            codec=codec,
            buffers=buffers,
            offload=offload,
            group=group,
        )
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = LocalRounds(self.session, options)


class Eager(WireOptimizer):
    """A round late, with each replica's own newest progress in its share of the mean.

    Args:
        inner: any torch optimizer over the model's parameters.
        every: inner steps in a round. Raise it while `account.exposed` grows, lower it when the
            loss falls behind data parallelism; "auto" measures it.
        outer_lr, outer_momentum: of the outer optimizer. Lower either when the loss swings with
            the rounds.
        fragments, codec, buffers, offload, group: as in `LocalUpdates`.
    """

    engine: LocalRounds
    every = Shown[int | None]("every", "Inner steps in a round; None while it is measured.")
    outer = Shown[Outer]("outer", "The outer optimizer's settings.")
    rounds = Shown[int]("rounds", "Rounds ended so far.")
    fragments = Shown[list[Fragment]]("fragments", "What is averaged together.")
    outer_bytes = Shown[int]("outer_bytes", "Memory of the outer state on this rank.")

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 30,
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        codec: Codec | Feedback | None = None,
        buffers: Iterable[Tensor] = (),
        offload: bool = False,
        group: Group = None,
    ) -> None:
        require_wrapped("Eager", inner)
        require_group("Eager", "group", group)
        outer = _outer("Eager", outer_lr, outer_momentum, nesterov=True)
        options = RoundOptions(
            "Eager",
            inner,
            every,
            "round",
            own_weight=1 / group_size(group),
            outer=outer,
            fragments=fragments,
            codec=codec,
            buffers=buffers,
            offload=offload,
            group=group,
        )
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = LocalRounds(self.session, options)


class Overlapped(WireOptimizer):
    """Ours, and what we recommend: nobody waits, and on average nothing is late.

    Args:
        inner: any torch optimizer over the model's parameters.
        every: inner steps in a round. Raise it while `account.exposed` grows, lower it when the
            loss falls behind data parallelism; "auto" measures it.
        outer_lr, outer_momentum: of the outer optimizer. Lower either when the loss swings with
            the rounds.
        fragments, codec, buffers, offload, group: as in `LocalUpdates`.
    """

    engine: LocalRounds
    every = Shown[int | None]("every", "Inner steps in a round; None while it is measured.")
    outer = Shown[Outer]("outer", "The outer optimizer's settings.")
    rounds = Shown[int]("rounds", "Rounds ended so far.")
    fragments = Shown[list[Fragment]]("fragments", "What is averaged together.")
    outer_bytes = Shown[int]("outer_bytes", "Memory of the outer state on this rank.")

    def __init__(
        self,
        inner: Inner,
        *,
        every: Every = 24,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.5,
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        codec: Codec | Feedback | None = None,
        buffers: Iterable[Tensor] = (),
        offload: bool = False,
        group: Group = None,
    ) -> None:
        require_wrapped("Overlapped", inner)
        outer = _outer("Overlapped", outer_lr, outer_momentum)
        options = RoundOptions(
            "Overlapped",
            inner,
            every,
            "round",
            own_weight=1.0,
            outer=outer,
            fragments=fragments,
            codec=codec,
            buffers=buffers,
            offload=offload,
            group=group,
        )
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = LocalRounds(self.session, options)
