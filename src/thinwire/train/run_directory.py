"""The directory of a run, and the rule that only one process group writes into it.

runs/ddp-20260105-101500/
  config.json        the settings, by flag name
  metrics/           one JSON-lines file per worker
  checkpoints/       see checkpoint.py
  summary.json       the closing figures
"""

import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO, Any

from thinwire.errors import UsageError
from thinwire.train import checkpoint
from thinwire.train.config import TrainConfig, flat_values

LAUNCHED = "THINWIRE_LAUNCHED"  # set by the launcher, which then holds the lock


def choose(config: TrainConfig) -> Path:
    """The directory named by --run, or a new name under runs/."""
    if config.loop.run:
        return Path(config.loop.run)
    return Path("runs") / f"{config.method}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def check(config: TrainConfig, run: Path) -> None:
    """Refuses, before anything is written, a directory that this run may not use."""
    if run.exists() and not run.is_dir():
        raise UsageError(f"--run {run} is a file, not a directory")
    used = (run / "config.json").exists()
    if config.loop.resume:
        checkpoint.read_manifest(run)
    elif used:
        raise UsageError(
            f"{run} already holds a run: continue it with --resume, or name another with --run"
        )


class Lock:
    """Held by the launcher, or by the first worker where nobody launched it; ends with it."""

    def __init__(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (run / ".lock").open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UsageError(
                f"{run} is in use by another run: wait for it, or name another"
            ) from None

    def release(self) -> None:
        self._file.close()


def write_config(run: Path, config: TrainConfig) -> None:
    (run / "config.json").write_text(json.dumps(flat_values(config), indent=2) + "\n")


def write_summary(run: Path, summary: dict[str, Any]) -> None:
    aside = run / "summary.json.tmp"
    aside.write_text(json.dumps(summary, indent=2) + "\n")
    aside.replace(run / "summary.json")


def read_summary(run: Path) -> dict[str, Any] | None:
    path = run / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None
