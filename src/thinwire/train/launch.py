"""`thinwire train`: worker, launcher of workers, or both in one process.

Under torchrun (or our own launcher) this process is a worker. Alone with one worker it is that
worker. Otherwise it starts the workers - in the lab if asked to, on loopback if not - each with the
same command line, and shows what they write.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from thinwire.lab.network import Lab
from thinwire.lab.output import Line
from thinwire.report.live import Display
from thinwire.report.table import print_checks, print_summary
from thinwire.train import run_directory
from thinwire.train.config import TrainConfig, parse
from thinwire.train.loop import preflight
from thinwire.train.metrics import MetricsTail, metrics_file
from thinwire.train.worker import run_worker


def train(argv: Sequence[str]) -> int:
    config = parse(argv)
    if "RANK" in os.environ:
        return _worker(config)
    if config.place.workers == 1 and not config.place.lab:
        return _alone(config)
    return _launch(config, list(argv))


def _worker(config: TrainConfig) -> int:
    quiet = run_directory.LAUNCHED in os.environ  # the launcher has the terminal
    leader = os.environ["RANK"] == "0" and not quiet
    if not leader:
        run_worker(config)
        return 0
    with Display(config.loop.steps, config.method) as display:
        run = run_worker(config, display)
    return _report(run)


def _alone(config: TrainConfig) -> int:
    with Display(config.loop.steps, config.method) as display:
        run = run_worker(config, display)
    return _report(run)


def _launch(config: TrainConfig, argv: list[str]) -> int:
    run = run_directory.choose(config)
    preflight(config, run)
    link = config.network.link() if config.place.lab else None
    overrides = config.network.overrides(config.place.workers) if config.place.lab else {}
    with Lab(config.place.workers, link, overrides=overrides, seed=config.loop.seed) as lab:
        if link is not None:
            print_checks(lab.check())
        lock = run_directory.Lock(run)
        tail = MetricsTail(metrics_file(run, 0))
        (run / "summary.json").unlink(missing_ok=True)
        with Display(config.loop.steps, config.method) as display:

            def show(line: Line) -> None:
                display.print(str(line))

            def tick() -> None:
                for record in tail.read():
                    display.update(record)

            command = [sys.executable, "-m", "thinwire", "train", *argv, "--run", str(run)]
            outcome = lab.start(command, sink=show).wait(tick)
            tick()
        lock.release()
    if outcome.code:
        print(outcome, file=sys.stderr, flush=True)
        return outcome.code
    return _report(run)


def _report(run: Path) -> int:
    summary = run_directory.read_summary(run)
    if summary is None:
        print(f"the run ended before its summary was written: see {run}", file=sys.stderr)
        return 1
    print_summary(summary)
    if summary["stopped"]:
        print(f"stopped after step {summary['step']}; continue with --run {run} --resume")
    else:
        print(f"the run is in {run}")
    return 0
