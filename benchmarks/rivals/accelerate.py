"""Hugging Face Accelerate's LocalSGD: DDP without its all-reduce, weights averaged now and then."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.rivals.foreign import Countdown, ForeignReplica
from thinwire.train.methods.method import Method


@dataclass
class AccelerateSettings:
    """Accelerate's LocalSGD."""

    every: int = 8
    """Steps between two averages."""


class AccelerateReplica(ForeignReplica):
    def __init__(
        self, module: nn.Module, inner: torch.optim.Optimizer, settings: AccelerateSettings
    ) -> None:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        super().__init__(module, inner)
        accelerator = Accelerator(cpu=True)
        wrapped, optimizer = accelerator.prepare(module, inner)
        self.module, self._accelerated = wrapped, optimizer
        self._local = LocalSGD(
            accelerator=accelerator, model=wrapped, local_sgd_steps=settings.every, enabled=True
        )
        self._local.__enter__()
        self._countdown = Countdown(settings.every)

    def optimize(self) -> bool:
        self._accelerated.step()
        self._local.step()
        return self._countdown.due()


def _build(module: nn.Module, inner: torch.optim.Optimizer, settings: Any, group: Any) -> Any:
    return AccelerateReplica(module, inner, settings)


ACCELERATE = Method(
    "accelerate-local-sgd", "Accelerate's LocalSGD", AccelerateSettings, _build, shardable=False
)
