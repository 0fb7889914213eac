"""DeepSpeed 0.19.6's OneBitAdam, of the last release that has it, under its own engine.

Dense steps with its all-reduce in the backward pass, then one-bit momentum in its step. What it
lacks on a CPU is mended: deepspeed_mends.py.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rivals.deepspeed_mends import mended_deepspeed
from benchmarks.rivals.foreign import ForeignReplica
from thinwire.train.methods.method import Method
from thinwire.wire.account import Account


@dataclass
class DeepSpeedSettings:
    """DeepSpeed's OneBitAdam."""

    freeze_at: int = 40
    """Dense steps before momentum goes in one bit. DeepSpeed suggests 15 to 25 % of a run."""


class Waits:
    """Puts calls that wait for the network on the books."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            answer = call(*args, **kwargs)
            taken = time.perf_counter() - began
            self._account.landed(flown=taken, waited=taken, lag=0, launched=began)
            return answer

        return timed


class TimedDist:
    """deepspeed.comm as its compressed backend sees it."""

    def __init__(self, dist: Any, waits: Waits) -> None:
        self._dist, self._waits = dist, waits

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._dist, name)
        return self._waits.around(value) if name in ("all_to_all_single", "all_gather") else value


class EngineLoss:
    """A loss whose backward pass is the engine's."""

    def __init__(self, engine: Any, loss: Tensor) -> None:
        self._engine, self._loss = engine, loss

    def __truediv__(self, count: int) -> "EngineLoss":
        return self if count == 1 else EngineLoss(self._engine, self._loss / count)

    def backward(self) -> None:
        self._engine.backward(self._loss)

    def detach(self) -> Tensor:
        return self._loss.detach()


class DeepSpeedReplica(ForeignReplica):
    def __init__(
        self, module: nn.Module, inner: torch.optim.Optimizer, settings: DeepSpeedSettings
    ) -> None:
        deepspeed = mended_deepspeed()
        group = inner.param_groups[0]
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=list(module.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,  # it only reports with it
                "optimizer": {
                    "type": "OneBitAdam",
                    "params": {
                        "lr": group["lr"],
                        "betas": list(group.get("betas", (0.9, 0.999))),
                        "freeze_step": settings.freeze_at,
                        "comm_backend_name": "compressed",
                    },
                },
            },
        )
        super().__init__(module, engine.optimizer)
        self._engine = engine
        waits = Waits(self.account)
        engine.allreduce_gradients = waits.around(engine.allreduce_gradients)
        from deepspeed.runtime.comm import compressed

        compressed.dist = TimedDist(compressed.dist, waits)
        self.module = lambda x, y: EngineLoss(engine, engine(x, y))  # type: ignore[assignment]

    def optimize(self) -> bool:
        self._engine.step()
        return False  # what it waits for is counted above


def _build(module: nn.Module, inner: torch.optim.Optimizer, settings: Any, group: Any) -> Any:
    return DeepSpeedReplica(module, inner, settings)


DEEPSPEED = Method(
    "deepspeed-one-bit",
    "DeepSpeed's OneBitAdam",
    DeepSpeedSettings,
    _build,
    shardable=False,
    stageable=False,
)
