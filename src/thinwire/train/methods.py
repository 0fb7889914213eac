"""Methods by name: how the trainer puts one together from a model and an inner optimizer.

A method is its entry in METHODS: a name, a line of help, a dataclass of its flags and a function
that builds a `Replica`. Nothing else in the trainer, the command line or the reports knows which
methods there are.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import UsageError
from thinwire.optim import GradientAverage, LocalUpdates, ZeroOneAdam
from thinwire.optim.flat import Flat
from thinwire.optim.one_bit import OneBitOptimizer
from thinwire.train.local_methods import PRESETS, LocalSettings, build_local, check_local
from thinwire.train.one_bit_methods import (
    ONE_BIT,
    LambSettings,
    build_lamb,
    check_lamb,
    check_one_bit,
    dense_steps,
)
from thinwire.train.sharding import load_model_state, load_optimizer_state, local_state
from thinwire.wire import codecs
from thinwire.wire.account import Account
from thinwire.wire.ddp import DdpMeter
from thinwire.wire.wire import Group, Wire

State = dict[str, Any]


class Replica:
    """One replica under a method: the default is a replica on its own.

    `replicated` says that all replicas hold the same weights after every step, so that a checkpoint
    needs only one copy.
    """

    replicated = False

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = module
        self.module = module  # what is called for the loss: the model, or a wrapper of it
        self.optimizer = optimizer
        self.account = Account()

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
        return nullcontext()

    def finish(self) -> None:
        """After the last step."""

    def state(self) -> tuple[State, State]:
        """What a checkpoint keeps: what all replicas have in common, and what is this one's own."""
        state = local_state(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )
        return (state, {}) if self.replicated else ({}, state)

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        state = shared if self.replicated else private
        load_model_state(self.model, state["model"])
        load_optimizer_state(self.optimizer, state["optimizer"])

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
        super().__init__(module, optimizer)
        self._meeting = Wire(group, name="consensus")

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of the replicas, which is also what is exported."""
        if self._meeting.size == 1:
            yield
            return
        weights = list(self.model.parameters())
        flat = Flat(weights)
        own = flat.pack(weights, flat.new())
        flat.unpack(self._meeting.mean(own.clone()).wait(), weights)
        try:
            yield
        finally:
            flat.unpack(own, weights)


class DdpReplica(Replica):
    """PyTorch's DistributedDataParallel: gradients averaged during every backward pass."""

    replicated = True

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, bucket_mb: float
    ) -> None:
        super().__init__(module, optimizer)
        wire = Wire(name="ddp", account=self.account)
        self._wire = wire
        if wire.group is not None:
            ddp = DistributedDataParallel(module, process_group=wire.group, bucket_cap_mb=bucket_mb)
            self._meter = DdpMeter(ddp, wire)
            self.module = ddp

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        adding_up: AbstractContextManager[None] = nullcontext()
        if not last and isinstance(self.module, DistributedDataParallel):
            adding_up = self.module.no_sync()
        try:
            with adding_up:
                yield
        except RuntimeError as error:
            # The autograd engine hides a lost peer in an error of its own.
            lost = self._wire.explain(error)
            if lost is not None:
                raise lost from error
            raise


class WireReplica(Replica):
    """Any of thinwire's own optimizers that average gradients and keep replicas equal."""

    replicated = True
    optimizer: GradientAverage

    def __init__(self, module: nn.Module, optimizer: GradientAverage) -> None:
        super().__init__(module, optimizer)
        self.account = optimizer.account

    def step(self, clip: float) -> float:
        finite = self.optimizer.average()
        norm = self._clip(clip) if finite else float("nan")
        self.optimizer.step()
        return norm

    def consensus(self) -> AbstractContextManager[None]:
        return self.optimizer.consensus()

    def finish(self) -> None:
        self.optimizer.finish()

    def state(self) -> tuple[State, State]:
        inner = self.optimizer.inner.state_dict()
        shared = local_state({"model": self.model.state_dict(), "inner": inner})
        return shared, {"method": self.optimizer.method_state()}

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        load_model_state(self.model, shared["model"])
        load_optimizer_state(self.optimizer.inner, shared["inner"])
        # Error feedback belongs to a rank and its part of the buffer: with another number of ranks
        # it starts anew, which costs what one step's payload had lost.
        if same_replicas:
            self.optimizer.load_method_state(private["method"])
        self.optimizer.adopt_inner()


class LocalReplica(Replica):
    """A replica that steps on its own and meets the others by the rounds of `LocalUpdates`."""

    optimizer: LocalUpdates

    def __init__(self, module: nn.Module, optimizer: LocalUpdates) -> None:
        super().__init__(module, optimizer)
        self.account = optimizer.account

    def step(self, clip: float) -> float:
        norm = self._clip(clip)
        if not math.isfinite(norm):
            # The round must still advance, on every rank alike: this replica takes no step in it.
            self.account.skipped += 1
            self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.step()
        return norm

    def consensus(self) -> AbstractContextManager[None]:
        return self.optimizer.consensus()

    def finish(self) -> None:
        self.optimizer.finish()

    def state(self) -> tuple[State, State]:
        state = local_state(
            {"model": self.model.state_dict(), "inner": self.optimizer.inner.state_dict()}
        )
        return {}, {**state, "method": self.optimizer.method_state()}

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        load_model_state(self.model, private["model"])
        load_optimizer_state(self.optimizer.inner, private["inner"])
        self.optimizer.load_method_state(private["method"])
        self.optimizer.adopt_inner()


class OneBitReplica(Replica):
    """Replicas that take the same step, from dense gradients first and one-bit momentum then."""

    replicated = True
    optimizer: OneBitOptimizer

    def __init__(self, module: nn.Module, optimizer: OneBitOptimizer) -> None:
        super().__init__(module, optimizer)
        self.account = optimizer.account

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.optimizer.accumulating()

    def step(self, clip: float) -> float:
        self.optimizer.clip = clip if clip > 0 else None
        self.optimizer.step()
        return self.optimizer.grad_norm

    def consensus(self) -> AbstractContextManager[None]:
        return self.optimizer.consensus()

    def finish(self) -> None:
        self.optimizer.finish()

    def state(self) -> tuple[State, State]:
        shared = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.common_state(),
            "errors": self.optimizer.portable_errors(),
        }
        return shared, {"errors": self.optimizer.own_errors()}

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        load_model_state(self.model, shared["model"])
        self.optimizer.load_common_state(shared["optimizer"])
        errors = private["errors"] if same_replicas else shared["errors"]
        ranks = self.optimizer.wire.size if same_replicas else 0
        self.optimizer.load_errors(errors, ranks=ranks)


class ZeroOneReplica(OneBitReplica):
    """0/1 Adam: replicas take local steps between two exchanges, so each is saved by itself."""

    replicated = False

    def state(self) -> tuple[State, State]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {}, state

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        if not same_replicas:
            raise UsageError(
                "zero-one-adam keeps a state of its own on every replica: resume it on as many "
                "workers as saved it"
            )
        load_model_state(self.model, private["model"])
        self.optimizer.load_state_dict(private["optimizer"])


@dataclass
class NoSettings:
    """This method has no settings of its own."""


@dataclass
class DdpSettings:
    """DistributedDataParallel."""

    bucket_mb: float = 25.0
    """Size of the buckets in which gradients are averaged, in MB. Smaller ones overlap more of the
    backward pass on a fast link; on a slow one it makes no difference."""


@dataclass
class AverageSettings:
    """GradientAverage."""

    codec: str = "fp32"
    """Form in which gradients travel: fp32, bf16, fp16, int8 or int4, with error feedback as in
    int4+ef."""


Build = Callable[[nn.Module, torch.optim.Optimizer, Any, Group], Replica]


@dataclass(frozen=True)
class Method:
    name: str
    summary: str
    settings: type
    build: Build
    check: Callable[[Any], None] = lambda settings: None
    """Refuses bad settings with a UsageError before anything is started."""
    shardable: bool = True
    """Whether a replica may be spread over several ranks (--shards)."""
    first_steps: Callable[[Any], int] = lambda settings: 0
    """Steps after which the method begins to be itself: a run must have more."""


def _none(
    module: nn.Module, inner: torch.optim.Optimizer, settings: NoSettings, group: Group
) -> Replica:
    return SeparateReplica(module, inner, group)


def _ddp(
    module: nn.Module, inner: torch.optim.Optimizer, settings: DdpSettings, group: Group
) -> Replica:
    return DdpReplica(module, inner, settings.bucket_mb)


def _average(
    module: nn.Module, inner: torch.optim.Optimizer, settings: AverageSettings, group: Group
) -> Replica:
    codec = codecs.parse(settings.codec)
    return WireReplica(module, GradientAverage(inner, codec=codec, group=group))


def _local(name: str) -> Method:
    """A preset of `LocalUpdates` as a method of the trainer."""
    summary, settings_type, kind = PRESETS[name]

    def build(
        module: nn.Module, inner: torch.optim.Optimizer, settings: LocalSettings, group: Group
    ) -> Replica:
        return LocalReplica(module, build_local(kind, inner, settings, module, group))

    return Method(name, summary, settings_type, build, partial(check_local, kind))


def _lamb(
    module: nn.Module, inner: torch.optim.Optimizer, settings: LambSettings, group: Group
) -> Replica:
    codec = codecs.parse(settings.codec)
    lamb = build_lamb(inner, settings)
    return WireReplica(module, GradientAverage(lamb, codec=codec, group=group))


def _one_bit(name: str) -> Method:
    summary, settings_type, make = ONE_BIT[name]

    def build(
        module: nn.Module, inner: torch.optim.Optimizer, settings: Any, group: Group
    ) -> Replica:
        optimizer = make(inner, settings, group)
        kind = ZeroOneReplica if isinstance(optimizer, ZeroOneAdam) else OneBitReplica
        return kind(module, optimizer)

    check = partial(check_one_bit, make)
    return Method(name, summary, settings_type, build, check, False, dense_steps)


def _check_ddp(settings: DdpSettings) -> None:
    if settings.bucket_mb <= 0:
        raise UsageError(f"--bucket-mb takes a number > 0, got {settings.bucket_mb}")


def _check_average(settings: AverageSettings) -> None:
    codecs.parse(settings.codec)


METHODS = {
    method.name: method
    for method in (
        Method("none", "no communication: the yardstick of speed", NoSettings, _none),
        Method("ddp", "PyTorch's data parallelism", DdpSettings, _ddp, _check_ddp, shardable=False),
        Method(
            "average",
            "data parallelism with a codec for the gradients",
            AverageSettings,
            _average,
            _check_average,
        ),
        *map(_local, PRESETS),
        Method("lamb", "LAMB with dense gradients", LambSettings, _lamb, check_lamb, False),
        *map(_one_bit, ONE_BIT),
    )
}


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise UsageError(f"--method takes one of {', '.join(METHODS)}; got {name!r}")
    return METHODS[name]
