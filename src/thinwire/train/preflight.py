"""What is looked at before a worker is started, a file is written or a checkpoint is used."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import UsageError
from thinwire.train import run_directory
from thinwire.train.checkpoints import checkpoint
from thinwire.train.config import TrainConfig
from thinwire.train.loop.metrics import require_tensorboard
from thinwire.train.loop.optimizers import try_optimizer
from thinwire.train.loop.pipelining import cut_model
from thinwire.train.memory import require_memory, workers_here
from thinwire.train.tasks.models import Stack
from thinwire.train.tasks.registry import find_task
from thinwire.train.tasks.task import Task


def preflight(config: TrainConfig, run: Path) -> Task:
    """Everything that can be refused before a worker is started or a file is written."""
    run_directory.check(config, run)
    if config.loop.tensorboard:
        require_tensorboard()
    task, model = preflight_parts(config)
    if config.loop.resume:
        meta = checkpoint.read_manifest(run).meta
        check_resumed(meta, identity(config, task, model), model, run)
    return task


def preflight_parts(config: TrainConfig, *, methods: int = 1) -> tuple[Task, Stack]:
    """What can be refused of the optimizer, the data and the model; the model has no weights. A
    worker holds so many `methods` at once."""
    copies = try_optimizer(config.optimizer, config.loop.steps)
    task = find_task(config)
    with torch.device("meta"):
        model = task.build_model()
    if config.pipeline.stages > 1:
        cut_model(model, config.pipeline)
    if run_directory.LAUNCHED not in os.environ:  # the launcher has looked, before it took any
        count = workers_here(config)
        require_memory(config, task, model, copies, workers=count, methods=methods)
    return task, model


def identity(config: TrainConfig, task: Task, model: Stack) -> dict[str, Any]:
    """What makes a checkpoint one of this run and no other."""
    return {**task.identity(model), "settings": config.kept()}


def check_resumed(meta: Mapping[str, Any], now: Mapping[str, Any], model: Stack, run: Path) -> None:
    """Refuses a checkpoint that this run would not continue, naming the difference."""
    checkpoint.check_model(meta, model, now["model"])
    saved = meta.get("settings", {})
    if not isinstance(saved, dict):
        raise UsageError(f"the checkpoint in {run} does not say what settings it was made with")
    for name in [*now["settings"], *saved]:
        before, after = saved.get(name), now["settings"].get(name)
        if before != after:
            flag = name.replace("_", "-")
            raise UsageError(
                f"the run in {run} was made with --{flag} {before}, this one has --{flag} {after}; "
                "use the same, or start a new run"
            )
    if meta.get("corpus") != now["corpus"]:
        raise UsageError(
            f"the run in {run} has read other data (--data {meta.get('data')!s:.200}) than this "
            f"one would (--data {now['data']}), or the files have changed; use the same, or start "
            "a new run"
        )


def cut_of(meta: Mapping[str, Any], stages: int) -> tuple[int, ...]:
    """Where the run's stages begin, as its checkpoint says."""
    cut = meta.get("cut")
    if not isinstance(cut, list) or len(cut) != stages - 1 or {type(n) for n in cut} - {int}:
        raise UsageError(
            f"the checkpoint does not say where its {stages} stages were cut, but {cut!r:.40}: "
            "use another one"
        )
    return tuple(cut)


def position_of(shared: Mapping[str, Any]) -> int:
    """How far the data has been read."""
    position = shared["position"]
    if type(position) is not int or not 0 <= position < 2**62:
        raise ValueError(f"position {position!r:.40} in the data")
    return position
