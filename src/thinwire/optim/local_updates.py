"""LocalUpdates: one engine for the methods that average now and then instead of at every step.

Each of M replicas runs `every` inner steps from an anchor x_t and reaches y_i. Its own progress
own_i,t = x_t - y_i is averaged over the replicas, and an outer optimizer (outer.py) moves the
anchor by the mean. Inner optimizer state stays with its replica and is never sent. What differs
between the methods is when the mean is needed:

  delay = 0        at once: the round ends with a wait.
                   x_{t+1} = Outer(x_t, mean_t) ; y_i = x_{t+1}        Local SGD, SlowMo, DiLoCo

  delay = k steps  later in the next round, while the replicas train on.
                   x_{t+1} = Outer(x_t, mean_t) ; y_i = merge y_i + (1 - merge) x_{t+1}
                                                                                Streaming DiLoCo
  delay = "round"  at the end of the next round, so that the flight has a whole round to hide in.
                   d_i,t = mean_{t-1} + fresh (own_i,t - own_i,t-1)
                   x_i,t+1 = Outer(x_i,t, d_i,t) ; y_i = x_i,t+1
                   fresh = 0: CO2.  fresh = 1/M: Eager.  fresh = 1: Overlapped, CoCoD-SGD

With fresh = 1 the own terms telescope: averaged over the replicas, the anchors obey the recursion
of the blocking method, with no delay at all. The replicas then never coincide; they stay within a
round of progress of each other, and `consensus()` or `finish()` give their mean.

Rounds are counted in steps, on every rank alike: nothing that is sent depends on what has arrived.

[Note: not finite] A replica leaves out an inner step whose gradients are not finite (finite.py).
One whose weights break all the same goes on from its anchor, and all drop that round (fragment.py).
One that has had no finite gradient for long sends NaN, so that all ranks give up together and say
whose fault it was. `consensus()` and `finish()` leave out replicas that are not finite.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.optim.auto_period import AutoPeriod
from thinwire.optim.base import WrappingOptimizer
from thinwire.optim.checks import (
    plain_number,
    refusal,
    require_bool,
    require_buffers,
    require_codec,
    require_count_or,
    require_group,
    require_inner,
    require_items,
    require_kind,
    require_share,
    require_tensors,
    require_weight,
)
from thinwire.optim.finite import StepGuard, finite_means
from thinwire.optim.fragment import Fragment, by_width, partition
from thinwire.optim.outer import Outer, stability_warning
from thinwire.optim.shards import Shards
from thinwire.optim.travelling_buffers import TravellingBuffers
from thinwire.wire.codecs import Codec, Feedback
from thinwire.wire.wire import Group

Every = int | Literal["auto"]
Delay = int | Literal["round"]


class LocalUpdates(WrappingOptimizer):
    """The engine. Most users want one of its presets: `Overlapped`, `CO2`, `DiLoCo`, ...

    Args:
        inner: any torch optimizer over the model's parameters.
        every: inner steps in a round. Raise it while `account.exposed` grows, lower it when the
            loss falls behind data parallelism. "auto" measures the first steps and a flight, and
            takes the shortest round that hides it. A loaded state does not change it, except that
            "auto" takes over what was measured.
        delay: when the mean is needed: 0, a number of steps less than a round, or "round".
        fresh: with delay="round", how much of its own newest progress a replica uses before the
            others' has arrived. 1 has no delay on average; 0 keeps all replicas on one anchor.
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

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        every: Every,
        delay: Delay = 0,
        fresh: float = 0.0,
        merge: float = 0.0,
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        outer: Outer | None = None,
        codec: Codec | Feedback | None = None,
        buffers: Iterable[Tensor] = (),
        offload: bool = False,
        group: Group = None,
    ) -> None:
        name = type(self).__name__
        require_inner(name, inner)
        require_codec(name, "codec", codec)
        require_group(name, "group", group)
        if outer is not None:
            require_kind(name, "outer", outer, Outer, "an Outer or None")
        outer = outer or Outer()
        offload = require_bool(name, "offload", offload)
        buffers = require_buffers(name, buffers)
        every = require_count_or(name, "every", every, "auto")
        delay = require_count_or(name, "delay", delay, "round", least=0)
        fresh, merge = require_weight(name, "fresh", fresh), require_share(name, "merge", merge)
        groups = _groups(inner, fragments, name)
        _check(name, every, delay, fresh, merge, len(groups))
        super().__init__(inner, group=group, name=name)
        self._asked = every
        self.every: int | None = every if isinstance(every, int) else None
        self.delay, self.fresh, self.merge, self.outer = delay, fresh, merge, outer
        self._shards = Shards(self._parameters)
        self._guard = StepGuard(name, self.wire.world.rank, self._parameters, self._shards)
        self._phases = len(groups)
        self.fragments = [
            self._fragment(tensors, index, codec, torch.device("cpu") if offload else None)
            for index, group_of_one_phase in enumerate(groups)
            for tensors in by_width(group_of_one_phase)
        ]
        self._buffers = TravellingBuffers(buffers, self.wire)
        self._auto = AutoPeriod(self.wire) if every == "auto" else None
        self._count = 0  # steps taken
        self.rounds = 0
        if delay == "round":
            self._warn_if_unstable()

    def _fragment(
        self,
        tensors: Sequence[Tensor],
        phase: int,
        codec: Codec | Feedback | None,
        device: torch.device | None,
    ) -> Fragment:
        groups = {id(p): i for i, g in enumerate(self.param_groups) for p in g["params"]}
        late = self.delay == "round"
        return Fragment(
            tensors,
            [groups[id(tensor)] for tensor in tensors],
            self.wire,
            self._shards,
            codec,
            self.outer,
            late=late,
            fresh=self.fresh if late else 0.0,
            phase=phase,
            device=device,
        )

    @property
    def outer_bytes(self) -> int:
        """Memory of the outer state on this rank; error feedback is not counted."""
        return sum(fragment.nbytes() for fragment in self.fragments)

    @torch.no_grad()
    def _step(self) -> None:
        self._unchanged.require()
        self._inner_step(self._guard)
        self._count += 1
        if self._auto is not None:
            self._measure()
        if self.every is None:
            return
        for fragment in self.fragments:
            since = self._since_boundary(fragment)
            if since == 0:
                self._end_round(fragment)
            elif isinstance(self.delay, int) and since >= self.delay:
                self._arrive(fragment)
        if self._count % self.every == 0:
            self.rounds += 1
            self._buffers.turn(late=self.delay != 0)

    def _since_boundary(self, fragment: Fragment) -> int:
        """Steps since the fragment's last round ended (a whole round where none has)."""
        assert self.every is not None
        offset = (fragment.phase + 1) * self.every // self._phases
        return (self._count - offset) % self.every

    def _end_round(self, fragment: Fragment) -> None:
        if self.delay == "round":
            fragment.turn(self._inner_lrs(), self._guard.stuck)
            return
        fragment.launch(self._guard.stuck)
        if self.delay == 0:
            self._arrive(fragment)

    def _arrive(self, fragment: Fragment, *, final: bool = False) -> None:
        if fragment.flight is None:
            return
        if fragment.land(final=final):
            fragment.step(self._inner_lrs())
        fragment.merge(self.merge if self.delay else 0.0)

    def _check_start(self) -> None:
        super()._check_start()
        self._start_here()

    def _start_here(self) -> None:
        for fragment in self.fragments:
            fragment.anchor_here()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of the replicas' weights and buffers; of those that are
        finite, see [Note: not finite]."""
        self._unchanged.require()
        name, own_buffers = type(self).__name__, None
        with torch.no_grad():
            own = [fragment.values() for fragment in self.fragments]
        try:
            with torch.no_grad():
                means = finite_means(self.meeting, own, self._shards, f"{name}.consensus()")
                for fragment, mean in zip(self.fragments, means, strict=True):
                    fragment.set_values(mean)
                own_buffers = self._buffers.swap_in_mean(self.meeting)
            yield
        finally:
            with torch.no_grad():
                for fragment, values in zip(self.fragments, own, strict=True):
                    fragment.set_values(values)
                self._buffers.restore(own_buffers)

    @torch.no_grad()
    def finish(self) -> None:
        """Lands every flight, counts all progress, and makes the replicas equal."""
        self._unchanged.require()
        if not self._checked:
            self._start_here()
        own = [self._final_values(fragment) for fragment in self.fragments]
        means = finite_means(self.wire, own, self._shards, f"{type(self).__name__}.finish()")
        for fragment, mean in zip(self.fragments, means, strict=True):
            fragment.begin(mean)
        self._buffers.finish()

    def _final_values(self, fragment: Fragment) -> Tensor:
        """Where this replica stands, with what was in the air."""
        if self.delay == "round":
            return fragment.settle(self._inner_lrs())
        self._arrive(fragment, final=True)
        return fragment.values()

    def method_state(self) -> dict[str, Any]:
        return {
            "replicas": self.wire.size,
            "every": self.every,
            "count": self._count,
            "rounds": self.rounds,
            "fragments": [fragment.state() for fragment in self.fragments],
            "buffers": self._buffers.state(),
        }

    @torch.no_grad()
    def load_method_state(self, state: dict[str, Any]) -> None:
        if len(state["fragments"]) != len(self.fragments):
            raise ValueError(
                f"the saved state has {len(state['fragments'])} fragments, "
                f"this optimizer {len(self.fragments)}"
            )
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.require(saved)
        same = state["replicas"] == self.wire.size
        self._load_period(state)
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_state(saved, with_error=same)
        self._buffers.load_state(state["buffers"])
        self._checked = True  # replicas of a resumed run differ, rightly
        if not same and self.fresh > 0 and self.delay == "round":
            self._rejoin()

    def _load_period(self, state: dict[str, Any]) -> None:
        """With another `every` than the saved one a new round, of that length, begins here; what is
        in the air lands in it."""
        self._count, self.rounds = state["count"], state["rounds"]
        if self._asked == "auto":
            self.every = state["every"]
            self._auto = AutoPeriod(self.wire) if self.every is None else None
        elif state["every"] != self.every:
            self._count = 0

    def _rejoin(self) -> None:
        """Another number of replicas: their own terms no longer add up to the mean in the air.

        Everybody lands it, counts its progress and starts a new round from the common mean.
        """
        for fragment in self.fragments:
            fragment.begin(self.wire.mean(fragment.settle(self._inner_lrs())).wait())
            if fragment.outer.momentum is not None:
                self.wire.mean(fragment.outer.momentum).wait()

    def _measure(self) -> None:
        assert self._auto is not None
        probe = self.fragments[0]
        total = sum(fragment.numel for fragment in self.fragments)
        period = self._auto.step(probe.codec, total, probe.anchor.device)
        if period is not None:
            self.every, self._auto = -(-period // self._phases) * self._phases, None
            self._count = 0  # the first round begins here

    def _inner_lrs(self) -> list[float]:
        return [float(group.get("lr", 0.0)) for group in self.inner.param_groups]

    def _warn_if_unstable(self) -> None:
        message = stability_warning(self.outer, self.fresh)
        if message is not None and self.wire.rank == 0:
            warnings.warn(f"{type(self).__name__}: {message}", stacklevel=4)


def _groups(
    inner: torch.optim.Optimizer, fragments: int | Sequence[Sequence[Tensor]], name: str
) -> list[list[Tensor]]:
    parameters = [p for g in inner.param_groups for p in g["params"]]
    wants = f"1 to the number of parameter tensors ({len(parameters)}), or groups of them"
    if (count := plain_number(fragments)) is not None:
        if not isinstance(count, int) or not 1 <= count <= max(1, len(parameters)):
            raise refusal(name, "fragments", wants, fragments)
        return partition(parameters, count)
    given = [
        require_tensors(name, "fragments", group, wants)
        for group in require_items(name, "fragments", fragments, wants)
    ]
    if sorted(id(p) for group in given for p in group) != sorted(map(id, parameters)):
        raise ValueError(f"{name}: fragments must hold each of the optimizer's parameters once")
    return given


def _check(
    name: str, every: Every, delay: Delay, fresh: float, merge: float, fragments: int
) -> None:
    """Refuses settings that fit no round, before anything is sent."""
    if isinstance(every, int) and every % fragments:
        raise ValueError(
            f"{name}: every={every} steps do not divide into {fragments} fragments; "
            f"take a multiple of {fragments}"
        )
    if delay != "round" and every != "auto" and delay >= max(1, every // fragments) and delay > 0:
        raise ValueError(
            f"{name}: a delay of {delay} steps is longer than a fragment's turn in a round of "
            f'{every} ({every // fragments} steps); use less, or delay="round"'
        )
    if fresh > 0 and delay != "round":
        raise ValueError(f'{name}: fresh={fresh} needs delay="round", got delay={delay!r}')
    if merge > 0 and (delay == "round" or delay == 0):
        raise ValueError(f"{name}: merge={merge} needs a delay in steps, got delay={delay!r}")
