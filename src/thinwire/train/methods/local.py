"""The local-update methods for the trainer: their flags, and the replica that runs them."""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.methods.base import WireOptimizer
from thinwire.methods.local.des_loc import DesLoc
from thinwire.methods.local.overlapped import CO2, Eager, Overlapped
from thinwire.methods.local.presets import DiLoCo, LocalSGD, SlowMo, SparseLoCo, StreamingDiLoCo
from thinwire.train.flags import by_flag
from thinwire.train.methods.method import Method
from thinwire.train.methods.replica import Replica, State
from thinwire.train.methods.sharding import load_model_state, load_optimizer_state, local_state
from thinwire.wire import codecs
from thinwire.wire.ranks import Group


@dataclass
class RoundSettings:
    """What all local-update methods share."""

    every: str = "24"
    """Inner steps in a round, or auto: the shortest round that hides the averaging, measured in the
    first steps. Raise it while much time is exposed; lower it when the loss falls behind ddp."""
    codec: str = "fp32"
    """Form in which progress travels: fp32, bf16, fp16, int8 or int4, with error feedback as in
    int4+ef. Shrink the payload before you lengthen the round."""


@dataclass
class LocalSettings(RoundSettings):
    """What the methods with an outer optimizer share."""

    offload: bool = False
    """Keep the outer state in host memory. For when the accelerator's memory runs out."""


@dataclass
class LocalSgdSettings(LocalSettings):
    """Local SGD: plain averaging of the weights."""

    every: str = "8"
    """Inner steps in a round (or auto). Every round ends with a wait for the network."""


@dataclass
class SlowMoSettings(LocalSettings):
    """SlowMo: blocking rounds with an outer momentum."""

    every: str = "48"
    """Inner steps in a round (or auto). Every round ends with a wait for the network."""
    outer_lr: float = 1.0
    """Share of the mean progress that is taken over. Lower it when the loss swings with the
    rounds."""
    outer_momentum: float = 0.5
    """Carries progress from round to round. Lower it when the loss overshoots; 0 for rounds of
    under about 16 steps."""


@dataclass
class DiLoCoSettings(LocalSettings):
    """DiLoCo: long blocking rounds with a Nesterov momentum."""

    every: str = "100"
    """Inner steps in a round (or auto). Every round ends with a wait for the network."""
    outer_lr: float = 0.7
    """Share of the mean progress that is taken over. Lower it when the loss swings with the
    rounds."""
    outer_momentum: float = 0.9
    """Nesterov momentum. Lower it in short runs: it needs tens of rounds to build up."""


@dataclass
class SparseLoCoSettings(LocalSettings):
    """SparseLoCo: of a round's progress the largest values, in two bits."""

    codec: str = "topk"
    """Form in which progress travels; topk comes with an error feedback that fades (--decay)."""
    decay: float = 0.95
    """Share of what was not sent that is kept for the next round. Raise it towards 1 with few
    rounds, lower it when the loss swings with them."""
    outer_lr: float = 1.0
    """Share of the mean progress that is taken over. Lower it when the loss swings with the
    rounds."""


@dataclass
class StreamingSettings(DiLoCoSettings):
    """Streaming DiLoCo: fragments of the model, each averaged in its own turn."""

    codec: str = "int4"
    """Form in which progress travels. 4 bits are the published choice."""
    outer_lr: float = 0.4
    """Share of the mean progress that is taken over."""
    fragments: int = 4
    """Groups of layers. More of them spread the traffic more evenly; --every must divide by it."""
    fragment_delay: int = 5
    """Steps a fragment's mean may be in the air. Raise it while time is exposed."""
    merge: float = 0.5
    """Weight of the local value when a mean arrives."""


@dataclass
class Co2Settings(LocalSettings):
    """CO2: averaging hidden behind a whole round, one anchor for all."""

    outer_lr: float = 1.0
    """Share of the mean progress that is taken over. Lower it when rounds swing."""
    outer_momentum: float = 0.2
    """Grow it with the number of replicas (0 to 0.6). A warning tells when it is too high for a
    mean that is a round old."""
    penalty: str = "gap"
    """What divides the stale mean: gap (measured each round) or a number >= 1. Raise it when the
    loss diverges here and not with slowmo."""
    outer_clip: float = 2.0
    """Bound of the outer momentum; 0 does not clip. Lower it when single rounds throw the loss
    up."""
    clip_by: Literal["norm", "value"] = "norm"
    """norm is free of units; value clips each element, as published."""


@dataclass
class EagerSettings(LocalSettings):
    """Eager updates: a round late, own progress in its share of the mean."""

    every: str = "30"
    """Inner steps in a round, or auto."""
    outer_lr: float = 0.4
    """Share of the mean progress that is taken over. Lower it with more than two replicas."""
    outer_momentum: float = 0.9
    """Nesterov momentum."""


@dataclass
class OverlappedSettings(LocalSettings):
    """Overlapped: never waits, and on average nothing is late. What we recommend."""

    outer_lr: float = 1.0
    """Share of the mean progress that is taken over."""
    outer_momentum: float = 0.5
    """Carries progress from round to round. Lower it when the loss overshoots; 0 for rounds of
    under about 16 steps."""


@dataclass
class DesLocSettings(RoundSettings):
    """DES-LOC: weights and moments of Adam averaged, each at a period of its own."""

    every: str = "16"
    """Steps between two averages of the weights. Every one is waited for."""
    first_moments: int = 3
    """Averages of the weights to one of the first moments; 0 leaves each replica its own."""
    second_moments: int = 6
    """Averages of the weights to one of the second moments; 0 leaves each replica its own."""


class LocalReplica(Replica):
    """A replica that steps on its own and meets the others by the rounds of its optimizer."""

    optimizer: WireOptimizer

    def __init__(self, module: nn.Module, optimizer: WireOptimizer) -> None:
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
        return {}, {**state, "method": self.optimizer.engine.method_state()}

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        load_model_state(self.model, private["model"])
        load_optimizer_state(self.optimizer.inner, private["inner"])
        self.optimizer.engine.load_method_state(private["method"])
        self.optimizer.adopt_inner()


Preset = Callable[..., WireOptimizer]
PRESETS: dict[str, tuple[str, type[RoundSettings], Preset]] = {
    "overlapped": (
        "averaging hidden behind compute, nothing late on average (ours)",
        OverlappedSettings,
        Overlapped,
    ),
    "co2": ("averaging hidden behind compute, one round late", Co2Settings, CO2),
    "slowmo": ("blocking rounds with outer momentum", SlowMoSettings, SlowMo),
    "local-sgd": ("blocking averaging of the weights", LocalSgdSettings, LocalSGD),
    "diloco": ("long blocking rounds, Nesterov", DiLoCoSettings, DiLoCo),
    "streaming-diloco": ("DiLoCo by fragments, 4 bits", StreamingSettings, StreamingDiLoCo),
    "sparseloco": ("blocking rounds, top 1.6 % in 2 bits", SparseLoCoSettings, SparseLoCo),
    "des-loc": ("weights and moments averaged at their own periods", DesLocSettings, DesLoc),
    "eager": ("DiLoCo one round late with own progress", EagerSettings, Eager),
}


def build_local(
    kind: Preset,
    inner: torch.optim.Optimizer,
    settings: RoundSettings,
    model: nn.Module,
    group: Group,
) -> WireOptimizer:
    """The optimizer that a preset's flags describe."""
    values: dict[str, Any] = dict(vars(settings))
    values["every"] = parse_every(settings.every)
    values["codec"] = codecs.parse(settings.codec)
    if "decay" in values:
        decay, codec = values.pop("decay"), values["codec"]
        if isinstance(codec, codecs.Codec):
            values["codec"] = codecs.ErrorFeedback(codec, decay=decay)
    if "penalty" in values:
        values["penalty"] = _parse_penalty(values["penalty"])
        values["clip"] = values.pop("outer_clip") or None
    if "fragment_delay" in values:  # --delay and --clip are the lab's and the optimizer's
        values["delay"] = values.pop("fragment_delay")
    return kind(inner, buffers=model.buffers(), group=group, **values)


def check_local(kind: Preset, settings: RoundSettings) -> None:
    """Builds the method on a toy, so that bad settings are refused before anything starts."""
    toy = nn.Sequential(*(nn.Linear(1, 1) for _ in range(64)))
    inner = torch.optim.SGD(toy.parameters(), lr=0.1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself will give them
            build_local(kind, inner, settings, toy, None)
    except UsageError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise by_flag(error, delay="fragment_delay", clip="outer_clip") from None


def parse_every(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--every takes a number of steps or auto, got {text!r}") from None


def _parse_penalty(text: str) -> float | Literal["gap"]:
    if text == "gap":
        return "gap"
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--penalty takes gap or a number >= 1, got {text!r}") from None


def _local(name: str) -> Method:
    """A preset of the local family as a method of the trainer."""
    summary, settings_type, kind = PRESETS[name]

    def build(
        module: nn.Module, inner: torch.optim.Optimizer, settings: RoundSettings, group: Group
    ) -> Replica:
        return LocalReplica(module, build_local(kind, inner, settings, module, group))

    return Method(name, summary, settings_type, build, partial(check_local, kind))


LOCAL_METHODS = tuple(map(_local, PRESETS))
