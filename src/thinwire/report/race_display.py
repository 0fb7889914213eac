"""RaceDisplay: a bar for every method of a comparison; plain lines elsewhere than on a terminal."""

import math
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from thinwire.report.plain import plain
from thinwire.text import format_bytes, printable

_SECONDS_BETWEEN_LINES = 10.0


class RaceDisplay:
    """Fed with the metrics of every method's first worker. Use it as a context manager."""

    def __init__(
        self, title: str, methods: list[str], tokens: int, unit: str, console: Console
    ) -> None:
        self._console, self._title, self._tokens, self._unit = console, title, tokens, unit
        self._progress = Progress(
            TextColumn("{task.description:<16}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._figures: dict[str, dict[str, Any]] = {name: {} for name in methods}
        self._tasks: dict[str, TaskID] = {
            name: self._progress.add_task(printable(name), total=tokens or None, figures="")
            for name in methods
        }
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES

    def __enter__(self) -> "RaceDisplay":
        self._console.print(plain(self._title), highlight=False)
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def print(self, text: str) -> None:
        self._console.print(plain(text), highlight=False, soft_wrap=True)

    def update(self, method: str, record: dict[str, Any]) -> None:
        figures = self._figures[method]
        figures |= record
        self._progress.update(
            self._tasks[method],
            completed=min(figures.get(self._unit, 0), self._tokens or math.inf),
            figures=describe(figures, self._unit),
        )

    def tick(self) -> None:
        """Elsewhere than on a terminal: a line now and then."""
        if self._console.is_terminal or time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
        parts = [self._short(name) for name, figures in self._figures.items() if figures]
        if parts:
            self.print(f"{self._title}  " + "; ".join(parts))

    def _short(self, method: str) -> str:
        figures = self._figures[method]
        read = figures[self._unit]
        progress = f"{read / self._tokens:.0%}" if self._tokens else f"{read:,} {self._unit}"
        val = figures.get("val_loss")
        return f"{method} {progress}" + (f" val {val:.3f}" if val is not None else "")


def describe(figures: dict[str, Any], unit: str) -> str:
    """Speed, loss, bytes and exposed share, as far as they are known."""
    parts = []
    if figures.get("seconds"):
        parts.append(f"{figures[unit] / figures['seconds']:>8,.0f} {unit}/s")
    if figures.get("loss") is not None:
        parts.append(f"loss {figures['loss']:.3f}")
    if figures.get("val_loss") is not None:
        parts.append(f"val {figures['val_loss']:.3f}")
    if "bytes" in figures:
        parts.append(f"{format_bytes(figures['bytes']):>7} sent")
    if figures.get("seconds"):
        parts.append(f"{figures['exposed'] / figures['seconds']:>4.0%} waiting")
    return "  ".join(parts)
