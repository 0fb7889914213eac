"""Metrics: one JSON line per step and worker, and how they are read back while a run goes on.

    run/metrics/rank-0.jsonl
    {"kind": "step", "step": 12, "loss": 4.9, "tokens": 49152, "tokens_per_s": 21000, "bytes": ...}
    {"kind": "eval", "step": 50, "val_loss": 3.1, ...}

`tokens` and `tokens_per_s` are of all replicas together, and have the name of the task's unit
(`images`, `images_per_s`); `bytes`, `exposed`, `hidden`, `lag` and `skipped` are this worker's
totals so far (see wire/account.py); `seconds` is time spent training, evaluation and checkpoints
left out; `noise_scale` and its standard error `noise_scale_error`, in the task's unit, are there
where the run measures them (noise_meter.py).
"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.files import create, load_json, open_plain, writing

Record = dict[str, Any]
_LONGEST = 1 << 20  # bytes of a line; ours have some hundred


def metrics_file(run: Path, rank: int) -> Path:
    return run / "metrics" / f"rank-{rank}.jsonl"


class MetricsWriter:
    """Writes this rank's records, and hands each to `also` (a display, TensorBoard)."""

    def __init__(self, run: Path, rank: int, *, resume_step: int | None = None) -> None:
        path = self._path = metrics_file(run, rank)
        # A new file takes the old one's place: MetricsTail tells them apart by that.
        aside = path.with_suffix(".tmp")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = create(aside)
            for line in () if resume_step is None else _lines_until(path, resume_step):
                file.write(line)
            file.flush()
            aside.replace(path)
        self._file = file.detach()  # no buffer: what the disk refuses is not tried again at exit
        self.also: list[Callable[[Record], None]] = []

    def write(self, record: Record) -> None:
        line = json.dumps({k: json_able(v) for k, v in record.items()}) + "\n"
        with writing(self._path):
            self._require_name()
            rest = memoryview(line.encode())
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        for listener in self.also:
            listener(record)

    def _require_name(self) -> None:
        """A file that was removed takes every byte and keeps none: so a run whose directory is gone
        ends at its next step and not at its next checkpoint."""
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise OSError(errno.ENOENT, "the file was removed")

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


class MetricsTail:
    """Reads a file that is still being written: each call gives the records that are new.

    A file that is there already is an earlier run's; its writer puts another one in its place, with
    the records up to the step `after` which that run had come to.
    """

    def __init__(self, path: Path, after: int = 0) -> None:
        self._path = path
        self._after = after
        self._place = 0
        self._earlier = _identity(path)

    def read(self) -> Iterator[Record]:
        if _identity(self._path) in (None, self._earlier):
            return
        try:
            file = open_plain(self._path)
        except OSError:
            return  # it is gone: the writer will say so
        with file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # half a line: the writer is not done with it
                self._place += len(line)
                record = json.loads(line)
                if record["step"] > self._after:
                    yield record


def require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs an extra: pip install 'thinwire[tensorboard]'")


def tensorboard_listener(run: Path, step: int) -> Callable[[Record], None]:
    from torch.utils.tensorboard import SummaryWriter

    # What a run that was resumed further back had written after `step` is hidden.
    folder = run / "tensorboard"
    with writing(folder):
        writer = SummaryWriter(str(folder), purge_step=step + 1)

    def listen(record: Record) -> None:
        with writing(folder):
            for name, value in record.items():
                if name not in ("kind", "step"):
                    writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
            writer.flush()

    return listen


def json_able(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _identity(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None


def _lines_until(path: Path, step: int) -> Iterator[bytes]:
    """A resumed run goes back to its checkpoint: later lines will be written again."""
    try:
        file = open_plain(path)
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(_LONGEST):
            if line.endswith(b"\n") and _is_until(line, step):
                yield line


def _is_until(line: bytes, step: int) -> bool:
    """Not the half line of a killed writer, nor what nobody's writer has made."""
    try:
        return bool(load_json(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False
