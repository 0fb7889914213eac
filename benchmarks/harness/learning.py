"""The training loop that quality is measured with, and the validation loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from thinwire.methods.base import WireOptimizer
from thinwire.methods.dense.gradient_average import GradientAverage
from thinwire.train.data.corpus import Corpus
from thinwire.train.data.tokens import IGNORED, Batches, validation_batches
from thinwire.train.loop.optimizers import OptimizerConfig, learning_rate
from thinwire.train.methods.replica import Replica
from thinwire.wire import Wire, World, init, shutdown


@contextmanager
def joined(timeout: float = 120.0) -> Iterator[World]:
    """This process as one rank of the world, on one thread."""
    torch.set_num_threads(1)
    yield init(timeout=timeout)
    shutdown()


def train(
    model: torch.nn.Module,
    optimizer: WireOptimizer,
    batches: Batches,
    settings: OptimizerConfig,
    steps: int,
    averaged: Callable[[GradientAverage], None] = lambda optimizer: None,
) -> None:
    """So many steps with the trainer's schedule; `averaged` sees every mean of gradients."""
    for step in range(steps):
        set_learning_rate(optimizer, settings, step, steps)
        model(*batches.next()).backward()
        if isinstance(optimizer, GradientAverage):
            optimizer.average()
            averaged(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()


def set_learning_rate(
    optimizer: torch.optim.Optimizer, settings: OptimizerConfig, step: int, steps: int
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, step, steps)


def take_step(replica: Replica, batches: Batches, clip: float, accumulate: int = 1) -> float:
    """A step of a replica of the trainer over so many micro-batches; the gradient's norm."""
    for micro in range(accumulate):
        with replica.accumulating(last=micro == accumulate - 1):
            loss = replica.module(*batches.next())
            (loss if accumulate == 1 else loss / accumulate).backward()
    norm = replica.step(clip)
    replica.optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def validate(
    model: torch.nn.Module,
    corpus: Corpus,
    wire: Wire | None,
    *,
    context: int,
    windows: int,
    batch: int = 16,
    mask_vocab: int | None = None,
) -> float:
    """The mean loss over at most so many windows, which its ranks share out."""
    share = (0, 1) if wire is None else (wire.rank, wire.size)
    total = count = 0.0
    for x, y in validation_batches(
        corpus.validation, context, batch, *share, windows, mask_vocab=mask_vocab
    ):
        targets = float((y != IGNORED).sum())
        total, count = total + float(model(x, y)) * targets, count + targets
    if wire is not None:
        total, count = wire.agree([total, count], "sum")
    return total / count
