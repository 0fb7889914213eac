"""Sparse averaging for the trainer: its flags, and the replica that runs it."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.methods.sparse.sparse_average import SparseAverage
from thinwire.train.flags import by_flag
from thinwire.train.methods.local import LocalReplica
from thinwire.train.methods.method import Method
from thinwire.train.methods.replica import Replica
from thinwire.wire import codecs
from thinwire.wire.codecs import Feedback
from thinwire.wire.ranks import Group


@dataclass
class SparseSettings:
    """Sparse averaging: a few of the weights at a time, needed back some steps later."""

    fraction: float = 0.05
    """Share of the weights in a round. Raise it when the loss falls behind ddp; lower it while time
    is exposed."""
    averaging_delay: int = 10
    """Steps a round may be in the air; 0 waits for it. Raise it while time is exposed; lower it
    when the loss falls behind that of 0."""
    correction: Literal["ema", "delta", "overwrite"] = "ema"
    """What stands for the progress made while a mean was in the air: its average over earlier
    rounds, the progress itself, or nothing."""
    every: int = 1
    """Steps between rounds. Raise it when the link is too slow for a round at every step."""
    landing: Literal["step", "arrival"] = "step"
    """When a mean is applied: step, after exactly --averaging-delay steps, so that runs can be
    repeated; arrival, as soon as it is there, where speeds or links vary."""
    codec: str = "fp32"
    """Form in which the weights travel: fp32, bf16, fp16, int8 or int4. No error feedback: each
    round sends other weights."""


class SparseReplica(LocalReplica):
    """A replica whose weights meet those of the others a few at a time."""

    optimizer: SparseAverage

    def expect(self, steps: int) -> None:
        self.optimizer.steps = steps


def build_sparse(
    inner: torch.optim.Optimizer, settings: SparseSettings, model: nn.Module, group: Group
) -> SparseAverage:
    """The optimizer that the flags describe."""
    codec = codecs.parse(settings.codec)
    if isinstance(codec, Feedback):
        plain, plus, _ = settings.codec.partition("+")
        raise UsageError(
            f"--codec {settings.codec}: error feedback adds to a payload what the one before has "
            f"lost, and each round sends other weights; use {plain if plus else 'int8 or int4'}"
        )
    return SparseAverage(
        inner,
        fraction=settings.fraction,
        delay=settings.averaging_delay,
        correction=settings.correction,
        every=settings.every,
        landing=settings.landing,
        codec=codec,
        buffers=model.buffers(),
        group=group,
    )


def check_sparse(settings: SparseSettings) -> None:
    """Builds the method on a toy, so that bad settings are refused before anything starts."""
    toy = nn.Linear(1, 1)
    try:
        build_sparse(torch.optim.SGD(toy.parameters(), lr=0.1), settings, toy, None)
    except UsageError:
        raise
    except ValueError as error:
        raise by_flag(error, delay="averaging_delay") from None


def _sparse(
    module: nn.Module, inner: torch.optim.Optimizer, settings: SparseSettings, group: Group
) -> Replica:
    return SparseReplica(module, build_sparse(inner, settings, module, group))


def _slack(settings: SparseSettings) -> int:
    return settings.averaging_delay


SPARSE_METHODS = (
    Method(
        "sparse-average",
        "a few of the weights at each step, averaged some steps late (AsyncMesh's data axis)",
        SparseSettings,
        _sparse,
        check_sparse,
        slack=_slack,
    ),
    Method(
        "asyncmesh",
        "asynchronous stages (--stages) with look-ahead, sparse averaging between replicas",
        SparseSettings,
        _sparse,
        check_sparse,
        defaults={"stages": 2, "optimizer": "AsyncNAdam"},
        slack=_slack,
    ),
)
