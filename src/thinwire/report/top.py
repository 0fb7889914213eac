"""`thinwire top RUN`: a run as its metrics show it, while it goes on or afterwards.

It only reads the run's files, so it can be started and left at any time, on any machine that sees
them. A comparison's directory is shown method by method.
"""

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thinwire import foreign_files as files
from thinwire.errors import UsageError
from thinwire.report.plain import plain
from thinwire.text import format_bytes

_RECENT = 20  # steps over which the present speed is taken
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60  # characters of the loss's course
_LONGEST = 1 << 20  # bytes of a line
_GONE = 30.0  # s without news after which a run that has not ended is called silent


@dataclass
class TopConfig:
    """Watch a run while it goes on, or look at one that has ended."""

    run: Annotated[str, tyro.conf.Positional]
    """Directory of a run, or of a comparison."""
    once: bool = False
    """Print it as it is now and leave; so does a run that has ended, or output to a file."""
    interval: float = 0.5
    """Seconds between two looks."""


@dataclass
class Worker:
    """One worker's metrics, read as they grow."""

    path: Path
    root: Path
    """Below which no link is followed."""
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    losses: list[float] = field(default_factory=list)
    val_loss: float | None = None
    read_at: float = 0.0
    """When the file last grew, by its own clock."""
    _place: int = 0
    _identity: int = 0

    def read(self) -> None:
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return  # the writer is about to replace it
        if stat.st_ino != self._identity:  # a resumed run has a new file, from its start
            self._identity, self._place = stat.st_ino, 0
            self.steps.clear()
            self.losses.clear()
        self.read_at = stat.st_mtime
        with files.open_regular(self.path, self.root) as file:
            file.seek(self._place)
            while (line := file.readline(_LONGEST)).endswith(b"\n"):
                self._place += len(line)
                self._take(json.loads(line))
        if len(line) == _LONGEST:
            raise UsageError(f"cannot read {self.path}: a line has more than {_LONGEST} bytes")

    def _take(self, record: dict[str, Any]) -> None:
        if record["kind"] == "eval":
            self.val_loss = record["val_loss"]
        elif record["kind"] == "step":
            self.steps.append(record)
            if record["loss"] is not None:
                self.losses.append(record["loss"])

    @property
    def last(self) -> dict[str, Any]:
        return self.steps[-1] if self.steps else {}

    @property
    def speed(self) -> float:
        """Tokens or images per second of all workers, over the last steps."""
        first, last = self.steps[0], self.steps[-1]
        taken, unit = last["seconds"] - first["seconds"], self.unit
        if taken <= 0:
            return float(last[f"{unit}_per_s"])
        return (last[unit] - first[unit]) / taken  # type: ignore[no-any-return]

    @property
    def unit(self) -> str:
        """tokens or images."""
        return next((k for k in self.last if k.endswith("_per_s")), "tokens").removesuffix("_per_s")


class Run:
    """A run's directory."""

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        self.folder, self._root = folder, root or folder
        self.settings: dict[str, Any] = _load(folder / "config.json", self._root) or {}
        self._workers: dict[str, Worker] = {}

    def read(self) -> None:
        for path in sorted((self.folder / "metrics").glob("rank-*.jsonl"), key=_rank):
            self._workers.setdefault(path.name, Worker(path, self._root))
        for worker in self._workers.values():
            worker.read()

    @property
    def workers(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.steps]

    @property
    def summary(self) -> dict[str, Any] | None:
        return _load(self.folder / "summary.json", self._root)

    @property
    def ended(self) -> bool:
        return self.summary is not None

    def state(self) -> str:
        summary = self.summary
        if summary is not None:
            stopped = summary.get("stopped_by")
            return f"stopped by {stopped}" if stopped else "finished"
        if not self.workers:
            return "starting"
        silent = time.time() - max(worker.read_at for worker in self.workers)
        return f"no news for {silent:.0f} s" if silent > _GONE else "running"

    def show(self) -> RenderableType:
        self.read()
        name = self.settings.get("method", self.folder.name)
        steps = self.settings.get("steps", 0)
        front = max((worker.last["step"] for worker in self.workers), default=0)
        state = plain(f"  step {front} of {steps}  {self.state()}")
        head = Text.assemble(plain(name, "bold"), state)
        parts: list[RenderableType] = [head, self._table(front)]
        if self.workers:
            first = self.workers[0]
            val = "" if first.val_loss is None else f"   val loss {first.val_loss:.3f}"
            parts.append(Text(f"loss {course(first.losses)}{val}"))
        return Group(*parts)

    def _table(self, front: int) -> Table:
        table = _narrow_table()
        unit = self.workers[0].unit if self.workers else "tokens"
        shown = ("worker", "step", "behind", "loss", f"{unit}/s", "sent", "waiting", "overlap")
        for column in (*shown, "lag", "skipped"):
            table.add_column(plain(column), justify="right", no_wrap=True)
        for worker in self.workers:
            last = worker.last
            row = (
                _rank(worker.path),
                last["step"],
                front - last["step"],
                _loss(last["loss"]),
                f"{worker.speed:,.0f}",
                format_bytes(last["bytes"]),
                _share(last["exposed"], last["seconds"]),
                _share(last["hidden"], last["hidden"] + last["exposed"]),
                last["lag"],
                last["skipped"],
            )
            table.add_row(*map(plain, row))
        return table


class ComparisonRuns:
    """A comparison's directory: the methods of the heat that was written last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[Path, Run] = {}

    def _heat(self) -> Path | None:
        heats = list(self.folder.glob("*/seed-*/heat.json"))
        return max(heats, key=lambda path: path.stat().st_mtime).parent if heats else None

    @property
    def ended(self) -> bool:
        """Reported since its last heat began: one that was interrupted may be going on again."""
        heat = self._heat()
        try:
            reported = (self.folder / "report.html").stat().st_mtime
            return heat is None or reported >= (heat / "heat.json").stat().st_mtime
        except FileNotFoundError:
            return False

    def show(self) -> RenderableType:
        heat = self._heat()
        if heat is None:
            return plain(f"{self.folder.name}  starting")
        told = _load(heat / "heat.json", self.folder) or {}
        active = (_load(heat / "active.json", self.folder) or {}).get("contestant")
        runs = self._read(heat)
        unit = runs[0].workers[0].unit if runs else "tokens"
        table = _narrow_table()
        table.add_column("method", no_wrap=True)
        shown = ("step", "loss", "val loss", f"{unit}/s", "sent", "waiting", "overlap", "lag")
        for column in shown:
            table.add_column(plain(column), justify="right", no_wrap=True)
        for run in runs:
            table.add_row(*_row(run, run.folder.name == active and not self.ended))
        state = "ended" if self.ended else "running"
        head = plain(f"  {told.get('rate')}, seed {told.get('seed')}  {state}")
        return Group(Text.assemble(plain(self.folder.name, "bold"), head), table)

    def _read(self, heat: Path) -> list[Run]:
        """Those that have begun, in the order in which they were asked for."""
        settings = (_load(self.folder / "compare.json", self.folder) or {}).get("settings", {})
        named = ["none", *str(settings.get("methods", "")).replace(" ", "").split(",")]
        found = sorted(path.parent for path in heat.glob("*/metrics"))
        order = {name: place for place, name in reversed(list(enumerate(named)))}
        found.sort(key=lambda folder: order.get(folder.name, len(named)))
        runs = [self._runs.setdefault(folder, Run(folder, self.folder)) for folder in found]
        for run in runs:
            run.read()
        return [run for run in runs if run.workers]


def _narrow_table() -> Table:
    """One that fits a terminal of 80 characters."""
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def _row(run: Run, active: bool) -> list[RenderableType]:
    worker = run.workers[0]
    last = worker.last
    return [
        plain(run.folder.name, "bold" if active else ""),
        plain(last["step"]),
        _loss(last["loss"]),
        _loss(worker.val_loss),
        f"{last[worker.unit] / last['seconds']:,.0f}",
        format_bytes(last["bytes"]),
        _share(last["exposed"], last["seconds"]),
        _share(last["hidden"], last["hidden"] + last["exposed"]),
        plain(last["lag"]),
    ]


def top(config: TopConfig, console: Console | None = None) -> int:
    console = console or Console()
    if config.interval <= 0:
        raise UsageError(f"--interval takes seconds > 0, got {config.interval}")
    with files.refusing_damage(Path(config.run)):
        shown = find(Path(config.run))
        if config.once or not console.is_terminal or shown.ended:
            console.print(shown.show())
        else:
            _follow(shown.show, lambda: shown.ended, config.interval, console)
    return 0


def _follow(
    show: Callable[[], RenderableType], ended: Callable[[], bool], interval: float, console: Console
) -> None:
    """Until the run has ended, or Ctrl-C."""
    try:
        with Live(show(), console=console, auto_refresh=False) as live:
            while not ended():
                time.sleep(interval)
                live.update(show(), refresh=True)
            live.update(show(), refresh=True)
    except KeyboardInterrupt:
        pass


def find(folder: Path) -> "Run | ComparisonRuns":
    if not folder.is_dir():
        raise UsageError(f"{folder} is no directory: name that of a run, such as runs/ddp-...")
    if (folder / "compare.json").exists():
        return ComparisonRuns(folder)
    if (folder / "metrics").is_dir() or (folder / "config.json").exists():
        return Run(folder)
    raise UsageError(f"{folder} holds neither a run nor a comparison: there are no metrics in it")


def course(losses: list[float]) -> str:
    """The losses so far as a row of bars, at most `_WIDTH` of them, each the mean of its part."""
    if not losses:
        return ""
    count = min(_WIDTH, len(losses))
    edges = [number * len(losses) // count for number in range(count + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(_BARS[round((mean - low) * scale)] for mean in means)
    return f"{means[0]:.3f} {bars} {means[-1]:.3f}"


def _loss(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and math.isfinite(value) else "-"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"


def _rank(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _load(path: Path, root: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = files.read_json(path, root)
        return content
    except (OSError, UsageError):  # not there yet, or not whole
        return None
