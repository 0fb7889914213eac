"""The one-bit methods for the trainer: their flags, and the optimizers these describe."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.methods.dense.gradient_average import GradientAverage
from thinwire.methods.onebit.one_bit_adam import OneBitAdam
from thinwire.methods.onebit.one_bit_lamb import OneBitLamb
from thinwire.methods.onebit.zero_one_adam import ZeroOneAdam
from thinwire.optim import Lamb
from thinwire.train.flags import by_flag
from thinwire.train.methods.method import Method
from thinwire.train.methods.replica import Replica, State, WireReplica
from thinwire.train.methods.sharding import load_model_state
from thinwire.wire import codecs
from thinwire.wire.codecs import Codec, Dense
from thinwire.wire.ranks import Group


@dataclass
class LambSettings:
    """LAMB with dense gradients."""

    codec: str = "fp32"
    """Form in which gradients travel: fp32, bf16, fp16, int8, int4 or onebit, with error feedback
    as in int4+ef."""
    min_coefficient: float = 0.01
    """Least length of a step relative to its tensor's, over lr. Raise it when small tensors do not
    move."""
    max_coefficient: float = 10.0
    """Largest such length. Lower it, to 0.3 with batches of 64K, when single layers diverge."""


AUTO = "auto"
OneBitMethod = OneBitAdam | OneBitLamb | ZeroOneAdam


@dataclass
class OneBitSettings:
    """What the one-bit methods share."""

    freeze_at: int = 0
    """Dense steps before the variance is frozen and one bit a value is sent; 0 finds it by itself.
    Raise it when the loss falls behind the dense method's, lower it to save traffic."""
    floor: float = 0.01
    """Least variance of a value at the freeze, as a share of the mean over its tensor or bucket; 0
    as published. Raise it when the loss jumps at the freeze."""
    dense: str = AUTO
    """Form of the gradients until then: fp32, bf16, fp16, int8, or auto: int8, with --shard-state
    bf16. fp32 when the warm-up is unstable."""
    bucket_mb: float = 0.0
    """Size of the buckets in MB of float32; 0 makes about four. Raise it on links with a long
    delay."""
    overlap: bool = True
    """Send during the backward pass. In the one-bit stage that needs --clip 0, since the norm is
    known only after it."""


@dataclass
class SameStepSettings(OneBitSettings):
    """What the methods share in which all replicas take the same steps."""

    shard_state: bool = False
    """Keep on every worker only its share of the moments, at the same traffic, for models whose
    state does not fit. The one-bit stage is then another method: see docs/methods/one-bit.md."""
    delayed_step: bool = False
    """Use a momentum of the one-bit stage one step later, so that its exchange hides behind a whole
    step of compute. For links with a long delay."""


@dataclass
class OneBitAdamSettings(SameStepSettings):
    """1-bit Adam."""

    whiten: bool = True
    """Round the momentum in units of the steps it makes; --no-whiten rounds it as it is, as
    published."""
    forget: bool = True
    """Let the frozen variance forget the large gradients of the first steps; --no-forget keeps it
    as it is, as published."""


@dataclass
class OneBitLambSettings(SameStepSettings):
    """1-bit LAMB."""

    min_coefficient: float = 0.01
    """Least length of a step relative to its tensor's, over lr."""
    max_coefficient: float = 10.0
    """Largest such length. Lower it, to 0.3 with batches of 64K, when single layers diverge."""
    factor_threshold: float = 0.1
    """How much the correction for the frozen variance may change in a step. Lower it when the loss
    jumps after the freeze."""
    debias: bool = True
    """Correct the mean coefficient for having started from 0; --no-debias leaves it, as
    published."""


@dataclass
class ZeroOneAdamSettings(OneBitSettings):
    """0/1 Adam."""

    double_after: int = 16
    """Dense refreshes of the variance after which their spacing doubles. Raise it when the loss
    falls behind one-bit-adam's before the freeze."""
    local_double_after: int = 64
    """Steps after which the spacing of exchanges doubles. Raise it when the loss falls behind
    one-bit-adam's after the freeze, lower it in short runs; published 32678."""
    longest: int = 16
    """Most steps between two exchanges. Lower it when the loss swings with them."""


def build_lamb(inner: torch.optim.Optimizer, settings: LambSettings) -> Lamb:
    bounds = (settings.min_coefficient, settings.max_coefficient)
    return Lamb(_groups(inner, "lamb"), coefficient=bounds)


def build_adam(
    inner: torch.optim.Optimizer, settings: OneBitAdamSettings, group: Group
) -> OneBitMethod:
    return OneBitAdam(
        _groups(inner, "one-bit-adam"),
        whiten=settings.whiten,
        forget=settings.forget,
        group=group,
        shard_state=settings.shard_state,
        delayed_step=settings.delayed_step,
        **_shared(settings),
    )


def build_one_bit_lamb(
    inner: torch.optim.Optimizer, settings: OneBitLambSettings, group: Group
) -> OneBitMethod:
    return OneBitLamb(
        _groups(inner, "one-bit-lamb"),
        coefficient=(settings.min_coefficient, settings.max_coefficient),
        factor_threshold=settings.factor_threshold,
        debias=settings.debias,
        group=group,
        shard_state=settings.shard_state,
        delayed_step=settings.delayed_step,
        **_shared(settings),
    )


def build_zero_one(
    inner: torch.optim.Optimizer, settings: ZeroOneAdamSettings, group: Group
) -> OneBitMethod:
    return ZeroOneAdam(
        _groups(inner, "zero-one-adam"),
        double_after=settings.double_after,
        local_double_after=settings.local_double_after,
        longest=settings.longest,
        group=group,
        **_shared(settings),
    )


OneBitBuild = Callable[[torch.optim.Optimizer, Any, Group], OneBitMethod]


class OneBitReplica(Replica):
    """Replicas that take the same step, from dense gradients first and one-bit momentum then."""

    replicated = True
    optimizer: OneBitMethod

    def __init__(self, module: nn.Module, optimizer: OneBitMethod) -> None:
        super().__init__(module, optimizer, optimizer.group)
        self.account = optimizer.account

    @property
    def averages_gradients(self) -> bool:
        return not self.optimizer.compressing and isinstance(self.optimizer.dense, Dense)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.optimizer.accumulating()

    def step(self, clip: float) -> float:
        self.optimizer.clip = clip if clip > 0 else None
        self.optimizer.step()
        return self.optimizer.grad_norm

    @contextmanager
    def consensus(self) -> Iterator[None]:
        with self.optimizer.consensus(), self.statistics.consensus():
            yield

    def finish(self) -> None:
        self.optimizer.finish()
        self.statistics.settle()

    def state(self) -> tuple[State, State]:
        shared = {
            "model": self.model.state_dict() | self.statistics.means(),
            "optimizer": self.optimizer.engine.saved.common(),
            "errors": self.optimizer.engine.store.portable_errors(),
        }
        return shared, {
            "errors": self.optimizer.engine.store.own_errors(),
            **self.statistics.state(),
        }

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        load_model_state(self.model, shared["model"])
        if same_replicas:
            self.statistics.load_state(private)
        self.optimizer.engine.saved.load_common(shared["optimizer"])
        errors = private["errors"] if same_replicas else shared["errors"]
        ranks = self.optimizer.wire.size if same_replicas else 0
        self.optimizer.engine.store.load_errors(errors, ranks=ranks)


class ZeroOneReplica(OneBitReplica):
    """0/1 Adam: between two exchanges replicas differ, and each keeps a state of its own beside the
    means, from which another number of workers goes on."""

    replicated = False
    optimizer: ZeroOneAdam

    @property
    def averages_gradients(self) -> bool:
        return False  # at some of the steps alone, ever more rarely

    def state(self) -> tuple[State, State]:
        with self.consensus():
            model = {name: value.clone() for name, value in self.model.state_dict().items()}
        shared = {
            "model": model,
            "optimizer": self.optimizer.engine.saved.common(),
            "errors": self.optimizer.engine.store.portable_errors(),
        }
        if not self.optimizer.apart:
            return shared, {
                "errors": self.optimizer.engine.store.own_errors(),
                **self.statistics.state(),
            }
        private = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return shared, private

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        if not same_replicas or "optimizer" not in private:
            super().load_state(shared, private, same_replicas=same_replicas)
            return
        load_model_state(self.model, private["model"])
        self.optimizer.load_state_dict(private["optimizer"])


ONE_BIT: dict[str, tuple[str, type, OneBitBuild]] = {
    "one-bit-adam": (
        "Adam, its momentum in one bit after a warm-up",
        OneBitAdamSettings,
        build_adam,
    ),
    "one-bit-lamb": (
        "LAMB for large batches, its momentum in one bit after a warm-up",
        OneBitLambSettings,
        build_one_bit_lamb,
    ),
    "zero-one-adam": (
        "0/1 Adam: one bit from early on, and local steps in the end",
        ZeroOneAdamSettings,
        build_zero_one,
    ),
}


def check_lamb(settings: LambSettings) -> None:
    codecs.parse(settings.codec)
    _try(lambda inner: build_lamb(inner, settings))


def check_one_bit(build: OneBitBuild, settings: OneBitSettings) -> None:
    """Builds the method on a toy, so that bad settings are refused before anything starts."""
    _try(lambda inner: build(inner, settings, None))


def dense_steps(settings: OneBitSettings) -> int:
    """Steps that a run must have more of."""
    return settings.freeze_at


def _dense_first(settings: OneBitSettings) -> bool:
    return isinstance(codecs.parse(_dense_name(settings)), Dense)


def _dense_name(settings: OneBitSettings) -> str:
    """The warm-up is most of the traffic of a short run: eight bits, where directions of owners do
    not travel in the same form."""
    if settings.dense != AUTO:
        return settings.dense
    return "bf16" if getattr(settings, "shard_state", False) else "int8"


def _try(build: Callable[[torch.optim.Optimizer], object]) -> None:
    try:
        build(torch.optim.AdamW(nn.Linear(1, 1).parameters()))
    except UsageError:
        raise
    except ValueError as error:
        raise by_flag(error, coefficient="min_coefficient and --max_coefficient") from None


def _shared(settings: OneBitSettings) -> dict[str, Any]:
    if settings.freeze_at < 0:
        raise UsageError(f"--freeze-at takes a number of steps >= 0, got {settings.freeze_at}")
    if settings.bucket_mb < 0:
        raise UsageError(f"--bucket-mb takes a number >= 0, got {settings.bucket_mb}")
    dense = codecs.parse(_dense_name(settings))
    if not isinstance(dense, Codec):
        raise UsageError(f"--dense takes a codec without error feedback, got {settings.dense!r}")
    return {
        "freeze_at": settings.freeze_at or None,
        "bucket_mb": settings.bucket_mb or None,
        "dense": dense,
        "overlap": settings.overlap,
    }


def _groups(inner: torch.optim.Optimizer, method: str) -> list[dict[str, Any]]:
    """The groups of the trainer's Adam: these methods have its settings and their own update."""
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        raise UsageError(
            f"--optimizer {type(inner).__name__}: {method} is an optimizer of its own, with the "
            "settings of Adam; leave --optimizer out"
        )
    refused = [key for key in ("amsgrad", "maximize") if inner.defaults.get(key)]
    if refused:
        raise UsageError(f"--optimizer-arg {refused[0]}: {method} has no such variant")
    return [
        {key: group[key] for key in ("params", "lr", "betas", "eps", "weight_decay")}
        for group in inner.param_groups
    ]


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
    return Method(
        name,
        summary,
        settings_type,
        build,
        check,
        shardable=False,
        first_steps=dense_steps,
        averages=_dense_first if name != "zero-one-adam" else lambda settings: False,
    )


ONE_BIT_METHODS = (
    Method(
        "lamb",
        "LAMB with dense gradients",
        LambSettings,
        _lamb,
        check_lamb,
        shardable=False,
        averages=lambda settings: isinstance(codecs.parse(settings.codec), Dense),
    ),
    *map(_one_bit, ONE_BIT),
)
