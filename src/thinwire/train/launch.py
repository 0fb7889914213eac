"""`thinwire train`: worker, launcher of workers, or both in one process.

Under torchrun (or our own launcher) this process is a worker. Alone with one worker it is that
worker. Otherwise it starts the workers - in the lab if asked to, on loopback if not - each with the
same command line, and shows what they write.

Exit codes: 0 when all steps are done; 128 + the signal (130 or 143) when the run was asked to stop
and wrote a checkpoint; 2 for bad input; 3 where a file could not be written; 1, or 128 + the signal
that killed a worker, for a failure.
"""

import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import thinwire
from thinwire.errors import UsageError
from thinwire.lab.job import Outcome, Patience
from thinwire.lab.network import Lab
from thinwire.lab.output import KEPT, Line
from thinwire.report.live import Display
from thinwire.report.table import print_checks, print_summary
from thinwire.train import run_directory
from thinwire.train.checkpoints import checkpoint
from thinwire.train.config import TrainConfig, parse
from thinwire.train.loop.metrics import MetricsTail, metrics_file
from thinwire.train.preflight import preflight
from thinwire.train.worker import run_worker

# Not `-m thinwire`: that would let a random.py in the working directory stand in for Python's own.
_ENTRY = (
    "import sys; sys.path.pop(0); sys.path.append({root!r}); "
    "from thinwire.cli import main; sys.exit(main())"
)
_ERROR = "thinwire: "  # what cli.py begins its one line with
# Long enough for two periods of slow steps and a large checkpoint; a second Ctrl-C ends it at once.
_PATIENCE = Patience(interrupt=600.0)


def train(argv: Sequence[str]) -> int:
    config = parse(argv)
    if "RANK" in os.environ:
        return _worker(config)
    if config.place.workers == 1 and not config.place.lab:
        return _alone(config)
    return _Launcher(config, list(argv)).run()


def _worker(config: TrainConfig) -> int:
    if run_directory.LAUNCHED in os.environ:  # the launcher has the terminal and the exit code
        run_worker(config)
        return 0
    _refuse_other_launcher(config)
    if os.environ["RANK"] == "0":
        return _alone(config)
    return _exit_code(run_worker(config)[1])


def _refuse_other_launcher(config: TrainConfig) -> None:
    size = os.environ.get("WORLD_SIZE", "1")
    if config.place.workers not in (1, int(size)):
        raise UsageError(
            f"--workers {config.place.workers} starts workers, but torchrun has started "
            f"{size}: leave it out"
        )
    if config.place.lab:
        raise UsageError("--lab starts workers, but RANK says they have been: leave it out")


def _alone(config: TrainConfig) -> int:
    with Display(config.loop.steps, config.method) as display:
        run, summary = run_worker(config, display)
    return _report(run, summary)


class _Launcher:
    """Starts the workers and stays until the last of them has ended."""

    def __init__(self, config: TrainConfig, argv: list[str]) -> None:
        self._config = config
        self._run = run_directory.choose(config)
        root = str(Path(str(thinwire.__file__)).parents[1])
        self._command = [sys.executable, "-c", _ENTRY.format(root=root)]
        self._command += ["train", *argv, "--run-dir", str(self._run)]
        self._errors: dict[str, str] = {}  # the one line of each worker that has refused or failed
        self._shown: deque[str] = deque(maxlen=KEPT)

    def run(self) -> int:
        config, run = self._config, self._run
        preflight(config, run)
        done = _check_parts(run) if config.loop.resume else 0
        link = config.network.link() if config.place.lab else None
        overrides = config.network.overrides(config.place.workers) if config.place.lab else {}
        with Lab(config.place.workers, link, overrides=overrides, seed=config.loop.seed) as lab:
            if link is not None:
                print_checks(lab.check())
            lock = run_directory.Lock(run)
            try:
                run_directory.forget_summary(run)
                with Display(config.loop.steps, config.method) as display:
                    outcome = self._watch(lab, display, done)
            finally:
                lock.release()
        return self._end(outcome)

    def _watch(self, lab: Lab, display: Display, done: int) -> Outcome:
        tail = MetricsTail(metrics_file(self._run, 0), after=done)

        def show(line: Line) -> None:
            if line.error and line.text.startswith(_ERROR):
                self._errors[line.label] = line.text
            else:
                self._shown.append(str(line))
                display.print(str(line), error=line.error)

        def tick() -> None:
            for record in tail.read():
                display.update(record)

        job = lab.start(self._command, env={run_directory.LAUNCHED: "1"}, sink=show)
        outcome = job.wait(tick, patience=_PATIENCE)
        tick()
        return outcome

    def _end(self, outcome: Outcome) -> int:
        summary = run_directory.read_summary(self._run)
        if summary is not None and outcome.failed is None:
            return _report(self._run, summary)
        print(self._reason(outcome), file=sys.stderr, flush=True)
        if outcome.code != 2:
            print(_ways_on(self._run), file=sys.stderr, flush=True)
        return outcome.code or 1

    def _reason(self, outcome: Outcome) -> str:
        if outcome.failed is None:
            return outcome.reason or "the workers ended without a summary"
        label = outcome.failed.label
        if outcome.code <= 128 and label in self._errors:
            # A worker that has lost a peer is not to blame itself: its words tell who is.
            return self._errors[label]
        traceback = any("Traceback" in line for line in outcome.tail)
        tail = [f"{label} | {line}" for line in outcome.tail]
        fresh = traceback and list(self._shown)[-len(tail) :] != tail
        return str(outcome) if fresh else outcome.reason


def _check_parts(run: Path) -> int:
    """Reads every part of the checkpoint once, so that a damaged one is refused here and not by a
    worker; returns its step."""
    manifest = checkpoint.read_manifest(run)
    for replica in range(manifest.replicas):
        checkpoint.load(manifest.path, replica=replica, keys=())
    return manifest.step


def _report(run: Path, summary: dict[str, Any]) -> int:
    print_summary(summary)
    if summary["stopped_by"]:
        print(f"stopped by {summary['stopped_by']} after step {summary['step']}; {_ways_on(run)}")
    else:
        print(f"the run is in {run}")
    return _exit_code(summary)


def _ways_on(run: Path) -> str:
    try:
        found = checkpoint.latest(run)
    except UsageError as error:
        return str(error)
    if found is None:
        return f"no checkpoint has been written to {run}"
    if "RANK" in os.environ and run_directory.LAUNCHED not in os.environ:
        return f"continue with: the same command on all machines, --run-dir {run} --resume added"
    return f"continue with: thinwire train --run-dir {run} --resume"


def _exit_code(summary: dict[str, Any]) -> int:
    name = summary["stopped_by"]
    return 128 + signal.Signals[name] if name else 0
