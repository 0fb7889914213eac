"""TorchPipeline: PyTorch's own synchronous schedules behind the `train()` of AsyncPipeline.

The yardstick: GPipe runs all forwards of an update and then all backwards, 1F1B interleaves them;
both drain the pipeline before every update, in float32, and send from the thread that computes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from thinwire.checks import require_at_least, require_choice, require_count
from thinwire.pipeline.async_pipeline import Batch, Record
from thinwire.pipeline.settings import require_loss, require_stage
from thinwire.pipeline.stage import ClippedStep, Loss
from thinwire.wire import world
from thinwire.wire.account import Account
from thinwire.wire.checks import require_group
from thinwire.wire.ranks import Group

_SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


class TorchPipeline:
    """One stage; every rank of the group makes one. Settings as in AsyncPipeline."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Group = None,
        loss: Loss,
        schedule: Literal["gpipe", "1f1b"] = "1f1b",
        accumulate: int = 4,
        clip: float = 1.0,
    ) -> None:
        name = "TorchPipeline"
        require_stage(name, module, optimizer)
        require_group(name, "group", group)
        require_loss(name, loss)
        require_choice(name, "schedule", schedule, _SCHEDULES)
        accumulate = require_count(name, "accumulate", accumulate)
        clip = require_at_least(name, "clip", clip, 0)
        world.current()  # joins, if the caller's process group is not known yet
        members = _process_group(group)
        self.stage, self.stages = dist.get_rank(members), dist.get_world_size(members)
        if schedule == "1f1b" and accumulate < self.stages:
            raise ValueError(
                f"torch's Schedule1F1B needs accumulate >= {self.stages} stages, got {accumulate}"
            )
        self.module, self.optimizer, self.accumulate = module, optimizer, accumulate
        self.account = Account()
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._step = ClippedStep(module, optimizer, clip, self.account)
        from torch.distributed import pipelining  # seconds: not for those who do without it

        stage = pipelining.PipelineStage(
            module, self.stage, self.stages, self.device, group=members
        )
        kind = getattr(pipelining, _SCHEDULES[schedule])
        self._schedule = kind(stage, n_microbatches=accumulate, loss_fn=loss)
        self.updates = 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def train(
        self,
        batches: Iterable[Batch],
        updates: int,
        *,
        before: Callable[[int], None] = lambda update: None,
    ) -> Iterator[Record]:
        """Takes updates * accumulate micro-batches, as AsyncPipeline does."""
        source = iter(batches)
        for _ in range(updates):
            micro = [next(source) for _ in range(self.accumulate)]
            loss = self._pass(torch.cat([x for x, _ in micro]), torch.cat([y for _, y in micro]))
            before(self.updates)
            norm = self._step()
            self.optimizer.zero_grad(set_to_none=True)
            self.account.tick()
            self.updates += 1
            yield Record(self.updates - 1, loss, norm)

    def _pass(self, x: Tensor, y: Tensor) -> Tensor | None:
        """All micro-batches forward and back; the mean loss on the last stage."""
        losses: list[Tensor] = []
        inputs = [x.to(self.device)] if self.stage == 0 else []
        if self.last:
            target = y.to(self.device)
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
            return torch.stack([loss.detach() for loss in losses]).mean()
        self._schedule.step(*inputs)
        return None


def _process_group(group: Group) -> ProcessGroup | None:
    if isinstance(group, DeviceMesh):
        return group.get_group()
    return group
