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

import torch
from torch import Tensor

from thinwire.methods.base import Shown, WireOptimizer, require_wrapped
from thinwire.methods.local.fragment import Fragment
from thinwire.methods.local.outer import Outer, preset_outer
from thinwire.methods.local.rounds import Delay, Every, LocalRounds, RoundOptions
from thinwire.wire.codecs import Codec, ErrorFeedback, Feedback, Int4, TopK
from thinwire.wire.ranks import Group

Inner = torch.optim.Optimizer


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
    delay = Shown[Delay]("delay", "When the mean of a round is used.")
    own_weight = Shown[float]("own_weight", "Of a replica's own newest progress.")
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
    delay = Shown[Delay]("delay", "When the mean of a round is used.")
    own_weight = Shown[float]("own_weight", "Of a replica's own newest progress.")
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
        outer = preset_outer("SlowMo", outer_lr, outer_momentum, follow_lr=True)
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
    delay = Shown[Delay]("delay", "When the mean of a round is used.")
    own_weight = Shown[float]("own_weight", "Of a replica's own newest progress.")
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
        outer = preset_outer("DiLoCo", outer_lr, outer_momentum, nesterov=True)
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
    delay = Shown[Delay]("delay", "When the mean of a round is used.")
    own_weight = Shown[float]("own_weight", "Of a replica's own newest progress.")
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
        outer = preset_outer("StreamingDiLoCo", outer_lr, outer_momentum, nesterov=True)
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
    delay = Shown[Delay]("delay", "When the mean of a round is used.")
    own_weight = Shown[float]("own_weight", "Of a replica's own newest progress.")
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
        outer = preset_outer("SparseLoCo", outer_lr)
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
