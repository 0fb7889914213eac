"""StageTrainer: a worker that holds one stage of a replica, in an asynchronous pipeline.

A step is an update of every stage; its number means the same on all of them. Between two steps a
pipeline is full of micro-batches, so it runs in legs: from one moment at which something is due (an
evaluation, a checkpoint, the end) to the next, where it is drained. The last stage knows the loss
and tells the first one, whose metrics a run is followed by.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thinwire.pipeline import AsyncPipeline, stage_settings
from thinwire.pipeline import Record as Update
from thinwire.train.checkpoints import checkpoint
from thinwire.train.config import TrainConfig
from thinwire.train.data.order import Pair
from thinwire.train.loop.metrics import Record
from thinwire.train.loop.pipelining import cut_model, cuts_of, make_mesh, parse_codec
from thinwire.train.loop.trainer import Trainer
from thinwire.train.preflight import cut_of
from thinwire.train.tasks.task import Task
from thinwire.wire.account import Account
from thinwire.wire.flight import Flight
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire
from thinwire.wire.world import World

# Without a stash, the share of a run over which stages are held back (7,000 of 30,000 updates).
_HELD_BACK = 0.23


class StageTrainer(Trainer):
    """Trains one stage. `drain_every` adds moments at which nothing is in flight."""

    def __init__(
        self, config: TrainConfig, world: World, control: Wire, task: Task, run: Path
    ) -> None:
        super().__init__(config, world, control, task, run)
        settings, row = config.pipeline, self._mesh["stage"]
        with torch.device("meta"):
            self.whole = task.build_model()
        self.pipe = AsyncPipeline(
            self.model,
            self.replica.optimizer,
            group=row,
            loss=self.whole.loss,
            schedule=settings.schedule,
            stash=settings.stash,
            recompute=settings.recompute,
            accumulate=config.loop.accumulate,
            lead=settings.lead,
            codec=parse_codec(settings.activation_codec, "activation_codec"),
            gradient_codec=parse_codec(settings.gradient_codec, "gradient_codec"),
            autocast=torch.bfloat16 if config.loop.bf16 else None,
            update=self._update,
        )
        self._news = LossLine(row)
        self._priming = False
        self.drain_every = 0
        self._leg: Iterator[Update] | None = None
        self._leg_start = self._leg_end = 0  # steps
        self._leg_position = 0  # in the data, at its start

    def _lay_out(self) -> Group:
        config = self.config.pipeline
        if self.config.loop.resume:  # the cut of the run, however it was found
            config = replace(
                config, cut=cut_of(checkpoint.read_manifest(self.run).meta, config.stages)
            )
        self.members = config.stages
        self._mesh = make_mesh(self.world, config.stages)
        sample = self.task.blank()[0].to(self.world.device)
        stages = cut_model(self.whole, config, sample)
        self._cut = cuts_of(stages)
        self.model = stages[self.world.rank % config.stages]
        return self._mesh["replica"]

    def _settings(self) -> Any:
        """Gradients of older versions of the weights pass no hooks: nothing can be sent during the
        backward pass."""
        settings = self.config.settings
        return replace(settings, overlap=False) if hasattr(settings, "overlap") else settings

    # -- steps ------------------------------------------------------------------------------------

    def prime(self) -> None:
        self._priming = True
        for _ in self.pipe.train(itertools.repeat(self.task.blank()), 1):
            pass
        self._priming = False
        self.pipe.updates = 0
        self._forget_traffic()

    def train_step(self) -> Record:
        start = time.perf_counter()
        leg = self._leg = self._leg or self._begin()
        update = next(leg)
        self.norm = float(update.norm)
        self.loss = self._news.pass_on(update.loss)
        if self.step + 1 == self._leg_end:
            next(leg, None)  # drains
            self._leg = None
        lr = self.replica.optimizer.param_groups[0]["lr"]
        return self._stepped(time.perf_counter() - start) | {"lr": lr, "grad_norm": self.norm}

    def _begin(self) -> Iterator[Update]:
        loop = self.config.loop
        periods = [n for n in (loop.eval_every, loop.save_every, self.drain_every) if n > 0]
        ends = [(self.step // period + 1) * period for period in periods]
        # A comparison may read on beyond the steps it was made for.
        last = [loop.steps] if self.step < loop.steps else []
        self._leg_start, self._leg_end = self.step, min([*last, *ends])
        self._leg_position = self.batches.position
        return self.pipe.train(
            self._micro_batches(), self._leg_end - self.step, before=self._before_update
        )

    def _micro_batches(self) -> Iterator[Pair]:
        while True:
            yield self.batches.next()

    def _before_update(self, update: int) -> None:
        lr = self._set_learning_rate()
        if self.config.pipeline.stash:
            return
        held_back = max(1, round(_HELD_BACK * self.config.loop.steps))
        own = stage_settings(self.pipe.schedule, self.step, correct_for=held_back)
        for group in self.replica.optimizer.param_groups:
            group["lr"] = lr * own.lr_scale
            if "betas" in group:
                group["betas"] = (own.momentum, *group["betas"][1:])
            elif "momentum" in group:
                group["momentum"] = own.momentum

    def _update(self) -> float:
        return 0.0 if self._priming else self.replica.step(self.config.optimizer.clip)

    def earliest_stop(self) -> int:
        if self._leg is not None:
            self._leg_end = self.step + self.pipe.end_early() - self.pipe.updates
            return self._leg_end
        return self.step

    @property
    def trained(self) -> int:
        """What every stage has finished: the first ones have read ahead of that."""
        if self._leg is None:
            return super().trained
        config = self.config
        samples = config.loop.accumulate * config.data.batch * self.readers
        done = self._leg_position + (self.step - self._leg_start) * samples
        return done * self.task.units_per_sample

    def own_loss(self) -> float:
        if self.pipe.first:
            return self.loss
        # Of the others only the last one knows; that it is not finite anybody may say.
        return 0.0 if math.isfinite(self.loss) or not self.pipe.last else self.loss

    # -- the rest of a run ------------------------------------------------------------------------

    def _judged(self, batches: Iterator[Pair]) -> Iterator[tuple[list[float], float]]:
        for y, output in self.pipe.outputs(batches):
            if output is not None:
                yield self.task.judge(self.whole, output, y)

    def accounts(self) -> list[Account]:
        return [self.replica.account, self.pipe.account]

    def _meta(self) -> dict[str, Any]:
        return super()._meta() | {"stages": self.members, "cut": list(self._cut)}


def trainer_of(config: TrainConfig) -> type[Trainer]:
    """The kind of worker that the flags describe."""
    return Trainer if config.pipeline.stages == 1 else StageTrainer


class LossLine:
    """Brings the last stage's losses to the first one."""

    def __init__(self, row: Group) -> None:
        self._wire = Wire(row, name="losses")
        self._sent: deque[Flight] = deque()

    def pass_on(self, loss: torch.Tensor | None) -> float:
        """After every update: its loss, on the first stage and the last; NaN in between."""
        last = self._wire.size - 1
        if self._wire.rank == 0:
            return float(self._wire.recv(torch.empty(1), last).wait())
        if loss is None:
            return math.nan
        while self._sent and self._sent[0].arrived:
            self._sent.popleft().wait()
        self._sent.append(self._wire.send(loss.detach().float().cpu().view(1), 0))
        return float(loss)
