"""The report: one HTML file with everything in it, to be opened from anywhere.

page.html is its frame: style, themes and the few lines that draw. Here its places are filled.
"""

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from thinwire.foreign_files import write
from thinwire.report.comparison import Cell, Comparison
from thinwire.report.comparison_table import columns, legend, notes
from thinwire.report.figures import figures, style
from thinwire.text import printable

_ABOUT = {
    "time": (
        "Loss against time",
        "Validation loss of the mean of the replicas, against seconds spent training (evaluation "
        "left out). Click a name to hide its line, twice to see it alone.",
    ),
    "bytes": (
        "Loss against traffic",
        "The same losses against the bytes that a worker has sent, on average.",
    ),
    "speed": (
        "Speed and its limits",
        "Tokens per second of all workers. The dashed line is compute alone, the same loop without "
        "any communication. The red mark is what the link allows: its bandwidth over the bytes a "
        "token costs. A method that hides its traffic can come close to the nearer of the two; one "
        "that computes and sends in turn can not.",
    ),
    "timeline": (
        "Where the time goes",
        "Some steps of the first worker, near the end of its run. Above, its own time: grey is "
        "compute, step by step, red is waiting for the network (exposed). Below, in blue, what was "
        "in the air: all of it that is not under red was hidden behind compute.",
    ),
}


def write_page(comparison: Comparison, path: Path) -> None:
    write(path, page(comparison))


def escape(text: str) -> str:
    return html.escape(printable(text))


def page(comparison: Comparison) -> str:
    places = {
        "title": escape(_title(comparison)),
        "subtitle": escape(_subtitle(comparison)),
        "findings": "".join(f"<li>{escape(text)}</li>" for text in findings(comparison)),
        "rates": _rate_buttons(comparison),
        "sections": _sections(comparison),
        "settings": _settings(comparison),
        "made": f"Made by thinwire compare, {time.strftime('%Y-%m-%d %H:%M')}.",
        # A browser looks for more than the end of a script in there: <!--<script hides that.
        "figures": json.dumps(figures(comparison), allow_nan=False).replace("<", "\\u003c"),
        "plotly": _library(),
    }
    frame = files("thinwire.report").joinpath("page.html").read_text(encoding="utf-8")
    places["policy"] = _policy([places["plotly"], _DRAWING.findall(frame)[-1]])
    return _PLACE.sub(lambda place: places[place[1]], frame)


_PLACE = re.compile(r"\{\{(\w+)\}\}")
_DRAWING = re.compile(r"<script>(.*?)</script>", re.S)


def _library() -> str:
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs().replace("</script", "<\\/script")
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as a browser reads it, for its digest


def _policy(scripts: Sequence[str]) -> str:
    """What a browser may run and load for this page: these scripts, and nothing from anywhere.

    plotly sets styles as it draws, and makes a picture of a drawing for who asks for one.
    """
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts)
    allowed = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _title(comparison: Comparison) -> str:
    rates = ", ".join(comparison.rates)
    delay = comparison.settings.get("delay", "0")
    return f"What {comparison.hosts} hosts at {rates} and {delay} delay can train"


def _subtitle(comparison: Comparison) -> str:
    settings = comparison.settings
    seeds = len(comparison.seeds)
    if not comparison.steps:
        return f"{settings.get('model')} on {settings.get('data')}, nothing evaluated yet"
    return (
        f"{settings.get('model')} on {settings.get('data')}, {comparison.steps:.4g} steps of "
        f"{comparison.budget / comparison.steps:,.0f} {comparison.unit} "
        f"({comparison.budget:,} in all), {seeds} seed{'s' * (seeds != 1)}"
    )


def findings(comparison: Comparison) -> list[str]:
    """The answer in a sentence for each rate."""
    return [text for rate in comparison.rates if (text := _finding(comparison, rate))]


def _finding(comparison: Comparison, rate: str) -> str:
    cells = comparison.at(rate)
    reached = [c for c in cells if c.sooner is not None and c.method != comparison.baseline]
    if reached:
        best = max(reached, key=lambda cell: cell.sooner or 0.0)
        assert best.sooner is not None
        if best.sooner <= 1:
            return f"{rate}: nothing reached {comparison.baseline}'s loss sooner than itself."
        return (
            f"{rate}: {best.method} reached {comparison.baseline}'s loss {best.sooner:.1f} times "
            f"as soon, at {_share(best)} of the speed of compute alone."
        )
    others = [c for c in cells if c.efficiency and c.method != comparison.yardstick]
    if not others:
        return ""
    best = max(others, key=lambda cell: cell.efficiency.value if cell.efficiency else 0.0)
    return f"{rate}: {best.method} keeps {_share(best)} of the speed of compute alone."


def _share(cell: Cell) -> str:
    return f"{cell.efficiency.value:.0%}" if cell.efficiency else "an unknown share"


def _rate_buttons(comparison: Comparison) -> str:
    if len(comparison.rates) < 2:
        return ""
    buttons = "".join(
        f'<button value="{number}">{escape(rate)}</button>'
        for number, rate in enumerate(comparison.rates)
    )
    return f"<nav aria-label='rate'>{buttons}</nav>"


def _sections(comparison: Comparison) -> str:
    return "".join(
        f'<div data-rate="{number}"{" hidden" if number else ""}>'
        f"{_table(comparison, rate)}{_plots(number)}</div>"
        for number, rate in enumerate(comparison.rates)
    )


def _plots(number: int) -> str:
    return "".join(
        f'<h2>{title}</h2><p class="note">{escape(words)}</p>'
        f'<div class="plot" id="{name}-{number}"></div>'
        for name, (title, words) in _ABOUT.items()
    )


def _table(comparison: Comparison, rate: str) -> str:
    cells = comparison.at(rate)
    shown = columns(comparison)
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in shown)
    best = max((cell.sooner or 0.0 for cell in cells), default=0.0)
    rows = []
    for cell in cells:
        colour, _ = style(comparison, cell.method)
        swatch = f'<span class="swatch" data-colour="{colour}"></span>'
        figures = []
        for name, show in shown:
            text = escape(show(cell))
            mark = ' class="best"' if name == "sooner" and cell.sooner == best > 1 else ""
            figures.append(f"<td{mark}>{swatch if name == 'method' else ''}{text}</td>")
        rows.append(f"<tr>{''.join(figures)}</tr>")
    words = "".join(f"<p class='note'>{escape(line)}</p>" for line in notes(comparison, rate))
    link = escape(comparison.links.get(rate, ""))
    return (
        f"<h2>{escape(rate)}</h2><p class='note'>{link}</p><div class='scroll'><table>"
        f"<tr>{head}</tr>{''.join(rows)}</table></div>{words}"
        f"<p class='note'>{escape(legend(comparison))}</p>"
    )


def _settings(comparison: Comparison) -> str:
    hidden = {"run", "run_dir", "json", "timeout", "methods", "set", "only"}
    common = {
        k: v for k, v in comparison.settings.items() if k not in hidden and v not in (None, [])
    }
    own = {}
    for cell in comparison.at(comparison.rates[0]) if comparison.rates else []:
        if cell.settings:
            own[cell.method] = ", ".join(f"{k} {v}" for k, v in cell.settings.items())
    tables: Sequence[tuple[str, Mapping[str, Any]]] = (
        ("the same for all", common),
        ("of each method", own),
        ("machine", comparison.machine),
    )
    return "".join(
        f"<div><table><tr><th colspan='2' style='text-align:left'>{title}</th></tr>"
        + "".join(
            f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>"
            for k, v in values.items()
        )
        + "</table></div>"
        for title, values in tables
    )
