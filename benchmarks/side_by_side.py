"""Methods timed side by side in one run, which is the only way to compare them on a noisy machine.

Every rank holds all contenders at once, each with its own copy of the model. A repetition gives
each contender its turn: some steps that are not timed, to reach the steady state (with a flight in
the air, where the method has any), then the timed ones, then a pause until its traffic has ended. A
contender's efficiency is its tokens/s over those of `none` in the same repetition.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from thinwire.optim import LocalUpdates
from thinwire.train.corpus import Corpus
from thinwire.train.data import Batches
from thinwire.train.methods import Replica
from thinwire.train.models import GPT, ModelConfig, build_model
from thinwire.train.optimizers import OptimizerConfig, build_optimizer
from thinwire.wire import World
from thinwire.wire.wire import Wire

Build = Callable[[GPT, torch.optim.Optimizer], Replica]


@dataclass
class Contender:
    name: str
    build: Build
    untimed: int
    timed: int
    seconds: list[float] = field(default_factory=list)
    """Per step, a figure for each repetition."""

    def prepare(self, model: str, corpus: Corpus, batch: int, context: int, world: World) -> None:
        network = build_model(ModelConfig(model=model), corpus.vocab, context, seed=0)
        self.replica = self.build(network, build_optimizer(OptimizerConfig(), network))
        self._batches = Batches(corpus.train, context, batch, world.rank, world.size, seed=0)

    def turn(self, control: Wire) -> None:
        for _ in range(self.untimed):
            self._step()
        control.barrier()
        start = time.perf_counter()
        for _ in range(self.timed):
            self._step()
        taken = (time.perf_counter() - start) / self.timed
        self.seconds.append(control.agree([taken])[0])  # the slowest rank's
        self._drain()
        control.barrier()

    def _step(self) -> None:
        with self.replica.accumulating(last=True):
            self.replica.module(*self._batches.next()).backward()
        self.replica.step(1.0)
        self.replica.optimizer.zero_grad(set_to_none=True)

    def _drain(self) -> None:
        optimizer = self.replica.optimizer
        if isinstance(optimizer, LocalUpdates):
            for fragment in optimizer.fragments:
                if fragment.flight is not None:
                    fragment.flight.wait()


def race(
    contenders: list[Contender],
    repetitions: int,
    *,
    model: str,
    corpus: Corpus,
    batch: int,
    context: int,
    world: World,
) -> dict[str, dict[str, float]]:
    """Milliseconds per step and efficiency against the contender named `none`, for each."""
    control = Wire(name="race")
    for contender in contenders:
        contender.prepare(model, corpus, batch, context, world)
    for _ in range(repetitions):
        for contender in contenders:
            contender.turn(control)
    alone = next(c for c in contenders if c.name == "none").seconds
    return {c.name: _figures(c.seconds, alone) for c in contenders}


def _figures(seconds: list[float], alone: list[float]) -> dict[str, float]:
    ratios = [a / s for a, s in zip(alone, seconds, strict=True)]
    return {
        "ms_per_step": round(1000 * statistics.median(seconds), 1),
        "efficiency": round(statistics.median(ratios), 4),
        "lowest": round(min(ratios), 4),
        "highest": round(max(ratios), 4),
    }
