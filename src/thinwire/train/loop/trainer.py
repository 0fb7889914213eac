"""Trainer: one worker of a run, from its settings to its last checkpoint."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ThinwireError, UsageError
from thinwire.extras import ConcurrentAdversarial
from thinwire.train.checkpoints import checkpoint
from thinwire.train.config import TrainConfig
from thinwire.train.data.order import Batches, Pair
from thinwire.train.loop.metrics import MetricsWriter, Record
from thinwire.train.loop.noise_meter import NoiseMeter, find_noise_meter
from thinwire.train.loop.optimizers import build_optimizer, learning_rate
from thinwire.train.loop.stop_consensus import PERIOD, StopConsensus
from thinwire.train.loop.summary import summary_of
from thinwire.train.methods.registry import find_method
from thinwire.train.methods.replica import Replica
from thinwire.train.methods.sharding import make_mesh, shard_model
from thinwire.train.preflight import check_resumed, identity, position_of
from thinwire.train.tasks.adversary import AnnouncedBatches
from thinwire.train.tasks.models import Stack
from thinwire.train.tasks.task import Task
from thinwire.wire.account import Account
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire
from thinwire.wire.world import World


class Trainer:
    """Builds everything a worker needs; `train()` runs it.

    The control wire carries what is not the method's: the pulse, sums of validation losses, the
    barriers of a checkpoint. It has an account of its own.
    """

    def __init__(
        self, config: TrainConfig, world: World, control: Wire, task: Task, run: Path
    ) -> None:
        self.config, self.world, self.control, self.run = config, world, control, run
        self.task = task
        self.whole: Stack = task.build_model().to(world.device)
        """The whole model, if only as a description of it."""
        self.model: nn.Module = self.whole
        """What of it is trained here."""
        group = self._lay_out()
        inner = build_optimizer(config.optimizer, self.model, config.loop.steps)
        method = find_method(config.method)
        self.replica: Replica = method.build(self.model, inner, self._settings(), group)
        self.replica.expect(config.loop.steps)
        self.readers = world.size // config.pipeline.stages
        """Workers that read different data."""
        self.batches: Batches = task.batches(world.rank // config.pipeline.stages, self.readers)
        self.adversary = self._build_adversary() if config.adversary.adversarial > 0 else None
        # Each replica's own randomness.
        torch.manual_seed((config.loop.seed * 1_000_003 + world.rank + 1) % 2**63)
        self.pulse = StopConsensus(control, max(PERIOD, method.slack(config.settings)))
        self.noise: NoiseMeter | None = find_noise_meter(config, task, self.replica, control)
        self.step = 0
        self.seconds = 0.0  # spent training: evaluation and checkpoints are not counted
        self.loss = self.norm = math.nan
        self.found: dict[str, float] = {}  # by the latest evaluation
        self._evaluated = self._saved = 0  # the steps at which that was done last
        self._acknowledged = False
        self._unproven = False  # whether no step has been taken with what a checkpoint held
        self.notice: Callable[[str], None] = lambda text: None
        """Where a line for the user goes."""

    def _lay_out(self) -> Group:
        """Spreads a replica over its workers, if it has several; the group of the replicas."""
        self.members = self.config.model.shards  # workers that hold one replica together
        if self.members == 1:
            return None
        mesh = make_mesh(self.world, self.members)
        shard_model(self.whole, mesh)
        return mesh["replica"]

    def _settings(self) -> Any:
        return self.config.settings

    def _build_adversary(self) -> ConcurrentAdversarial:
        settings = self.config.adversary
        adversary = ConcurrentAdversarial(
            self.replica.module,
            self.replica.optimizer,
            epsilon=settings.adversarial,
            weight=settings.adversarial_weight,
            bounds=(0.0, 1.0),
            loss=lambda module, x, y: module(x, y),
        )
        self.batches = AnnouncedBatches(self.batches, adversary, self.world.device)
        return adversary

    @property
    def trained(self) -> int:
        """Tokens or images trained on so far, by however many replicas there were."""
        return self.batches.position * self.task.units_per_sample

    def train(self, metrics: MetricsWriter) -> dict[str, Any]:
        """Steps until the last one, or until all ranks agree to stop; returns the summary."""
        signum, end = 0, self.config.loop.steps
        while self.step < end:
            if not signum:  # a run that was asked to stop does what is due once it is resumed
                self._between_steps(metrics)
            metrics.write(self._first_or_next_step())
            asked = self.pulse.beat(self.step, self.own_loss(), self.norm)
            if asked and not signum:
                signum, end = asked, self.earliest_stop()
            self._acknowledge(signum)
        self.pulse.end()
        stopped = self.step < self.config.loop.steps
        if not stopped:
            self.replica.finish()
            metrics.write(self.evaluate())
        self.save()
        return summary_of(self, signal.Signals(signum).name if stopped else None)

    def _first_or_next_step(self) -> Record:
        if not self._unproven:
            return self.train_step()
        self._unproven = False
        with self._fitting():
            return self.train_step()

    def earliest_stop(self) -> int:
        """The step after which a run that is asked to stop now can."""
        return self.step

    def own_loss(self) -> float:
        """The loss of the last step as far as this worker knows one, and a finite number if not."""
        return self.loss

    def _acknowledge(self, stopping: int) -> None:
        """Tells whoever has asked for it that the run will stop, where that takes a while."""
        if self.pulse.stop_asked and not self._acknowledged and not stopping:
            self.notice("stopping after the next few steps, with a checkpoint; Ctrl-C ends it now")
            self._acknowledged = True

    def _between_steps(self, metrics: MetricsWriter) -> None:
        """What is due at this step."""
        loop = self.config.loop
        if _due(self.step, loop.eval_every) and self._evaluated != self.step:
            metrics.write(self.evaluate())
        if _due(self.step, loop.save_every) and self._saved != self.step:
            self.save()

    def prime(self) -> None:
        """One forward and backward pass that trains nothing, before the clock starts.

        Everything that happens only once (compiling, DDP's choice of buckets, first connections)
        happens here, in a fresh run and in a resumed one alike: with DDP the order in which three
        or more ranks are summed depends on its buckets, and so do the last bits.
        """
        x, y = (t.to(self.world.device) for t in self.task.blank())
        before = [buffer.clone() for buffer in self.model.buffers()]
        with self.replica.accumulating(last=True):
            with self._autocast():
                adversary = self.adversary
                loss = self.replica.module(x, y) if adversary is None else adversary.both(x, x, y)
            loss.backward()
        for buffer, value in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(value)  # BatchNorm has counted the blank batch
        self.replica.optimizer.zero_grad(set_to_none=True)
        self._forget_traffic()
        if self.noise is not None:
            self.noise.begin()

    def accounts(self) -> list[Account]:
        """Of everything that is sent to train, the method's first."""
        return [self.replica.account]

    def _restore_traffic(self, snapshots: list[dict[str, float]]) -> None:
        for account, snapshot in zip(self.accounts(), snapshots, strict=True):
            account.restore(snapshot)

    def _forget_traffic(self) -> None:
        self._restore_traffic([Account().snapshot()] * len(self.accounts()))

    def save(self) -> None:
        shared, private = self.replica.state()
        if self.members > 1:  # what replicas have in common, each rank has its own part of
            shared, private = {}, private | shared
        private |= {
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "accounts": [account.snapshot() for account in self.accounts()],
            "noise": self.noise.state() if self.noise is not None else {},
            "adversary": None if self.adversary is None else self.adversary.state_dict(),
        }
        shared |= {
            "position": self.batches.position,
            "seconds": self.seconds,
            "evaluated": [self._evaluated, self.found],
        }
        checkpoint.save(
            self.run,
            self.step,
            shared=shared,
            private=private,
            replica=self.world.rank,
            replicas=self.world.size,
            meta=self._meta(),
            barrier=self.control.barrier,
            leader=self.world.rank == 0,
            keep=self.config.loop.keep,
            tell=self._tell,
            new=False,
        )
        self._saved = self.step

    def _tell(self, text: str) -> list[str]:
        said = self.control.gather_bytes(text.encode("utf-8", "replace"))
        return [line.decode("utf-8", "replace") for line in said]

    def resume(self) -> None:
        """Takes up the latest checkpoint; what does not fit this run is refused by name."""
        self.take_up(self.read_checkpoint())

    def read_checkpoint(self) -> checkpoint.Loaded:
        """The latest checkpoint, checked as far as one can without using it."""
        loaded = checkpoint.load(self.run, replica=self.world.rank)
        check_resumed(loaded.meta, self._meta(), self.whole, self.run)
        return loaded

    def take_up(self, loaded: checkpoint.Loaded) -> None:
        with self._fitting():
            self._take_up(loaded)
        self._unproven = True

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Around what uses a checkpoint's state: a checksum says that it is what was written, not
        that it is a state of ours."""
        try:
            yield
        except (ThinwireError, MemoryError, OSError):
            raise
        except Exception as error:
            if "memory" in str(error):  # of an accelerator, say: that is no fault of its own
                raise
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UsageError(
                f"the checkpoint {checkpoint.latest(self.run)} does not fit this run ({cause}); "
                f"use another one of {self.run / 'checkpoints'}, or start a new run"
            ) from error

    def _take_up(self, loaded: checkpoint.Loaded) -> None:
        same = loaded.replicas == self.world.size
        shared, private = loaded.shared, loaded.private
        common = private if self.members > 1 else shared
        self._restore_traffic(private["accounts"])  # flights that are taken up count from here
        self.replica.load_state(common, private, same_replicas=same)
        self._restore_traffic(private["accounts"])
        self.batches.position = position_of(shared)
        self.seconds = float(shared["seconds"])
        evaluated, found = shared["evaluated"]
        self._evaluated, self.found = int(evaluated), {str(k): float(v) for k, v in found.items()}
        if self.noise is not None and private["noise"]:
            self.noise.load_state(private["noise"])
        self.step = self._saved = loaded.step
        if same and self.adversary is not None:
            self.adversary.load_state_dict(private["adversary"])
        if same:
            torch.set_rng_state(private["rng"])
            for index, state in enumerate(private["cuda_rng"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, index)

    def train_step(self) -> Record:
        """One step of this replica; the record for the metrics."""
        start = time.perf_counter()
        count = self.config.loop.accumulate
        lr = self._set_learning_rate()  # before the backward pass, during which some methods use it
        losses = []
        for micro in range(count):
            x, y = (t.to(self.world.device) for t in self.batches.next())
            with self.replica.accumulating(last=micro == count - 1):
                loss = self._loss(x, y)
                (loss / count).backward()
            losses.append(float(loss.detach() if self.adversary is None else self.adversary.clean))
        self._apply()
        self.replica.optimizer.zero_grad(set_to_none=True)
        self.loss = sum(losses) / count
        figures = self.noise.figures() if self.noise is not None else {}
        taken = time.perf_counter() - start
        return self._stepped(taken) | {"lr": lr, "grad_norm": self.norm} | figures

    def _set_learning_rate(self) -> float:
        lr = learning_rate(self.config.optimizer, self.step, self.config.loop.steps)
        for group in self.replica.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _apply(self) -> None:
        """The step itself, once the gradients are there."""
        if self.noise is not None:
            self.noise.before_step()
        self.norm = self.replica.step(self.config.optimizer.clip)
        if self.adversary is not None:
            self.adversary.wait()  # a step that was skipped has not done so
        if self.noise is not None:
            self.noise.after_step(self.norm)

    def _stepped(self, taken: float) -> Record:
        """Counts a step that took so many seconds."""
        self.step += 1
        self.seconds += taken
        if self.world.heartbeat is not None:
            self.world.heartbeat.note = f"step {self.step}"
        totals = self.totals()
        samples = self.config.loop.accumulate * self.config.data.batch * self.readers
        unit = self.task.unit
        record = {
            "kind": "step",
            "step": self.step,
            "loss": self.loss,
            unit: self.trained,
            f"{unit}_per_s": samples * self.task.units_per_sample / taken,
            "seconds": self.seconds,
            **totals,
        }
        if self.adversary is not None:
            record["adversarial_loss"] = float(self.adversary.perturbed)
            record["adversary_exposed"] = self.adversary.exposed
            record["adversary_hidden"] = self.adversary.hidden
        return record

    def totals(self) -> dict[str, float]:
        """What this worker has sent and waited so far."""
        snapshots = [account.snapshot() for account in self.accounts()]
        names = ("bytes", "exposed", "hidden", "skipped")
        return {name: sum(s[name] for s in snapshots) for name in names} | {
            "lag": snapshots[0]["lag"]
        }

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self._autocast():
            loss: Tensor = (self.adversary.loss if self.adversary else self.replica.module)(x, y)
        return loss

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.config.loop.bf16:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16)

    @torch.no_grad()
    def evaluate(self) -> Record:
        """The task's measures over the validation samples, each replica having read its share."""
        names = self.task.measures
        totals = [0.0] * len(names)
        count = 0.0
        # The workers of a replica compute together.
        place = self.world.rank // self.members, self.world.size // self.members
        self.model.eval()
        with self.replica.consensus():
            for means, targets in self._judged(self.task.validation(*place)):
                totals = [total + mean * targets for total, mean in zip(totals, means, strict=True)]
                count += targets
        self.model.train()
        *totals, count = self.control.agree([*totals, count], "sum")
        self.found = dict(zip(names, (total / count for total in totals), strict=True))
        self._evaluated = self.step
        record: Record = {"kind": "eval", "step": self.step, self.task.unit: self.trained}
        return record | self.found | {"seconds": self.seconds}

    def _judged(self, batches: Iterator[Pair]) -> Iterator[tuple[list[float], float]]:
        """The means of the task's measures over each batch, and how many targets they are over."""
        device = self.world.device
        for x, y in batches:
            with self._autocast():
                output = self.model(x.to(device))
                judged = self.task.judge(self.whole, output, y.to(device))
            yield judged

    def _meta(self) -> dict[str, Any]:
        return {
            **identity(self.config, self.task, self.whole),
            "parameters": checkpoint.describe_model(self.whole),
            "shards": self.config.model.shards,
        }


def _due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
