"""CO2, Eager and Overlapped: presets whose averaging overlaps the whole next round.

The table of all presets is in presets.py, the engine in rounds.py.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.methods.base import Shown, WireOptimizer, require_wrapped
from thinwire.methods.local.fragment import Fragment
from thinwire.methods.local.outer import Outer, preset_outer, require_penalty
from thinwire.methods.local.rounds import Delay, Every, LocalRounds, RoundOptions
from thinwire.optim.checks import require_choice, require_group, require_positive
from thinwire.wire.codecs import Codec, Feedback
from thinwire.wire.ranks import Group, group_size

Inner = torch.optim.Optimizer
Penalty = float | Literal["gap"]


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
        outer = preset_outer(
            "CO2", outer_lr, outer_momentum, penalty=penalty, clip=clip, clip_by=clip_by
        )
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
        outer = preset_outer("Eager", outer_lr, outer_momentum, nesterov=True)
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
        outer_momentum: float = 0.5,
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        codec: Codec | Feedback | None = None,
        buffers: Iterable[Tensor] = (),
        offload: bool = False,
        group: Group = None,
    ) -> None:
        require_wrapped("Overlapped", inner)
        outer = preset_outer("Overlapped", outer_lr, outer_momentum)
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
