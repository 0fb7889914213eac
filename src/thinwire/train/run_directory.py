"""The directory of a run, and the rule that only one process group writes into it.

runs/ddp-20260105-101500/
  config.json        the settings, by flag name
  metrics/           one JSON-lines file per worker
  checkpoints/       see checkpoint.py
  summary.json       the closing figures, once it has ended
"""

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from thinwire.errors import UsageError
from thinwire.train import checkpoint
from thinwire.train.config import CONFIG, TrainConfig, flat_values
from thinwire.train.metrics import json_able

LAUNCHED = "THINWIRE_TRAIN_LAUNCHED"  # set by the launcher of train, which then holds the lock
_LOCK = ".lock"
_SUMMARY = "summary.json"


def choose(config: TrainConfig) -> Path:
    """The directory named by --run, or a new name under runs/."""
    if config.loop.run:
        return Path(config.loop.run)
    return Path("runs") / f"{config.method}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def check(config: TrainConfig, run: Path) -> None:
    """Refuses, before anything is written, a directory that this run may not use."""
    if run.exists() and not run.is_dir():
        raise UsageError(f"--run {run} is a file, not a directory")
    if (run / _LOCK).exists() and LAUNCHED not in os.environ:
        Lock(run, shared=True).release()  # all ranks look at once, and none of them is in the way
    if config.loop.resume:
        _require_steps_left(config, checkpoint.read_manifest(run).step, run)
    elif (run / CONFIG).exists():
        advice = "continue it with --resume" if checkpoint.latest(run) else "remove it"
        raise UsageError(f"{run} already holds a run: {advice}, or name another with --run")
    require_writable(run)


def _require_steps_left(config: TrainConfig, done: int, run: Path) -> None:
    if done >= config.loop.steps:
        raise UsageError(
            f"the run in {run} has done {done} steps and --steps is {config.loop.steps}: "
            "there is nothing left to do; raise --steps to train on"
        )


def require_writable(run: Path) -> None:
    place = run.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"--run {run} cannot be made: {place} is a file, not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--run {run} cannot be written: no permission in {place}")


class Lock:
    """Held by the launcher, or by the first worker where nobody launched it; ends with it."""

    def __init__(self, run: Path, *, shared: bool = False) -> None:
        self._made = [path for path in (run, *run.parents) if not path.exists()]
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = (run / _LOCK).open("w")
        except OSError as error:
            raise UsageError(f"--run {run} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UsageError(
                f"{run} is in use by another run: wait for it, or name another with --run"
            ) from None

    def release(self) -> None:
        """Also takes away what it made, where nothing else was written."""
        if self._made and os.listdir(self._made[0]) == [_LOCK]:
            (self._made[0] / _LOCK).unlink()
            with suppress(OSError):  # somebody else has put something beside it
                for path in self._made:
                    path.rmdir()
        self._file.close()


def write_config(run: Path, config: TrainConfig) -> None:
    _write(run / CONFIG, flat_values(config))


def write_summary(run: Path, summary: dict[str, Any]) -> None:
    _write(run / _SUMMARY, {name: json_able(value) for name, value in summary.items()})


def forget_summary(run: Path) -> None:
    """A run that goes on has not ended."""
    (run / _SUMMARY).unlink(missing_ok=True)


def read_summary(run: Path) -> dict[str, Any] | None:
    path = run / _SUMMARY
    return json.loads(path.read_text()) if path.exists() else None


def _write(path: Path, content: dict[str, Any]) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(content, indent=2) + "\n")
    aside.replace(path)
