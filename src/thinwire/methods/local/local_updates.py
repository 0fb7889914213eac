"""LocalUpdates: the local family by its settings, for what no preset is.

The equations and the engine are in rounds.py, the published methods in presets.py.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thinwire.deprecated import renamed_arguments
from thinwire.methods.base import Shown, WireOptimizer, require_wrapped
from thinwire.methods.local.fragment import Fragment
from thinwire.methods.local.outer import Outer
from thinwire.methods.local.rounds import Delay, Every, LocalRounds, RoundOptions
from thinwire.wire.codecs import Codec, Feedback
from thinwire.wire.ranks import Group


class LocalUpdates(WireOptimizer):
    """Any of the local family, by its settings. Most users want a preset: `Overlapped`, `CO2`, ...

    Args:
        inner: any torch optimizer over the model's parameters.
        every: inner steps in a round. Raise it while `account.exposed` grows, lower it when the
            loss falls behind data parallelism. "auto" measures the first steps and a flight, and
            takes the shortest round that hides it. A loaded state does not change it, except that
            "auto" takes over what was measured.
        delay: when the mean is needed: 0, a number of steps less than a round, or "round".
        own_weight: with delay="round", how much of its own newest progress a replica uses before
            the others' has arrived. 1 has no delay on average; 0 keeps all replicas on one anchor.
        merge: with a delay in steps, weight of the local value when the mean arrives.
        fragments: into how many groups the parameters are cut, each with a phase of its own in the
            round; or the groups themselves. More fragments make smaller, more frequent messages:
            use them when one large payload per round congests the link others use too.
        outer: settings of the outer optimizer.
        codec: form in which progress travels. Try Int8(), then ErrorFeedback(Int4()), before a
            longer round.
        buffers: the model's buffers (`model.buffers()`), if it has any that are learnt from data,
            such as BatchNorm's running statistics: they are averaged with the rounds.
        offload: keep the outer state in (pinned) host memory.
        group: a ProcessGroup or one dimension of a DeviceMesh. With FSDP2 the replica dimension of
            a (replica, shard) mesh: each rank then keeps and averages its own shard only.
    """

    engine: LocalRounds
    every = Shown[int | None]("every", "Inner steps in a round; None while it is measured.")
    delay = Shown[Delay]("delay", "When the mean of a round is used.")
    own_weight = Shown[float]("own_weight", "Of a replica's own newest progress.")
    outer = Shown[Outer]("outer", "The outer optimizer's settings.")
    rounds = Shown[int]("rounds", "Rounds ended so far.")
    fragments = Shown[list[Fragment]]("fragments", "What is averaged together.")
    outer_bytes = Shown[int]("outer_bytes", "Memory of the outer state on this rank.")

    @renamed_arguments(fresh="own_weight")
    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        every: Every,
        delay: Delay = 0,
        own_weight: float = 0.0,
        merge: float = 0.0,
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        outer: Outer | None = None,
        codec: Codec | Feedback | None = None,
        buffers: Iterable[Tensor] = (),
        offload: bool = False,
        group: Group = None,
    ) -> None:
        name = type(self).__name__
        require_wrapped(name, inner)
        options = RoundOptions(
            name, inner, every, delay, own_weight, merge, fragments, outer, codec, buffers,
            offload, group,
        )  # fmt: skip
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = LocalRounds(self.session, options)
