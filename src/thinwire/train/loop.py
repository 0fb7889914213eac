"""Trainer: one worker of a run, from its settings to its last checkpoint."""

import math
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.train import checkpoint, run_directory
from thinwire.train.config import TrainConfig
from thinwire.train.corpus import Corpus, load_corpus
from thinwire.train.data import IGNORED, Batches, validation_batches
from thinwire.train.methods import Replica, find_method
from thinwire.train.metrics import MetricsWriter, Record
from thinwire.train.models import build_model, model_settings
from thinwire.train.optimizers import build_optimizer, schedule
from thinwire.train.pulse import Pulse
from thinwire.wire.account import Account
from thinwire.wire.wire import Wire
from thinwire.wire.world import World


class Trainer:
    """Builds everything a worker needs; `train()` runs it.

    The control wire carries what is not the method's: the pulse, sums of validation losses, the
    barriers of a checkpoint. It has an account of its own.
    """

    def __init__(
        self, config: TrainConfig, world: World, control: Wire, corpus: Corpus, run: Path
    ) -> None:
        self.config, self.world, self.control, self.run = config, world, control, run
        masked = config.model.objective == "masked"
        self._mask_vocab = corpus.vocab if masked else None
        self._corpus = corpus
        context, seed = config.data.context, config.loop.seed
        self.model = build_model(config.model, corpus.vocab, context, seed).to(world.device)
        inner = build_optimizer(config.optimizer, self.model)
        method = find_method(config.method)
        self.replica: Replica = method.build(self.model, inner, config.settings)
        self.scheduler = schedule(config.optimizer, self.replica.optimizer, config.loop.steps)
        self.batches = Batches(
            corpus.train,
            context,
            config.data.batch,
            world.rank,
            world.size,
            seed,
            mask_vocab=self._mask_vocab,
        )
        torch.manual_seed(seed * 1_000_003 + world.rank + 1)  # each replica's own randomness
        self.pulse = Pulse(control)
        self.step = 0
        self.seconds = 0.0  # spent training: evaluation and checkpoints are not counted
        self.val_loss = math.nan
        self.loss = math.nan

    @property
    def tokens(self) -> int:
        """Tokens trained on by all replicas together."""
        loop, data = self.config.loop, self.config.data
        return self.step * loop.accumulate * data.batch * data.context * self.world.size

    def train(self, metrics: MetricsWriter) -> dict[str, Any]:
        """Steps until the last one, or until all ranks agree to stop; returns the summary."""
        loop = self.config.loop
        stopped = False
        while self.step < loop.steps and not stopped:
            metrics.write(self._train_step())
            stopped = self.pulse.beat(self.step, self.loss)
            last = self.step == loop.steps
            if loop.eval_every and self.step % loop.eval_every == 0 and not last:
                metrics.write(self._evaluate())
            if loop.save_every and self.step % loop.save_every == 0 and not last:
                self.save()
        self.pulse.end()
        if not stopped:
            self.replica.finish()
            metrics.write(self._evaluate())
        self.save()
        return self._summary(stopped)

    def prime(self) -> None:
        """One forward and backward pass that trains nothing, before the clock starts.

        Everything that happens only once (compiling, DDP's choice of buckets, first connections)
        happens here, in a fresh run and in a resumed one alike: with DDP the order in which three
        or more ranks are summed depends on its buckets, and so do the last bits.
        """
        data = self.config.data
        tokens = torch.zeros(data.batch, data.context, dtype=torch.int64, device=self.world.device)
        self._loss(tokens, tokens).backward()
        self.replica.optimizer.zero_grad(set_to_none=True)
        self.replica.account.restore(Account().snapshot())

    def save(self) -> None:
        shared, private = self.replica.state()
        private |= {
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "account": self.replica.account.snapshot(),
        }
        shared |= {
            "scheduler": self.scheduler.state_dict(),
            "position": self.batches.position,
            "seconds": self.seconds,
        }
        # Schedulers hold their lambda; it is made anew from the settings.
        shared["scheduler"].pop("lr_lambdas", None)
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
        )

    def resume(self) -> None:
        loaded = checkpoint.load(self.run, replica=self.world.rank)
        meta = self._meta()
        checkpoint.check_model(loaded.meta, self.model, meta["model"])
        for name in ("method", "data"):
            if loaded.meta.get(name) != meta[name]:
                raise UsageError(
                    f"the checkpoint in {self.run} was made with --{name} {loaded.meta.get(name)}, "
                    f"this run has --{name} {meta[name]}; use the same, or start a new run"
                )
        same = loaded.replicas == self.world.size
        shared, private = loaded.shared, loaded.private
        self.replica.load_state(shared, private, same_replicas=same)
        self.scheduler.load_state_dict({**shared["scheduler"], "lr_lambdas": [None]})
        self.batches.position = shared["position"]
        self.seconds = shared["seconds"]
        self.replica.account.restore(private["account"])
        self.step = loaded.step
        if same:
            torch.set_rng_state(private["rng"])
            for index, state in enumerate(private["cuda_rng"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, index)

    def stop_on_signals(self) -> None:
        """SIGTERM and Ctrl-C end the run at a step all ranks agree on, with a checkpoint."""

        def ask(signum: int, frame: FrameType | None) -> None:
            self.pulse.stop_asked = True
            signal.signal(signum, signal.default_int_handler)  # a second one ends it at once

        signal.signal(signal.SIGTERM, ask)
        signal.signal(signal.SIGINT, ask)

    def _train_step(self) -> Record:
        start = time.perf_counter()
        count = self.config.loop.accumulate
        losses = []
        for micro in range(count):
            x, y = (t.to(self.world.device) for t in self.batches.next())
            with self.replica.accumulating(last=micro == count - 1):
                loss = self._loss(x, y)
                (loss / count).backward()
            losses.append(float(loss.detach()))
        norm = self.replica.step(self.config.optimizer.clip)
        lr = self.replica.optimizer.param_groups[0]["lr"]
        self.replica.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.step += 1
        self.loss = sum(losses) / count
        taken = time.perf_counter() - start
        self.seconds += taken
        if self.world.heartbeat is not None:
            self.world.heartbeat.note = f"step {self.step}"
        return self._record("step", taken) | {"loss": self.loss, "lr": lr, "grad_norm": norm}

    def _record(self, kind: str, taken: float) -> Record:
        totals = self.replica.account.snapshot()
        names = ("bytes", "exposed", "hidden", "lag", "skipped")
        return {
            "kind": kind,
            "step": self.step,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / self.step / taken,
            "seconds": self.seconds,
            **{name: totals[name] for name in names},
        }

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self._autocast():
            loss: Tensor = self.replica.module(x, y)
        return loss

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.config.loop.bf16:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16)

    @torch.no_grad()
    def _evaluate(self) -> Record:
        """The mean loss over the validation windows, each replica having read its share."""
        config = self.config
        total = count = 0.0
        self.model.eval()
        with self.replica.consensus(), self._autocast():
            for x, y in validation_batches(
                self._corpus.validation,
                config.data.context,
                config.data.batch,
                self.world.rank,
                self.world.size,
                config.loop.eval_windows,
                mask_vocab=self._mask_vocab,
            ):
                targets = float((y != IGNORED).sum())
                loss = self.model(x.to(self.world.device), y.to(self.world.device))
                total, count = total + float(loss) * targets, count + targets
        self.model.train()
        total, count = self.control.agree([total, count], "sum")
        self.val_loss = total / count
        return {"kind": "eval", "step": self.step, "tokens": self.tokens} | {
            "val_loss": self.val_loss,
            "seconds": self.seconds,
        }

    def _summary(self, stopped: bool) -> dict[str, Any]:
        account = self.replica.account
        rate = self.tokens / self.seconds
        slowest = -self.control.agree([-rate])[0]
        loss, total = self.control.agree([self.loss, account.bytes], "sum")
        exposed, hidden = self.control.agree([account.exposed, account.hidden], "max")
        return {
            "method": self.config.method,
            "workers": self.world.size,
            "step": self.step,
            "stopped": stopped,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": slowest,
            "bytes": total,
            "bytes_per_token": total / self.tokens,
            "exposed": exposed,
            "hidden": hidden,
            "skipped": account.skipped,
            "loss": loss / self.world.size,
            "val_loss": None if math.isnan(self.val_loss) else self.val_loss,
        }

    def _meta(self) -> dict[str, Any]:
        return {
            "method": self.config.method,
            "data": self.config.data.data,
            "model": model_settings(self.model, self.config.model.model),
            "parameters": checkpoint.describe_model(self.model),
            "objective": self.config.model.objective,
        }


def preflight(config: TrainConfig, run: Path) -> Corpus:
    """Everything that can be refused before a worker is started or a file is written."""
    run_directory.check(config, run)
    corpus = load_corpus(config.data)
    build_optimizer(config.optimizer, torch.nn.Linear(2, 2))
    with torch.device("meta"):
        model = build_model(config.model, corpus.vocab, config.data.context, config.loop.seed)
    if config.loop.resume:
        meta = checkpoint.read_manifest(run).meta
        checkpoint.check_model(meta, model, model_settings(model, config.model.model))
    return corpus
