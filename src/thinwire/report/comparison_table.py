"""The table of a comparison: on a terminal, and as CSV beside the report."""

import csv
import io
import re
from collections.abc import Callable
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from thinwire.report.comparison import (
    CUT,
    DIVERGED,
    FAILED,
    FINISHED,
    UNFINISHED,
    Cell,
    Comparison,
    Spread,
)
from thinwire.report.plain import plain
from thinwire.text import format_bytes, printable

NOTHING = "-"  # where a figure is not known
_WIDE = 200  # characters of a line elsewhere than on a terminal


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A table for each rate, and one of all rates where there are several."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDE)
    for rate in comparison.rates:
        table, left_out = _table(comparison, rate, console.width)
        console.print(table)
        if left_out:
            words = f"a wider terminal also shows {', '.join(left_out)}"
            console.print(plain(words), highlight=False)
        for line in notes(comparison, rate):
            console.print(plain(line), highlight=False, soft_wrap=True)
    if len(comparison.rates) > 1:
        console.print(_grid(comparison))
    console.print(plain(legend(comparison)), highlight=False, soft_wrap=True)


def _table(comparison: Comparison, rate: str, width: int) -> tuple[Table, list[str]]:
    """The table, and the columns for which there is no room in so many characters."""
    shown = columns(comparison)
    spare = [shown[place][0] for place in (3, -4 if comparison.baseline else -2, 1)]
    left_out: list[str] = []
    while True:
        chosen = [(name, show) for name, show in shown if name not in left_out]
        table = _make(comparison, rate, chosen)
        if Console(width=_WIDE).measure(table).maximum <= width or not spare:
            return table, left_out
        left_out.append(spare.pop(0))


def _make(
    comparison: Comparison, rate: str, shown: list[tuple[str, Callable[[Cell], str]]]
) -> Table:
    table = Table(title=plain(title(comparison, rate)), title_justify="left")
    for name, _ in shown:
        left = name == "method"
        table.add_column(plain(name), justify="left" if left else "right", no_wrap=True)
    for cell in comparison.at(rate):
        table.add_row(*(plain(show(cell)) for _, show in shown))
    return table


def title(comparison: Comparison, rate: str) -> str:
    text = f"{rate}, {comparison.hosts} hosts, {comparison.steps:.4g} steps"
    if comparison.budget < comparison.asked:
        share = comparison.budget / comparison.asked
        text += f" ({share:.0%} of what was asked for)"
    return text


def columns(comparison: Comparison) -> list[tuple[str, Callable[[Cell], str]]]:
    columns: list[tuple[str, Callable[[Cell], str]]] = [
        ("method", lambda c: c.method),
        (f"{comparison.unit}/s", lambda c: _number(c.tokens_per_s, ",.0f")),
        (f"of {comparison.yardstick}", lambda c: _spread(c.efficiency, 2)),
        (f"bytes/{comparison.unit.rstrip('s')}", lambda c: _bytes(c.bytes_per_token)),
    ]
    if comparison.baseline is not None:
        columns.append((f"of {comparison.baseline}", lambda c: _number(c.bytes_ratio, ".3f")))
    columns += [
        ("waiting", waiting),
        ("val loss", lambda c: _spread(c.val_loss, 3)),
    ]
    if comparison.baseline is not None:
        name = f"to {comparison.baseline}'s loss"
        columns.append((name, lambda c: _seconds(c.time_to_loss, c.computed)))
        columns.append(("sooner", lambda c: _number(c.sooner, ".2f", "x")))
    return columns


def _grid(comparison: Comparison) -> Table:
    """Efficiency by rate, and how much sooner the baseline's loss is reached."""
    table = Table(title="all rates: of none, sooner", title_justify="left")
    table.add_column("method", no_wrap=True)
    for rate in comparison.rates:
        table.add_column(plain(rate), justify="right", no_wrap=True)
    for name in comparison.methods:
        row = []
        for rate in comparison.rates:
            cell = comparison.cell(rate, name)
            if cell is None:
                row.append(NOTHING)
                continue
            sooner = _number(cell.sooner, ".2f", "x")
            row.append(f"{_spread(cell.efficiency, 2)}  {sooner:>6}")
        table.add_row(plain(name), *row)
    return table


def waiting(cell: Cell) -> str:
    if cell.exposed is None or not cell.seconds:
        return NOTHING
    return f"{cell.exposed:.1f} s ({cell.exposed / cell.seconds:.0%})"


def notes(comparison: Comparison, rate: str) -> list[str]:
    """What has to be said of single methods; nothing is left out silently."""
    words = {
        FAILED: "could not run",
        DIVERGED: "diverged",
        CUT: "cut short by the time limit",
        UNFINISHED: "not finished",
    }
    said_of: dict[str, list[str]] = {}
    for cell in comparison.at(rate):
        if cell.status == FINISHED and not cell.message:
            continue
        said = words.get(cell.status, "")
        if cell.status == CUT and cell.computed and not cell.message:
            said = "timed for part of the budget; the rest is computed"
        text = ": ".join(filter(None, (said, cell.message)))
        said_of.setdefault(text, []).append(cell.method)
    return [f"{', '.join(methods)}: {text}" for text, methods in said_of.items()]


def legend(comparison: Comparison) -> str:
    text = (
        f"of {comparison.yardstick}: {comparison.unit}/s over those of the same loop with no "
        f"communication, with two standard errors; val loss: at equal {comparison.unit}"
    )
    if comparison.target is not None:
        text += (
            f"; to {comparison.baseline}'s loss: training time to {comparison.target.value:.3f}, "
            f"where {comparison.baseline} ended (~: goes beyond what was run at this rate)"
        )
    return text


def csv_text(comparison: Comparison) -> str:
    """One line for each method and rate, with every figure."""
    names = [f.name for f in fields(Cell) if f.name not in ("curve", "timeline", "settings")]
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    header = []
    for name in names:
        header += [name, f"{name}_plus_minus"] if name in _SPREADS else [name]
    writer.writerow(header)
    for cell in comparison.cells:
        row: list[object] = []
        for name in names:
            value = getattr(cell, name)
            if name in _SPREADS:
                row += ["", ""] if value is None else [value.value, value.plus_minus]
            else:
                row.append(value)
        writer.writerow([_csv_value(value) for value in row])
    return file.getvalue()


def _csv_value(value: object) -> object:
    """A text that a spreadsheet would take for a formula gets a ' in front."""
    if not isinstance(value, str):
        return value
    formula = value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) and not _NUMBER(value)
    return ("'" if formula else "") + printable(value)


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE).fullmatch
_SPREADS = ("efficiency", "val_loss", "time_to_loss")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:{form}}{unit}"


def _bytes(value: float | None) -> str:
    return NOTHING if value is None else format_bytes(value)


def _spread(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return NOTHING
    if spread.plus_minus is None:
        return f"{spread.value:.{digits}f}"
    around = f"{spread.plus_minus:.{digits}f}".removeprefix("0")
    return f"{spread.value:.{digits}f} ±{around}"


def _seconds(spread: Spread | None, computed: bool) -> str:
    if spread is None:
        return NOTHING
    about = "~" if computed else ""
    around = "" if spread.plus_minus is None else f" ±{spread.plus_minus:.0f}"
    return f"{about}{spread.value:.0f}{around} s"
