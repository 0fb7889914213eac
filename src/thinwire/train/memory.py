"""Memory: the least that a run needs and the most that there is, before any of it is taken.

The need is a lower bound - weights, gradients, the optimizer's state, and what the layers put out
in one pass - so that nothing is refused that could have run. The layers are run on torch's meta
device, which has shapes and no memory.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.train.available import ENDLESS, available
from thinwire.train.config import TrainConfig
from thinwire.train.tasks.task import Task

_PER_TOKEN = 32  # bytes of a batch's inputs and targets as int64, read and handed over


def require_memory(
    config: TrainConfig,
    task: Task,
    model: nn.Module,
    copies: float,
    *,
    workers: int,
    methods: int = 1,
) -> None:
    """Refuses a run whose `workers` on this machine cannot fit its memory; `copies` of the weights
    is what the optimizer keeps."""
    there = _of_devices() if torch.cuda.is_available() else available()
    state, passing = needed(config, task, model, copies)
    state *= methods
    if there is not None and workers * (state + passing) > there:
        raise too_large(config, state, passing, workers, there)


def too_large(
    config: TrainConfig, state: int, passing: int, workers: int, there: int
) -> UsageError:
    flag, value = "--model", config.model.model
    if passing > state:
        flag, value = "--batch", str(config.data.batch)
    by = f" on each of {workers} workers" if workers > 1 else ""
    return UsageError(
        f"{flag} {value} takes at least {_spoken(state)} for weights, gradients and optimizer and "
        f"{_spoken(passing)} for a batch{by}, but this machine has {_spoken(there)} of memory "
        f"free: lower {flag}{' or --workers' if workers > 1 else ''}, or use a larger machine"
    )


def needed(config: TrainConfig, task: Task, model: nn.Module, copies: float) -> tuple[int, int]:
    """Bytes a worker holds throughout, and those of one pass beside them."""
    members = config.pipeline.stages * config.model.shards
    weights = sum(_nbytes(tensor) for tensor in model.parameters())
    state = weights * (2 + copies) / members
    passing = _outputs(task, model) / config.pipeline.stages
    return int(state), int(passing / 2 if config.loop.bf16 else passing)


def _outputs(task: Task, model: nn.Module) -> int:
    """Bytes of what the layers put out in a forward pass, which the backward pass needs."""
    total = 0

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal total
        total += _nbytes(output) if isinstance(output, Tensor) else 0

    try:
        with torch.device("meta"), _hooked(model, count):
            x, _ = task.blank()
            model.forward(x)  # not called: it may be one that is compiled then
    except (RuntimeError, OverflowError) as error:
        if "overflow" not in str(error):
            raise
        return ENDLESS  # more values than torch counts
    if model.training and getattr(model, "checkpoint_activations", False):
        total //= 8  # of a block little more than its input is kept
    return total // 2 + _PER_TOKEN * x.numel()  # some layers keep their input and no output


@contextmanager
def _hooked(model: nn.Module, hook: Any) -> Iterator[None]:
    leaves = [module for module in model.modules() if not list(module.children())]
    handles = [module.register_forward_hook(hook) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _of_devices() -> int:
    """What is free on all accelerators together: there the weights go."""
    return sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))


def workers_here(config: TrainConfig) -> int:
    """Workers of this run on this machine."""
    if "RANK" not in os.environ:
        return config.place.workers
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(local) if local.isdigit() else 1


def _spoken(count: float) -> str:
    if count >= ENDLESS:
        return "more than anybody has"
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
