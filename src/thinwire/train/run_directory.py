"""The directory of a run, and the rule that only one process group writes into it.

runs/ddp-20260105-101500/
  config.json        the settings, by flag name
  metrics/           one JSON-lines file per worker
  checkpoints/       see checkpoint.py
  summary.json       the closing figures, once it has ended
"""

import errno
import fcntl
import json
import os
import re
import stat
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError, UsageError
from thinwire.files import (
    FULL,
    MOST_SETTINGS,
    load_json,
    read_bytes,
    storage_error,
    write_whole,
    writing,
)
from thinwire.train.checkpoints import checkpoint
from thinwire.train.config import CONFIG, TrainConfig, flat_values, with_checksum
from thinwire.train.loop.metrics import json_able

LAUNCHED = "THINWIRE_TRAIN_LAUNCHED"  # set by the launcher of train, which then holds the lock
_LOCK = ".lock"
_SUMMARY = "summary.json"
_FILES = (_LOCK, CONFIG, _SUMMARY)
_FOLDERS = ("metrics", "checkpoints", "tensorboard")
_NAME = re.compile(r"[a-z0-9-]{1,100}")  # of a directory that was not named by anybody


def choose(config: TrainConfig) -> Path:
    """The directory named by --run-dir, or a new name under runs/."""
    if config.loop.run_dir:
        return Path(config.loop.run_dir)
    return Path("runs") / f"{config.method}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def agreed(config: TrainConfig, leader: str) -> Path:
    """This rank's directory, where the first rank's has the last name `leader`.

    Another machine never chooses a path on this one: a directory that was named is the one named
    here, and of one that was not only the name below runs/ is taken over.
    """
    if config.loop.run_dir:
        return Path(config.loop.run_dir)
    if not _NAME.fullmatch(leader) or not leader.startswith(f"{config.method}-"):
        raise UsageError(
            f"the first rank has chosen the directory runs/{leader!r:.120}, which is no name of a "
            f"run of {config.method}: name one with --run-dir, the same on all ranks"
        )
    return Path("runs") / leader


def check(config: TrainConfig, run: Path) -> None:
    """Refuses, before anything is written, a directory that this run may not use."""
    try:
        _check(config, run)
    except OSError as error:  # a name that is too long, a directory that may not be looked into
        raise UsageError(f"--run-dir {str(run)[:100]}: {error.strerror}") from None


def _check(config: TrainConfig, run: Path) -> None:
    if run.exists() and not run.is_dir():
        raise UsageError(f"--run-dir {run} is a file, not a directory")
    _refuse_odd_entries(run)
    if (run / _LOCK).exists() and LAUNCHED not in os.environ:
        Lock(run, shared=True).release()  # all ranks look at once, and none of them is in the way
    if config.loop.resume:
        _require_steps_left(config, checkpoint.read_manifest(run).step, run)
    elif (run / CONFIG).exists():
        advice = "continue it with --resume" if checkpoint.latest(run) else "remove it"
        raise UsageError(f"{run} already holds a run: {advice}, or name another with --run-dir")
    require_writable(run)


def _refuse_odd_entries(run: Path) -> None:
    """A directory from somebody else may lead what is written into it elsewhere."""
    for names, wanted, what in (
        (_FILES, stat.S_ISREG, "a plain file"),
        (_FOLDERS, stat.S_ISDIR, "a directory"),
    ):
        for name in names:
            with suppress(FileNotFoundError, NotADirectoryError):
                mode = (run / name).lstat().st_mode
                if not wanted(mode):
                    link = "a symbolic link" if stat.S_ISLNK(mode) else "something else"
                    raise UsageError(
                        f"{run / name} should be {what} of the run and is {link}: remove it, or "
                        "name another directory with --run-dir"
                    )


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
        raise UsageError(f"--run-dir {run} cannot be made: {place} is a file, not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--run-dir {run} cannot be written: no permission in {place}")


class Lock:
    """Held by the launcher, or by the first worker where nobody launched it; ends with it."""

    def __init__(self, run: Path, *, shared: bool = False) -> None:
        self._made = [path for path in (run, *run.parents) if not path.exists()]
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._file = _open_lock(run / _LOCK)
        except OSError as error:
            raise _unusable(run, error) from None
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UsageError(
                f"{run} is in use by another run: wait for it, or name another with --run-dir"
            ) from None

    def release(self) -> None:
        """Also takes away what it made, where nothing else was written."""
        with suppress(OSError):  # it is gone, or somebody else has put something beside it
            if self._made and os.listdir(self._made[0]) == [_LOCK]:
                (self._made[0] / _LOCK).unlink()
                for path in self._made:
                    path.rmdir()
        self._file.close()


def _open_lock(path: Path) -> FileIO:
    """Never through a link, nothing is cut off, and a pipe does not hold it up."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} there is no plain file")
    return FileIO(descriptor, "r+")


def _unusable(run: Path, error: OSError) -> ThinwireError:
    if error.errno in FULL:
        return storage_error(run / _LOCK, error)
    return UsageError(f"--run-dir {str(run)[:100]} cannot be written: {error.strerror}")


def write_config(run: Path, config: TrainConfig) -> None:
    _write(run / CONFIG, with_checksum(flat_values(config)))


def write_summary(run: Path, summary: dict[str, Any]) -> None:
    _write(run / _SUMMARY, {name: json_able(value) for name, value in summary.items()})


def forget_summary(run: Path) -> None:
    """A run that goes on has not ended."""
    with writing(run / _SUMMARY):
        (run / _SUMMARY).unlink(missing_ok=True)


def read_summary(run: Path) -> dict[str, Any] | None:
    try:
        content = load_json(read_bytes(run / _SUMMARY, MOST_SETTINGS))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _write(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())
