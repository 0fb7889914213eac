"""What one worker process does: join the others, agree with them, train, report."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from thinwire.errors import StorageError, ThinwireError, UsageError
from thinwire.report.live import Display
from thinwire.train import run_directory
from thinwire.train.config import TrainConfig
from thinwire.train.loop.metrics import MetricsWriter, tensorboard_listener
from thinwire.train.loop.stage_trainer import trainer_of
from thinwire.train.loop.stop_consensus import stop_on_signals
from thinwire.train.loop.trainer import Trainer
from thinwire.train.preflight import preflight
from thinwire.wire import world as world_module
from thinwire.wire.agreement import require_same
from thinwire.wire.wire import Wire

T = TypeVar("T")
_INPUT, _DISK = b"i", b"d"  # what a rank refuses for all: the first byte of what it says


def run_worker(config: TrainConfig, display: Display | None = None) -> tuple[Path, dict[str, Any]]:
    """Returns the run's directory and its summary, which the first worker has written there."""
    world = world_module.init(timeout=config.place.timeout)
    control = Wire(name="control")
    leader_says = control.gather_bytes(run_directory.choose(config).name.encode())[0]
    require_same(control, config.shared())
    run = run_directory.agreed(config, leader_says.decode("utf-8", "replace"))
    task = _together(control, lambda: preflight(config, run))
    require_same(control, {"corpus": task.digest})
    leader = world.rank == 0
    holds = leader and run_directory.LAUNCHED not in os.environ
    lock = _together(control, lambda: run_directory.Lock(run) if holds else None)
    try:
        summary = _train(config, trainer_of(config)(config, world, control, task, run), display)
    finally:
        if lock is not None:
            lock.release()
    world_module.shutdown()
    return run, summary


def _train(config: TrainConfig, trainer: Trainer, display: Display | None) -> dict[str, Any]:
    control, run, leader = trainer.control, trainer.run, trainer.world.rank == 0
    trainer.prime()
    if config.loop.resume:
        loaded = _together(control, trainer.read_checkpoint)
        _together(control, lambda: trainer.take_up(loaded))
    metrics = _together(control, lambda: _files(config, trainer, display if leader else None))
    if leader:
        trainer.notice = display.print if display is not None else print
    stop_on_signals(trainer.pulse, alone=trainer.world.size == 1)
    summary = trainer.train(metrics)
    if leader:
        run_directory.write_summary(run, summary)
    metrics.close()
    control.barrier()
    return summary


def _files(config: TrainConfig, trainer: Trainer, display: Display | None) -> MetricsWriter:
    """What a run writes before its first step."""
    rank, resumed = trainer.world.rank, config.loop.resume
    if rank == 0:
        run_directory.forget_summary(trainer.run)
        run_directory.write_config(trainer.run, config)
    metrics = MetricsWriter(trainer.run, rank, resume_step=trainer.step if resumed else None)
    if display is not None:
        metrics.also.append(display.update)
    if rank == 0 and config.loop.tensorboard:
        metrics.also.append(tensorboard_listener(trainer.run, trainer.step))
    return metrics


def _together(control: Wire, action: Callable[[], T]) -> T:
    """What is refused on one rank is refused on all of them, with the same words."""
    result: T
    problem: ThinwireError | None = None
    try:
        result = action()
    except (UsageError, StorageError) as error:
        problem = error
    mark = _DISK if isinstance(problem, StorageError) else _INPUT
    said = b"" if problem is None else mark + str(problem).encode("utf-8", "replace")
    for rank, text in enumerate(control.gather_bytes(said)):
        if text:
            kind = StorageError if text.startswith(_DISK) else UsageError
            raise problem or kind(f"worker {rank}: {text[1:].decode('utf-8', 'replace')}")
    return result
