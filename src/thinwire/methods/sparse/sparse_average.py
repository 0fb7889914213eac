"""SparseAverage: replicas that average a few of their weights at a time and never wait for it.

This is the data axis of AsyncMesh, usable alone. Each of R replicas steps by itself. Every `every`
steps a round begins: the subset S of the coordinates whose turn it is (partition.py), a share
1 / C of all, is sent as it is and averaged over the replicas,

    own_i = w_i(then)[S]        mean = 1/R sum_j own_j

while training goes on. The mean lands some steps later. By then replica i has moved on by

    drift_i = w_i(now)[S] - own_i

and the mean, which is old, is put in place of the newer weights with a correction:

    overwrite    w_i[S] <- mean                      the progress made meanwhile is lost
    delta        w_i[S] <- mean + drift_i            the mean of the replicas stays what it was
    ema          w_i[S] <- mean + average drift_i    of earlier landings too (drift.py): the method

Gradients and the state of the inner optimizer never travel. Each coordinate has its turn once in C
rounds; the disagreement of the replicas shrinks with every round, and `consensus()` or `finish()`
give their mean.

[Note: landing] Rounds leave by step counts, on every rank alike. With landing="step" they also land
by step counts, exactly `delay` steps later: a run can be repeated. With landing="arrival" a replica
applies a mean once it is there, and waits for it after `delay` steps. Landing sends nothing, so it
is each replica's own affair, and replicas may be up to `delay` steps apart.

[Note: not finite] Weights that became NaN would stay NaN - there is no anchor to go back to - so a
replica leaves out an inner step whose gradients are not finite (finite.py). A mean that is not
finite all the same is dropped by all; after enough of them in a row all give up.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.methods.base import Shown, WireOptimizer, require_wrapped
from thinwire.methods.sparse.drift import DriftEstimate
from thinwire.methods.sparse.engine import Correction, Landing, SparseOptions, SparseRounds
from thinwire.methods.sparse.subsets import Subsets
from thinwire.wire.codecs import Codec
from thinwire.wire.flight import Flight
from thinwire.wire.ranks import Group


class SparseAverage(WireOptimizer):
    """Asynchronous sparse averaging around any inner optimizer.

    Args:
        inner: any torch optimizer over the model's parameters.
        fraction: share of the weights in a round, in (0, 1]; rounded down to 1 / C. Raise it when
            the loss falls behind data parallelism, lower it while `account.exposed` grows.
        delay: steps a round may be in the air; 0 waits for it at once. Raise it while
            `account.exposed` grows, lower it when the loss falls behind that of delay 0.
        correction: what stands for the progress made while a mean was in the air.
        every: steps between rounds. Raise it when the link is too slow for every step.
        landing: "step" applies a mean exactly `delay` steps after it left, "arrival" as soon as it
            is there. Use "arrival" where speeds or links vary and runs need not be repeatable.
        steps: optimizer steps of the whole run, over which the weight of the newest drift falls
            (drift.py). Without it the weight stays where it starts. Give it for runs of more than
            some 30 cycles.
        ema: that weight at the start and at the end of the run; 0.5 and an end that suits the
            number of landings by default. Raise the end when the loss falls behind in a decay of
            the learning rate.
        codec: form in which weights travel, without error feedback.
        buffers: the model's buffers (`model.buffers()`), if it has any that are learnt from data,
            such as BatchNorm's running statistics: they are averaged once a cycle.
        seed: of the subsets; the same on all replicas.
        group: a ProcessGroup or one dimension of a DeviceMesh. With FSDP2 the replica dimension of
            a (replica, shard) mesh: each rank then averages its own shard only.
    """

    engine: SparseRounds
    rounds = Shown[int]("rounds", "Rounds launched so far.")
    subsets = Shown[Subsets]("subsets", "Which weights take part in which round.")
    drift = Shown[DriftEstimate | None]("drift", "The average drift while a mean is in the air.")
    flights = Shown[list[Flight]]("flights", "What is in the air, oldest first.")
    average_bytes = Shown[int]("average_bytes", "Memory held for the averaging, at this moment.")
    steps = Shown[int | None]("steps", "Optimizer steps of the whole run.", settable=True)

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        fraction: float = 0.05,
        delay: int = 10,
        correction: Correction = "ema",
        every: int = 1,
        landing: Landing = "step",
        steps: int | None = None,
        ema: tuple[float, float] | None = None,
        codec: Codec | None = None,
        buffers: Iterable[Tensor] = (),
        seed: int = 0,
        group: Group = None,
    ) -> None:
        name = type(self).__name__
        require_wrapped(name, inner)
        options = SparseOptions(
            name, fraction, delay, correction, every, landing, steps, ema, codec, buffers, seed
        )
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = SparseRounds(self.session, options)

    def drain(self) -> None:
        """Waits for what is in the air, without applying it: that still happens in its time."""
        self.engine.drain()
