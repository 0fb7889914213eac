"""Decent-DP: after every step a worker averages with its neighbour, while it computes the next.

It steps its own optimizers inside the backward pass, so the trainer's step does nothing here but
tell the norm that was there before. Its collectives go through torch.distributed, which is replaced
in its own module by one that counts.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.train.methods.method import Method
from thinwire.train.methods.replica import SeparateReplica
from thinwire.wire.account import Account
from thinwire.wire.collectives import all_reduce_bytes
from thinwire.wire.flight import Flight


@dataclass
class DecentSettings:
    """Decent-DP."""

    topology: str = "complete"
    """Whom a worker averages with: complete, ring, one-peer-exp or alternating-exp-ring."""


class MeteredWork:
    """A collective as a flight: what it was waited for, and what a pause between turns owes."""

    def __init__(self, work: dist.Work, buffer: Tensor, account: Account) -> None:
        self._flight = Flight(buffer, account)
        arrival: Future[float] = Future()
        self._flight._lands_with(arrival)
        done = work.get_future()
        done.add_done_callback(lambda _: arrival.set_result(time.perf_counter()))

    def wait(self) -> None:
        self._flight.wait()


class MeteredDist:
    """torch.distributed, with its all-reduces on the books."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, buffer: Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        size = dist.get_world_size(group)
        self._account.launched()
        self._account.sent(all_reduce_bytes(buffer.nbytes, size))
        work = dist.all_reduce(buffer, *args, **kwargs)
        return work if work is None else MeteredWork(work, buffer, self._account)


class Steps:
    """Stands for the optimizers that Decent-DP keeps to itself, for the learning rate."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self.made: list[torch.optim.Optimizer] = []

    def make(self, named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        """An optimizer for one bucket, with the settings of the trainer's."""
        groups = []
        for group in self._inner.param_groups:
            wanted = {id(p) for p in group["params"]}
            some = [p for _, p in named if id(p) in wanted]
            if some:
                groups.append({**group, "params": some})
        self.made.append(type(self._inner)(groups))  # type: ignore[call-arg]
        return self.made[-1]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        optimizers = self.made or [self._inner]
        return [group for optimizer in optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Done inside of the backward pass."""


class DecentReplica(SeparateReplica):
    resumable = False  # it keeps its optimizers to itself

    def __init__(
        self, module: nn.Module, inner: torch.optim.Optimizer, settings: DecentSettings
    ) -> None:
        import decent_dp.ddp as decent

        super().__init__(module, inner, None)
        self._clipped = False
        steps = Steps(inner)
        self.optimizer = steps  # type: ignore[assignment]
        decent.dist = MeteredDist(self.account)
        try:
            self.module = decent.DecentralizedDataParallel(
                module,
                steps.make,
                topology=settings.topology,
                grad_clip_norm=1.0,
                bucket_size_in_mb=1,
            )
        except ValueError as error:
            raise UsageError(f"decent-dp: topology {settings.topology!r}: {error}") from None

    def step(self, clip: float) -> float:
        self.account.tick()
        return 0.0


def _build(module: nn.Module, inner: torch.optim.Optimizer, settings: Any, group: Any) -> Any:
    return DecentReplica(module, inner, settings)


DECENT = Method("decent-dp", "Decent-DP", DecentSettings, _build, shardable=False)
