"""The decentralized methods for the trainer: their flags, and the replica that runs them."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.methods.gossip.decentlam import DecentLaM, require_stable
from thinwire.methods.gossip.dsgd import DSGD, DmSGD
from thinwire.train.methods.method import Method
from thinwire.train.methods.replica import Replica, State
from thinwire.train.methods.sharding import load_model_state, local_state
from thinwire.wire import codecs, topology
from thinwire.wire.codecs import Codec
from thinwire.wire.ranks import Group


@dataclass
class DsgdSettings:
    """Decentralized SGD."""

    topology: str = "ring"
    """Who talks to whom: ring, torus (torus:2 for 2 rows), exponential, complete, or edges as in
    edges:0-1,1-2,2-0. Denser when the loss falls behind ddp, sparser when the network does."""
    codec: str = "fp32"
    """Form in which weights travel: fp32, bf16, fp16, int8 or int4; all but fp32 send only what has
    changed."""
    bucket_mb: float = 0.0
    """Size of the buckets in MB of float32; 0 makes about four. Raise it on links with a long
    delay."""
    overlap: bool = True
    """Send during the backward pass. That needs --clip 0, since the norm is known only after it."""


@dataclass
class MomentumSettings(DsgdSettings):
    """Decentralized SGD with momentum."""

    momentum: float = 0.9
    """Carries steps on. Lower it when the loss swings."""


Decentralized = DecentLaM | DSGD | DmSGD


class DecentralizedReplica(Replica):
    """A replica that steps with what its neighbours have told it."""

    optimizer: Decentralized

    def __init__(self, module: nn.Module, optimizer: Decentralized) -> None:
        super().__init__(module, optimizer)
        self.account = optimizer.account
        optimizer.clip = math.inf  # nothing leaves early before the first step has told it

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
        model = local_state(self.model.state_dict())
        return {}, {"model": model, "optimizer": self.optimizer.state_dict()}

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        load_model_state(self.model, private["model"])
        self.optimizer.load_state_dict(private["optimizer"])


Kind = type[DecentLaM] | type[DSGD] | type[DmSGD]

KINDS: dict[str, tuple[str, type[DsgdSettings], Kind]] = {
    "decentlam": (
        "momentum SGD among graph neighbours, without the bias of momentum",
        MomentumSettings,
        DecentLaM,
    ),
    "dsgd": ("SGD among graph neighbours", DsgdSettings, DSGD),
    "dmsgd": ("the same with ordinary momentum", MomentumSettings, DmSGD),
}


def build_decentralized(
    name: str, inner: torch.optim.Optimizer, settings: DsgdSettings, model: nn.Module, group: Group
) -> Decentralized:
    """The optimizer that the flags describe, with lr and decay of the trainer's own."""
    own = {"momentum": settings.momentum} if isinstance(settings, MomentumSettings) else {}
    groups = _groups(inner, name)
    return KINDS[name][2](
        groups,
        groups[0]["lr"],
        topology=settings.topology,
        codec=_codec(settings.codec),
        bucket_mb=settings.bucket_mb or None,
        overlap=settings.overlap,
        buffers=model.buffers(),
        group=group,
        **own,
    )


def check_decentralized(settings: DsgdSettings) -> None:
    """What can be refused without knowing the number of workers."""
    _codec(settings.codec)
    if settings.bucket_mb < 0:
        raise UsageError(f"--bucket-mb takes a number >= 0, got {settings.bucket_mb}")
    if isinstance(settings, MomentumSettings) and not 0 <= settings.momentum < 1:
        raise UsageError(
            f"--momentum takes a number in [0, 1), got {settings.momentum}; any below 1 is "
            "stable on these graphs, whose weights are symmetric"
        )


def fits(settings: DsgdSettings, replicas: int) -> None:
    """Whether the graph can be made for so many replicas, and bears the momentum."""
    try:
        graph = topology.parse(settings.topology, replicas)
        if isinstance(settings, MomentumSettings):
            require_stable("--momentum", settings.momentum, graph)
    except ValueError as error:
        raise UsageError(f"--topology {settings.topology}: {error}") from None


def _codec(name: str) -> Codec | None:
    """None for fp32, which has nothing to lose."""
    codec = codecs.parse(name)
    if name not in ("fp32", "bf16", "fp16", "int8", "int4"):
        raise UsageError(f"--codec takes fp32, bf16, fp16, int8 or int4 here, got {name!r}")
    assert isinstance(codec, Codec)
    return None if name == "fp32" else codec


def _groups(inner: torch.optim.Optimizer, method: str) -> list[dict[str, Any]]:
    """The groups of the trainer's optimizer: these methods have an update of their own."""
    if not isinstance(inner, torch.optim.AdamW | torch.optim.SGD):
        raise UsageError(
            f"--optimizer {type(inner).__name__}: {method} is an optimizer of its own, momentum "
            "SGD; leave --optimizer out"
        )
    given = [key for key in ("momentum", "nesterov", "dampening") if inner.defaults.get(key)]
    if given:
        raise UsageError(f"--optimizer-arg {given[0]}: {method} has a --momentum of its own")
    return [
        {key: group[key] for key in ("params", "lr", "weight_decay")}
        for group in inner.param_groups
    ]


def _method(name: str) -> Method:
    summary, settings_type, _ = KINDS[name]

    def build(
        module: nn.Module, inner: torch.optim.Optimizer, settings: Any, group: Group
    ) -> Replica:
        optimizer = build_decentralized(name, inner, settings, module, group)
        return DecentralizedReplica(module, optimizer)

    return Method(
        name, summary, settings_type, build, check_decentralized, fits=fits, stageable=False
    )


DECENTRALIZED_METHODS = tuple(map(_method, KINDS))
