"""LocalRounds: when the methods of the local family send, wait and step.

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
                   d_i,t = mean_{t-1} + own_weight (own_i,t - own_i,t-1)
                   x_i,t+1 = Outer(x_i,t, d_i,t) ; y_i = x_i,t+1
                   own_weight = 0: CO2.  1/M: Eager.  1: Overlapped, CoCoD-SGD

With own_weight = 1 the own terms telescope: averaged over the replicas, the anchors obey the
recursion of the blocking method, with no delay at all. The replicas then never coincide; they stay
within a round of progress of each other, and `consensus()` or `finish()` give their mean.

Rounds are counted in steps, on every rank alike: nothing that is sent depends on what has arrived.

[Note: not finite] A replica leaves out an inner step whose gradients are not finite (finite.py).
One whose weights break all the same goes on from its anchor, and all drop that round (fragment.py).
One that has had no finite gradient for long sends NaN, so that all ranks give up together and say
whose fault it was. `consensus()` and `finish()` leave out replicas that are not finite.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.methods.engine import Engine
from thinwire.methods.local.auto_period import AutoPeriod
from thinwire.methods.local.fragment import Fragment, by_width, partition
from thinwire.methods.local.outer import Outer, stability_warning
from thinwire.methods.session import Session
from thinwire.methods.shared.finite import StepGuard, finite_means
from thinwire.methods.shared.model_buffers import ModelBuffers
from thinwire.methods.shared.shards import Shards
from thinwire.optim.checks import (
    plain_number,
    refusal,
    require_bool,
    require_buffers,
    require_codec,
    require_count_or,
    require_group,
    require_items,
    require_kind,
    require_share,
    require_tensors,
    require_weight,
)
from thinwire.wire.codecs import Codec, Feedback
from thinwire.wire.ranks import Group

Every = int | Literal["auto"]
Delay = int | Literal["round"]


@dataclass
class RoundOptions:
    """What a method of the family is given; `LocalUpdates` explains it. Checked here."""

    name: str
    inner: torch.optim.Optimizer
    every: Every
    delay: Delay = 0
    own_weight: float = 0.0
    merge: float = 0.0
    fragments: int | Sequence[Sequence[Tensor]] = 1
    outer: Outer | None = None
    codec: Codec | Feedback | None = None
    buffers: Iterable[Tensor] = ()
    offload: bool = False
    group: Group = None

    def __post_init__(self) -> None:
        name = self.name
        require_codec(name, "codec", self.codec)
        require_group(name, "group", self.group)
        if self.outer is not None:
            require_kind(name, "outer", self.outer, Outer, "an Outer or None")
        self.offload = require_bool(name, "offload", self.offload)
        self.buffers = require_buffers(name, self.buffers)
        self.every = require_count_or(name, "every", self.every, "auto")
        self.delay = require_count_or(name, "delay", self.delay, "round", least=0)
        self.own_weight = require_weight(name, "own_weight", self.own_weight)
        self.merge = require_share(name, "merge", self.merge)
        self.groups = _groups(self.inner, self.fragments, name)
        count = len(self.groups)
        _check(name, self.every, self.delay, self.own_weight, self.merge, count)


class LocalRounds(Engine):
    """
    every      inner steps in a round; None while "auto" still measures
    rounds     ended so far
    fragments  the groups of tensors that are averaged together
    """

    def __init__(self, session: Session, options: RoundOptions) -> None:
        super().__init__(session)
        every = options.every
        self._asked = every
        self.every: int | None = every if isinstance(every, int) else None
        self.delay, self.own_weight = options.delay, options.own_weight
        self.merge, self.outer = options.merge, options.outer or Outer()
        self._shards = Shards(session.parameters)
        rank = session.wire.world.rank
        self._guard = StepGuard(session.name, rank, session.parameters, self._shards)
        self._phases = len(options.groups)
        device = torch.device("cpu") if options.offload else None
        self.fragments = [
            self._fragment(tensors, index, options.codec, device)
            for index, group_of_one_phase in enumerate(options.groups)
            for tensors in by_width(group_of_one_phase)
        ]
        self._buffers = ModelBuffers(options.buffers, session.wire)
        self._auto = AutoPeriod(session.wire) if every == "auto" else None
        self._count = 0  # steps taken
        self.rounds = 0
        if self.delay == "round":
            self._warn_if_unstable()

    def _fragment(
        self,
        tensors: Sequence[Tensor],
        phase: int,
        codec: Codec | Feedback | None,
        device: torch.device | None,
    ) -> Fragment:
        groups = {id(p): i for i, g in enumerate(self.session.groups) for p in g["params"]}
        late = self.delay == "round"
        return Fragment(
            tensors,
            [groups[id(tensor)] for tensor in tensors],
            self.wire,
            self._shards,
            codec,
            self.outer,
            late=late,
            own_weight=self.own_weight if late else 0.0,
            phase=phase,
            device=device,
        )

    @property
    def outer_bytes(self) -> int:
        """Memory of the outer state on this rank; error feedback is not counted."""
        return sum(fragment.nbytes() for fragment in self.fragments)

    @torch.no_grad()
    def step(self) -> None:
        self.session.unchanged.require()
        self.session.inner_step(self._guard)
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

    def check_start(self) -> None:
        super().check_start()
        self._start_here()

    def _start_here(self) -> None:
        for fragment in self.fragments:
            fragment.anchor_here()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of the replicas' weights and buffers; of those that are
        finite, see [Note: not finite]."""
        self.session.unchanged.require()
        name, own_buffers = self.name, None
        with torch.no_grad():
            own = [fragment.values() for fragment in self.fragments]
        try:
            with torch.no_grad():
                means = finite_means(
                    self.session.evaluation, own, self._shards, f"{name}.consensus()"
                )
                for fragment, mean in zip(self.fragments, means, strict=True):
                    fragment.set_values(mean)
                own_buffers = self._buffers.swap_in_mean(self.session.evaluation)
            yield
        finally:
            with torch.no_grad():
                for fragment, values in zip(self.fragments, own, strict=True):
                    fragment.set_values(values)
                self._buffers.restore(own_buffers)

    @torch.no_grad()
    def finish(self) -> None:
        """Lands every flight, counts all progress, and makes the replicas equal."""
        self.session.unchanged.require()
        if not self.session.checked:
            self._start_here()
        own = [self._final_values(fragment) for fragment in self.fragments]
        means = finite_means(self.wire, own, self._shards, f"{self.name}.finish()")
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
        self.session.checked = True  # replicas of a resumed run differ, rightly
        if not same and self.own_weight > 0 and self.delay == "round":
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
        return [float(group.get("lr", 0.0)) for group in self.session.groups]

    def _warn_if_unstable(self) -> None:
        message = stability_warning(self.outer, self.own_weight)
        if message is not None and self.wire.rank == 0:
            warnings.warn(f"{self.name}: {message}", stacklevel=4)


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
    name: str, every: Every, delay: Delay, own_weight: float, merge: float, fragments: int
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
    if own_weight > 0 and delay != "round":
        raise ValueError(
            f'{name}: own_weight={own_weight} needs delay="round", got delay={delay!r}'
        )
    if merge > 0 and (delay == "round" or delay == 0):
        raise ValueError(f"{name}: merge={merge} needs a delay in steps, got delay={delay!r}")
