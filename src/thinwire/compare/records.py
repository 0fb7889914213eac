"""Records: what a contestant leaves on disk, one JSON line after another, and where.

    runs/compare-20260105-101500/
      compare.json                     the settings of the comparison
      100mbit/seed-0/                  a heat: all methods at one rate with one seed
        heat.json                      what its workers were told
        lab.json                       what the links were measured at
        ddp/turns.jsonl                the records below
        ddp/config.json, metrics/      as of any run; `thinwire top` reads them
      report.html table.csv comparison.json

    {"kind": "turn", "cycle": 3, "step": 40, "tokens": 163840, "wall": 3.1, "seconds": 12.4, ...}
    {"kind": "eval", "step": 40, "tokens": 163840, "val_loss": 3.2}
    {"kind": "timeline", "cycle": 3, "steps": [0.31, 0.62, ...], "flights": [[...], ...]}
    {"kind": "end", "why": "budget", "message": ""}

In a turn, `wall` is the seconds from the common start of all workers to the end of the slowest, or
to their ends on average if nobody waited for anybody. The others are totals so far: `seconds` of
the walls; `bytes` sent by all workers, by the method's own account, `most_bytes` by the one that
sent most, and `wire_bytes` by the kernel's count on the interfaces; `exposed` and `hidden` seconds
of a worker on average; `skipped` steps; `lag`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from thinwire import foreign_files as files
from thinwire.files import writing
from thinwire.train.loop.metrics import json_able, metrics_file

Record = dict[str, Any]

TURNS = "turns.jsonl"
SETTINGS = "compare.json"
HEAT = "heat.json"
LAB = "lab.json"
ACTIVE = "active.json"  # the contestant whose turn it is, for whoever finds a worker dead

# Why a contestant's records end.
BUDGET = "budget"  # it has read its tokens
LIMIT = "limit"  # it has used up its seconds
DIVERGED = "diverged"  # its loss is not finite any more
FAILED = "failed"  # it could not be built, or it took a worker down


def heat_folder(run: Path, rate: str, seed: int) -> Path:
    return run / rate / f"seed-{seed}"


class RecordWriter:
    """Writes one contestant's records; on all ranks but the first it writes nothing."""

    def __init__(self, folder: Path, leader: bool) -> None:
        self._path = folder / TURNS if leader else None

    def write(self, kind: str, **values: Any) -> None:
        if self._path is not None:
            append(self._path.parent, kind, **values)


def append(folder: Path, kind: str, **values: Any) -> None:
    line = json.dumps({"kind": kind} | {k: json_able(v) for k, v in values.items()})
    with writing(folder / TURNS):
        folder.mkdir(parents=True, exist_ok=True)
        with files.open_to_append(folder / TURNS) as file:
            file.write(line + "\n")


def read(folder: Path, within: Path | None = None) -> list[Record]:
    """The whole lines there are; a killed writer leaves half a one. `within`: see files.py."""
    try:
        lines = files.read(folder / TURNS, within).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def last(records: list[Record], kind: str) -> Record | None:
    return next((record for record in reversed(records) if record["kind"] == kind), None)


def ended(folder: Path) -> str | None:
    """Why the contestant's records end; None while it has not ended."""
    end = last(read(folder), "end")
    return None if end is None else str(end["why"])


def step_losses(folder: Path, rank: int) -> dict[int, float | None]:
    """One worker's training loss at every step."""
    path = metrics_file(folder, rank)
    if not path.exists():
        return {}
    losses: dict[int, float | None] = {}
    for line in path.read_text().splitlines(keepends=True):
        record = json.loads(line) if line.endswith("\n") else {}
        if record.get("kind") == "step":
            losses[record["step"]] = record["loss"]
    return losses


def forget(folder: Path) -> None:
    """Removes what a contestant left that neither ended nor can go on."""
    shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, content: Any) -> None:
    """At once, so that a reader finds either the old content or the new."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(content, indent=2) + "\n")
