"""Metrics: one JSON line per step and worker, and how they are read back while a run goes on.

    run/metrics/rank-0.jsonl
    {"kind": "step", "step": 12, "loss": 4.9, "tokens": 49152, "tokens_per_s": 21000, "bytes": ...}
    {"kind": "eval", "step": 50, "val_loss": 3.1, ...}

`tokens` and `tokens_per_s` are of all replicas together; `bytes`, `exposed`, `hidden`, `lag` and
`skipped` are this worker's totals so far (see wire/account.py); `seconds` is time spent training,
evaluation and checkpoints left out.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from thinwire.errors import UsageError

Record = dict[str, Any]


def metrics_file(run: Path, rank: int) -> Path:
    return run / "metrics" / f"rank-{rank}.jsonl"


class MetricsWriter:
    """Writes this rank's records, and hands each to `also` (a display, TensorBoard)."""

    def __init__(self, run: Path, rank: int, *, resume_step: int | None = None) -> None:
        path = metrics_file(run, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            _forget_after(path, resume_step)
        self._file: TextIO = path.open("a" if resume_step is not None else "w")
        self.also: list[Callable[[Record], None]] = []

    def write(self, record: Record) -> None:
        self._file.write(json.dumps({k: _json_able(v) for k, v in record.items()}) + "\n")
        self._file.flush()
        for listener in self.also:
            listener(record)

    def close(self) -> None:
        self._file.close()


class MetricsTail:
    """Reads a file that is still being written: each call gives the lines that are new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0

    def read(self) -> Iterator[Record]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # half a line: the writer is not done with it
                self._place += len(line)
                yield json.loads(line)


def tensorboard_listener(run: Path) -> Callable[[Record], None]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(
            "--tensorboard needs an extra: pip install 'thinwire[tensorboard]'"
        ) from None
    writer = SummaryWriter(str(run / "tensorboard"))

    def listen(record: Record) -> None:
        for name, value in record.items():
            if name not in ("kind", "step"):
                writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        writer.flush()

    return listen


def _json_able(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _forget_after(path: Path, step: int) -> None:
    """A resumed run goes back to its checkpoint: later lines will be written again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue  # the half line of a killed writer
    path.write_text("".join(kept))
