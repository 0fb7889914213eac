"""What one worker process does: join the others, agree with them, train, report."""

import os
from pathlib import Path

from thinwire.report.live import Display
from thinwire.train import run_directory
from thinwire.train.config import TrainConfig
from thinwire.train.loop import Trainer, preflight
from thinwire.train.metrics import MetricsWriter, tensorboard_listener
from thinwire.wire import world as world_module
from thinwire.wire.agreement import require_same
from thinwire.wire.wire import Wire


def run_worker(config: TrainConfig, display: Display | None = None) -> Path:
    """Returns the run's directory; its summary is written there."""
    world = world_module.init(timeout=config.place.timeout)
    control = Wire(name="control")
    run = Path(os.fsdecode(control.gather_bytes(os.fsencode(run_directory.choose(config)))[0]))
    corpus = preflight(config, run)
    control.barrier()  # nobody writes before everybody has looked
    require_same(control, config.shared() | {"corpus": corpus.digest})
    leader = world.rank == 0
    lock = None
    if leader:
        lock = run_directory.Lock(run) if run_directory.LAUNCHED not in os.environ else None
        run.mkdir(parents=True, exist_ok=True)
        run_directory.write_config(run, config)
    control.barrier()
    trainer = Trainer(config, world, control, corpus, run)
    trainer.prime()
    if config.loop.resume:
        trainer.resume()
    metrics = MetricsWriter(
        run, world.rank, resume_step=trainer.step if config.loop.resume else None
    )
    if leader and display is not None:
        metrics.also.append(display.update)
    if leader and config.loop.tensorboard:
        metrics.also.append(tensorboard_listener(run))
    trainer.stop_on_signals()
    summary = trainer.train(metrics)
    if leader:
        run_directory.write_summary(run, summary)
    metrics.close()
    control.barrier()
    if lock is not None:
        lock.release()
    world_module.shutdown()
    return run
