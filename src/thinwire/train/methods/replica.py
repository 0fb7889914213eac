"""Replica: one copy of the model under a method, as the training loop sees it.

A method's family brings a kind of its own where the default does not do: what a step is, what is
evaluated, and what a checkpoint keeps.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.methods.dense.gradient_average import GradientAverage
from thinwire.methods.shared.consensus import mean_of_replicas
from thinwire.train.methods.running_statistics import RunningStatistics
from thinwire.train.methods.sharding import load_model_state, load_optimizer_state, local_state
from thinwire.wire.account import Account
from thinwire.wire.codecs import Dense
from thinwire.wire.evaluation import EvaluationWire
from thinwire.wire.ranks import Group

State = dict[str, Any]


class Replica:
    """One replica under a method: the default is a replica on its own.

    `replicated` says that all replicas hold the same weights after every step, so that a checkpoint
    needs only one copy; `counted`, that the account has the bytes it sends; `resumable`, that
    a checkpoint can take it up again. BatchNorm's statistics are each replica's own
    (running_statistics.py).
    """

    replicated = False
    counted = True
    resumable = True

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, group: Group = None
    ) -> None:
        self.model = module
        self.module = module  # what is called for the loss: the model, or a wrapper of it
        self.optimizer = optimizer
        self.account = Account()
        self.statistics = RunningStatistics(module, group)

    @property
    def averages_gradients(self) -> bool:
        """Whether the next step averages gradients over the replicas without loss, so that the norm
        it returns is that of the whole batch. If not, `.grad` is this replica's own before it."""
        return False

    def expect(self, steps: int) -> None:
        """The length of the run, for methods with a schedule of their own over it."""

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; `last` of the step or not."""
        return nullcontext()

    def step(self, clip: float) -> float:
        """Clips, steps, and returns the gradient's norm; a norm that is not finite is a skip."""
        norm = self._clip(clip)
        if math.isfinite(norm):
            self.optimizer.step()
        else:
            self.account.skipped += 1
        self.account.tick()
        return norm

    def consensus(self) -> AbstractContextManager[None]:
        """Inside, the model is the one to evaluate."""
        return self.statistics.consensus()

    def finish(self) -> None:
        """After the last step."""
        self.statistics.settle()

    def state(self) -> tuple[State, State]:
        """What a checkpoint keeps: what all replicas have in common, and what is this one's own."""
        state = local_state(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )
        if not self.replicated:
            return {}, state
        state["model"] |= self.statistics.means()
        return state, self.statistics.state()

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        state = shared if self.replicated else private
        load_model_state(self.model, state["model"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        if same_replicas:
            self.statistics.load_state(private)

    def _clip(self, clip: float) -> float:
        parameters = list(self.model.parameters())  # in this order, as a plain loop would sum it
        limit = clip if clip > 0 else float("inf")
        norm: Tensor = nn.utils.clip_grad_norm_(parameters, limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class SeparateReplica(Replica):
    """Replicas that never talk to each other: they meet only to be evaluated.

    That goes over a wire of its own, for it is no part of what the method costs.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, group: Group) -> None:
        super().__init__(module, optimizer, group)
        self._meeting = EvaluationWire(group, name="consensus")

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of the replicas, which is also what is exported."""
        weights = list(self.model.parameters())
        with mean_of_replicas(self._meeting, weights), self.statistics.consensus():
            yield

    def finish(self) -> None:
        """They stay apart."""


class WireReplica(Replica):
    """Any of thinwire's own optimizers that average gradients and keep replicas equal."""

    replicated = True
    optimizer: GradientAverage

    def __init__(self, module: nn.Module, optimizer: GradientAverage) -> None:
        super().__init__(module, optimizer, optimizer.group)
        self.account = optimizer.account

    @property
    def averages_gradients(self) -> bool:
        return isinstance(self.optimizer.codec, Dense)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.optimizer.accumulating()

    def step(self, clip: float) -> float:
        finite = self.optimizer.average()
        norm = self._clip(clip) if finite else float("nan")
        self.optimizer.step()
        return norm

    @contextmanager
    def consensus(self) -> Iterator[None]:
        with self.optimizer.consensus(), self.statistics.consensus():
            yield

    def finish(self) -> None:
        self.optimizer.finish()
        self.statistics.settle()

    def state(self) -> tuple[State, State]:
        inner = self.optimizer.inner.state_dict()
        shared = local_state({"model": self.model.state_dict(), "inner": inner})
        shared["model"] |= self.statistics.means()
        shared["portable"] = self.optimizer.engine.portable_method_state()
        return shared, {"method": self.optimizer.engine.method_state(), **self.statistics.state()}

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        load_model_state(self.model, shared["model"])
        load_optimizer_state(self.optimizer.inner, shared["inner"])
        if same_replicas:
            self.statistics.load_state(private)
        # What a codec has not sent yet is a rank's own; on another number of ranks all of them
        # start from the mean.
        state = private["method"] if same_replicas else shared["portable"]
        self.optimizer.engine.load_method_state(state)
        self.optimizer.adopt_inner()
