"""The tables printed at the start and the end of a run."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire.lab.check import LinkCheck
from thinwire.lab.units import format_duration, format_rate
from thinwire.report.plain import plain
from thinwire.text import format_bytes


def print_summary(summary: dict[str, Any], console: Console | None = None) -> None:
    """The closing figures of a run: one row."""
    console = console or Console()
    count = summary["workers"]
    table = Table(title=f"{summary['step']} steps on {count} worker{'s' * (count != 1)}")
    unit, seconds = summary.get("unit", "tokens"), summary["seconds"]
    row = {
        "method": str(summary["method"]),
        f"{unit}/s": f"{summary[f'{unit}_per_s']:,.0f}",
        "sent/worker": format_bytes(summary["bytes"] / count),
        "exposed": f"{summary['exposed']:.1f} s ({summary['exposed'] / seconds:.0%})",
        "hidden": f"{summary['hidden']:.1f} s",
        "loss": _loss(summary["loss"]),
        "val loss": _loss(summary["val_loss"]),
    }
    if summary.get("val_accuracy") is not None:
        row["accuracy"] = f"{summary['val_accuracy']:.1%}"
    for name in row:
        table.add_column(plain(name), justify="left" if name == "method" else "right")
    table.add_row(*map(plain, row.values()))
    console.print(table)
    if skipped := summary["skipped"]:
        steps = (
            "1 step was skipped: its" if skipped == 1 else f"{skipped} steps were skipped: their"
        )
        console.print(f"{steps} values were not finite", highlight=False)
    if reading := summary.get("noise_scale_reading"):
        console.print(plain(reading), highlight=False)


def _loss(value: float | None) -> str:
    """A loss that was not finite, or not measured, has no figure."""
    return f"{value:.3f}" if value is not None and math.isfinite(value) else "-"


def print_checks(checks: Sequence[LinkCheck], console: Console | None = None) -> None:
    """What the lab measured of itself before the run, in one line."""
    (console or Console()).print(f"lab: {describe_checks(checks)}", highlight=False)


def describe_checks(checks: Sequence[LinkCheck]) -> str:
    rates = [rate for check in checks for rate in (check.up, check.down)]
    trips = [check.rtt for check in checks]
    return (
        f"{len(checks)} hosts, links measured at {_span(rates, format_rate)}, "
        f"round trips at {_span(trips, format_duration)}"
    )


def _span(values: list[float], show: Callable[[float], str]) -> str:
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"
