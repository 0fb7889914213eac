"""Display: the progress of a run, as a bar on a terminal and as plain lines elsewhere."""

import math
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire.report.plain import plain
from thinwire.text import format_bytes, printable

_SECONDS_BETWEEN_LINES = 5.0


class Display:
    """Fed with the records of one worker's metrics. Use it as a context manager."""

    def __init__(self, steps: int, title: str, console: Console | None = None) -> None:
        self._console = console or Console()
        self._errors = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(printable(title), total=steps, figures="starting")
        self._steps, self._title = steps, title
        self._figures: dict[str, Any] = {}
        self._next_line = 0.0

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def print(self, text: str, *, error: bool = False) -> None:
        """A line above the bar; elsewhere than on a terminal an error goes to stderr."""
        console = self._errors if error and not self._console.is_terminal else self._console
        console.print(plain(text), highlight=False, soft_wrap=True)

    def update(self, record: dict[str, Any]) -> None:
        self._figures |= record
        step = int(record["step"])
        text = self._text()
        self._progress.update(self._task, completed=step, figures=text)
        if self._console.is_terminal:
            return
        now = time.monotonic()
        due = now >= self._next_line or step == self._steps or record["kind"] == "eval"
        if due:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            self.print(f"{self._title} {step}/{self._steps}  {text}")

    def _text(self) -> str:
        f = self._figures
        parts = []
        if "loss" in f:
            finite = f["loss"] is not None and math.isfinite(f["loss"])
            parts.append(f"loss {f['loss']:.3f}" if finite else "loss not finite")
        if f.get("val_loss") is not None:
            parts.append(f"val {f['val_loss']:.3f}")
        if f.get("val_accuracy") is not None:
            parts.append(f"accuracy {f['val_accuracy']:.1%}")
        rate = next((name for name in f if name.endswith("_per_s")), None)
        if rate is not None:
            parts.append(f"{f[rate]:,.0f} {rate.removesuffix('_per_s')}/s")
            parts.append(f"{format_bytes(f['bytes'])} sent")
            share = f["exposed"] / f["seconds"] if f["seconds"] else 0.0
            parts.append(f"{share:.0%} waiting")
            if f["skipped"]:
                parts.append(f"{f['skipped']} skipped")
        return "  ".join(parts)
