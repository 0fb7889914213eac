"""The methods without tricks: no communication, PyTorch's data parallelism, and ours."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import UsageError
from thinwire.methods.dense.gradient_average import GradientAverage
from thinwire.train.methods.method import Method
from thinwire.train.methods.replica import Replica, SeparateReplica, WireReplica
from thinwire.wire import codecs
from thinwire.wire.ddp import DdpMeter
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire


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
    int4+ef; topk+ef or threshold:0.01 send a share of them (not under Adam)."""


# Buffers are each replica's own, see running_statistics.py; the setting has got another name.
_OWN_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)


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
            ddp = DistributedDataParallel(
                module,
                process_group=wire.group,
                bucket_cap_mb=bucket_mb,
                **_OWN_BUFFERS,
            )
            self._meter = DdpMeter(ddp, wire)
            self.module = ddp

    @property
    def averages_gradients(self) -> bool:
        return True

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return naming_lost_peers(self.module, self._wire, last)


@contextmanager
def naming_lost_peers(module: nn.Module, wire: Wire, last: bool) -> Iterator[None]:
    """Around forward and backward of a DDP module on a wire's group, all micro-batches but the
    last of a step without communication."""
    adding_up: AbstractContextManager[None] = nullcontext()
    if not last and isinstance(module, DistributedDataParallel):
        adding_up = module.no_sync()
    try:
        with adding_up:
            yield
    except RuntimeError as error:
        # The autograd engine hides a lost peer in an error of its own.
        lost = wire.explain(error)
        if lost is not None:
            raise lost from error
        raise


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


def check_ddp(settings: DdpSettings) -> None:
    if settings.bucket_mb <= 0:
        raise UsageError(f"--bucket-mb takes a number > 0, got {settings.bucket_mb}")


def _check_average(settings: AverageSettings) -> None:
    codecs.parse(settings.codec)


DENSE_METHODS = (
    Method("none", "no communication: the yardstick of speed", NoSettings, _none),
    Method(
        "ddp",
        "PyTorch's data parallelism",
        DdpSettings,
        _ddp,
        check_ddp,
        shardable=False,
        averages=lambda settings: True,
        stageable=False,
    ),
    Method(
        "average",
        "data parallelism with a codec for the gradients",
        AverageSettings,
        _average,
        _check_average,
        averages=lambda settings: isinstance(codecs.parse(settings.codec), codecs.Dense),
    ),
)
