"""DesLoc: local Adam whose weights and moments are averaged, each at a period of its own.

    every `every` steps                          x = mean_i x_i
    every `every` x `first_moments` steps        m = mean_i m_i
    every `every` x `second_moments` steps       v = mean_i v_i

Between these steps each replica trains alone. The slower a state changes, the more rarely it needs
to be averaged: Adam's m has a half-life of some ten steps, its v one of some hundred or thousand.
Averaged moments let a replica go on from a mean of the weights with a mean of what was learnt on
the way, where Local SGD leaves every replica its own. With both periods at 0 nothing but the
weights is averaged, which is Local SGD.

Every average is one blocking flight. One that is not finite on any rank is dropped on all of them.

Paper: DES-LOC, arXiv 2505.22549.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.flat import Flat
from thinwire.methods.base import Shown, WireOptimizer, require_wrapped
from thinwire.methods.engine import Engine, State
from thinwire.methods.session import Session
from thinwire.methods.shared.consensus import mean_of_replicas
from thinwire.methods.shared.finite import StepGuard, finite_means
from thinwire.methods.shared.model_buffers import ModelBuffers
from thinwire.methods.shared.shards import Shards
from thinwire.optim.checks import require_buffers, require_codec, require_count
from thinwire.wire.codecs import Codec
from thinwire.wire.ranks import Group

FIRST, SECOND = ("exp_avg", "momentum_buffer"), ("exp_avg_sq",)  # as torch's optimizers call them


class DesLoc(WireOptimizer):
    """Weights and moments averaged at periods of their own.

    Args:
        inner: Adam, AdamW, NAdam, Lamb or another optimizer that keeps exp_avg and exp_avg_sq; with
            `second_moments=0` also SGD with a momentum.
        every: steps between two averages of the weights. Raise it while `account.exposed` grows,
            lower it when the loss falls behind data parallelism.
        first_moments: averages of the weights to one of the first moments; 0 leaves each replica
            its own. Lower it when the loss jumps at the averages.
        second_moments: the same for the second moments.
        codec: form in which all of them travel, without error feedback.
        buffers: the model's buffers (`model.buffers()`), if it has any that are learnt from data.
        group: a ProcessGroup or one dimension of a DeviceMesh; all ranks by default.
    """

    engine: "DesLocRounds"
    rounds = Shown[int]("rounds", "Averages of the weights so far.")

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        every: int = 16,
        first_moments: int = 3,
        second_moments: int = 6,
        codec: Codec | None = None,
        buffers: Iterable[Tensor] = (),
        group: Group = None,
    ) -> None:
        name = type(self).__name__
        require_wrapped(name, inner)
        every = require_count(name, "every", every)
        periods = {
            FIRST: require_count(name, "first_moments", first_moments, least=0),
            SECOND: require_count(name, "second_moments", second_moments, least=0),
        }
        require_codec(name, "codec", codec, memory=False, why="weights and moments take turns")
        buffers = require_buffers(name, buffers)
        super().__init__(inner.param_groups, {}, inner=inner, group=group)
        self.engine = DesLocRounds(self.session, every, periods, codec, buffers)


class DesLocRounds(Engine):
    """Steps alone, and every so often a mean of the weights and of what is due with them."""

    def __init__(
        self,
        session: Session,
        every: int,
        periods: dict[tuple[str, ...], int],
        codec: Codec | None,
        buffers: list[Tensor],
    ) -> None:
        super().__init__(session)
        self._every, self._periods, self._codec = every, periods, codec
        self._shards = Shards(session.parameters)
        rank = session.wire.world.rank
        self._guard = StepGuard(session.name, rank, session.parameters, self._shards)
        self._buffers = ModelBuffers(buffers, session.wire)
        self._count = 0  # steps taken
        self.rounds = 0

    @torch.no_grad()
    def step(self) -> None:
        self.session.unchanged.require()
        self.session.inner_step(self._guard)
        self._count += 1
        if self._count % self._every:
            return
        self.rounds += 1
        self._average(self.session.parameters)
        for names, period in self._periods.items():
            if period and self.rounds % period == 0:
                self._average(self._moments(names))
        self._buffers.turn(late=False)

    def _average(self, tensors: list[Tensor]) -> None:
        """To their mean over the replicas, if that is finite everywhere."""
        flat = Flat(tensors)
        flight = self.wire.mean(flat.pack(tensors, flat.new()), self._codec)
        mean = flight.wait()
        if self._shards.all(flight.finite):
            flat.unpack(mean, tensors)
        else:
            self.session.account.skipped += 1

    def _moments(self, names: tuple[str, ...]) -> list[Tensor]:
        """The inner optimizer's state by one of these names, of every parameter; zeros, which it
        would start from, for one that has had no gradient yet."""
        states = [self.session.state.get(p, {}) for p in self.session.parameters]
        held = [next((s[name] for name in names if name in s), None) for s in states]
        if all(value is None for value in held):
            kept = ", ".join(sorted({str(key) for state in states for key in state})) or "nothing"
            raise ValueError(
                f"{self.name}: the inner optimizer keeps {kept}, and no {' or '.join(names)} to "
                "average; use Adam or AdamW, or set that period to 0"
            )
        pairs = zip(self.session.parameters, held, strict=True)
        return [torch.zeros_like(p) if value is None else value for p, value in pairs]

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of the replicas' weights and buffers."""
        wire = self.session.evaluation
        own = self._buffers.swap_in_mean(wire)
        try:
            with mean_of_replicas(wire, self.session.parameters, self._shards):
                yield
        finally:
            self._buffers.restore(own)

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the replicas equal."""
        parameters = self.session.parameters
        flat = Flat(parameters)
        own = flat.pack(parameters, flat.new())
        (mean,) = finite_means(self.wire, [own], self._shards, f"{self.name}.finish()")
        flat.unpack(mean, parameters)
        self._buffers.finish()

    def settings(self) -> dict[str, Any]:
        first, second = self._periods.values()
        own = {"every": self._every, "first_moments": first, "second_moments": second}
        return super().settings() | own | {"codec": repr(self._codec)}

    def method_state(self) -> State:
        """Moments are the inner optimizer's, which saves them."""
        return {"count": self._count, "rounds": self.rounds, "buffers": self._buffers.state()}

    def load_method_state(self, state: State) -> None:
        self._count, self.rounds = state["count"], state["rounds"]
        self._buffers.load_state(state["buffers"])
        self.session.checked = True  # replicas of a resumed run differ, rightly
