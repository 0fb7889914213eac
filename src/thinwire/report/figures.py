"""The drawings of the report, as plotly's traces and layouts in plain data.

Colours are names that begin with @, which the page replaces by those of its light or dark theme:
@0, @1, ... for methods, @ink, @muted, @wait and so on. A method has the same colour everywhere.
"""

from typing import Any

from thinwire.report.comparison import Cell, Comparison
from thinwire.text import printable

Figure = dict[str, Any]

HUES = 10  # of the themes; further methods have the same again, dashed
_ROOM = 1.25  # of the speed of compute alone: how far a speed axis reaches
_DECADES = 100  # between the least and the most bytes: beyond that an axis shows powers of ten
_SHORTEST_WAIT = 0.001  # s; less is not seen


def figures(comparison: Comparison) -> dict[str, Figure]:
    """Every drawing of the page by the name of its place."""
    found = {}
    for number, rate in enumerate(comparison.rates):
        found[f"time-{number}"] = loss_by_time(comparison, rate)
        found[f"bytes-{number}"] = loss_by_bytes(comparison, rate)
        found[f"speed-{number}"] = speed(comparison, rate)
        found[f"timeline-{number}"] = timeline(comparison, rate)
    return found


def label(name: str) -> str:
    """As plotly shows it as it is: its texts are markup (<a href=...>) and templates (%{x}), and
    here an @ would begin the name of a colour."""
    signs = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "%{": "%&#123;"}
    text = printable(name)
    for sign, entity in signs.items():
        text = text.replace(sign, entity)
    return text


def style(comparison: Comparison, method: str) -> tuple[str, str]:
    """A method's colour and dash."""
    if method == comparison.yardstick:
        return "@muted", "dot"
    if method == comparison.baseline:
        return "@ink", "solid"
    others = [
        name
        for name in comparison.methods
        if name not in (comparison.yardstick, comparison.baseline)
    ]
    number = others.index(method)
    return f"@{number % HUES}", ("solid", "dash", "dashdot")[number // HUES % 3]


# -- loss ---------------------------------------------------------------------------------------


def loss_by_time(comparison: Comparison, rate: str) -> Figure:
    figure = _loss(comparison, rate, "seconds", "seconds of training", ".0f")
    if (line := _target_line(comparison)) is not None:
        figure["layout"]["shapes"] = [line]
        figure["layout"]["annotations"] = [_target_words(comparison)]
    return figure


def loss_by_bytes(comparison: Comparison, rate: str) -> Figure:
    figure = _loss(comparison, rate, "bytes", "bytes sent by a worker", ".3s")
    axis = figure["layout"]["xaxis"]
    axis |= {"type": "log", "ticksuffix": "B", "exponentformat": "SI"}
    sent = [value for trace in figure["data"] for value in trace["x"]]
    if sent and max(sent) > _DECADES * min(sent):  # else powers of ten alone would be too few
        axis["dtick"] = 1
    return figure


def _loss(comparison: Comparison, rate: str, over: str, axis: str, form: str) -> Figure:
    traces = []
    for cell in comparison.at(rate):
        points = [p for p in cell.curve if over != "bytes" or p.bytes > 0]
        if not points:
            continue
        colour, dash = style(comparison, cell.method)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label(cell.method),
                "x": [round(getattr(point, over), 3) for point in points],
                "y": [round(point.val_loss, 5) for point in points],
                "line": {"color": colour, "width": 2, "dash": dash},
                "marker": {"size": 4, "color": colour},
                "hovertemplate": f"%{{y:.3f}} at %{{x:{form}}}<extra>{label(cell.method)}</extra>",
            }
        )
    layout = {
        "xaxis": {"title": {"text": axis}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "validation loss"}, "range": _loss_range(comparison, rate)},
        "height": 430,
    }
    return {"data": traces, "layout": layout}


def _loss_range(comparison: Comparison, rate: str) -> list[float] | None:
    """Without the first fall from the random start, which would flatten everything else."""
    curves = [cell.curve for cell in comparison.at(rate) if cell.curve]
    if not curves:
        return None
    losses = [point.val_loss for curve in curves for point in curve]
    starts = [curve[min(1, len(curve) - 1)].val_loss for curve in curves]
    low, high = min(losses), max(starts)
    room = 0.04 * (high - low) or 0.05
    return [low - room, high + room]


def _target_line(comparison: Comparison) -> Figure | None:
    if comparison.target is None:
        return None
    y = comparison.target.value
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def _target_words(comparison: Comparison) -> Figure:
    assert comparison.target is not None
    return {
        "xref": "paper",
        "x": 1,
        "xanchor": "right",
        "y": comparison.target.value,
        "yanchor": "bottom",
        "text": f"where {label(str(comparison.baseline))} ended",
        "showarrow": False,
        "font": {"size": 12, "color": "@muted"},
    }


# -- speed --------------------------------------------------------------------------------------


def speed(comparison: Comparison, rate: str) -> Figure:
    """Tokens per second, and what nothing can exceed: compute alone, and bytes over bandwidth."""
    cells = [cell for cell in comparison.at(rate) if cell.tokens_per_s is not None]
    cells.reverse()  # plotly draws from below
    compute = next((cell.compute_limit for cell in cells if cell.compute_limit), None)
    names = [cell.method for cell in cells]
    speeds = [cell.tokens_per_s or 0.0 for cell in cells]
    reach = _ROOM * max([compute or 0.0, *speeds], default=1.0)
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [label(name) for name in names],
        "x": [round(value, 1) for value in speeds],
        "marker": {"color": [style(comparison, name)[0] for name in names]},
        "width": 0.6,
        "text": [f"{value:,.0f}" for value in speeds],
        "textposition": "auto",
        "insidetextanchor": "end",
        "hovertemplate": f"%{{x:,.0f}} {label(comparison.unit)}/s<extra>%{{y}}</extra>",
        "showlegend": False,
    }
    layout: Figure = {
        "xaxis": {"title": {"text": f"{label(comparison.unit)} per second"}, "range": [0, reach]},
        "yaxis": {"automargin": True, "ticklabelstandoff": 6},
        "height": 120 + 30 * len(cells),
    }
    if compute:
        layout["shapes"] = [_compute_line(compute)]
    return {"data": [bars, *_wire_limits(cells, reach), *_compute_key(compute)], "layout": layout}


def _compute_line(compute: float) -> Figure:
    line = {"color": "@ink", "width": 1.5, "dash": "dash"}
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1} | {
        "x0": compute,
        "x1": compute,
        "line": line,
    }


def _compute_key(compute: float | None) -> list[Figure]:
    """A line of the legend for the drawn line, which has none of its own."""
    if not compute:
        return []
    line = {"color": "@ink", "width": 1.5, "dash": "dash"}
    name = "compute alone"
    return [
        {"type": "scatter", "mode": "lines", "x": [None], "y": [None], "name": name}
        | {"line": line}
    ]


def _wire_limits(cells: list[Cell], reach: float) -> list[Figure]:
    limited = [cell for cell in cells if cell.wire_limit is not None]
    within = [cell for cell in limited if (cell.wire_limit or 0) <= reach]
    beyond = [cell for cell in limited if cell not in within]
    found = []
    for some, symbol, size in ((within, "line-ns", 20), (beyond, "triangle-right", 9)):
        if some:
            far = some is beyond
            limits = [cell.wire_limit or 0.0 for cell in some]
            found.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": "bytes over bandwidth" + (", off to the right" if far else ""),
                    "y": [label(cell.method) for cell in some],
                    "x": [0.985 * reach if far else round(limit, 1) for limit in limits],
                    "customdata": [round(limit) for limit in limits],
                    "marker": {"symbol": symbol, "size": size, "color": "@wait"}
                    | {"line": {"width": 3, "color": "@wait"}},
                    "hovertemplate": "the link allows %{customdata:,} /s<extra>%{y}</extra>",
                }
            )
    return found


# -- timeline -----------------------------------------------------------------------------------


def timeline(comparison: Comparison, rate: str) -> Figure:
    """Some steps of the first worker: what it did, and what was in the air meanwhile."""
    cells = [cell for cell in comparison.at(rate) if cell.timeline and cell.timeline["steps"]]
    span = _span(cells)
    lanes = {cell.method: len(cells) - 1 - row for row, cell in enumerate(cells)}
    compute, waits, air = _Lane("compute"), _Lane("exposed: waiting"), _Lane("in the air")
    for cell in cells:
        assert cell.timeline is not None
        place = lanes[cell.method]
        before = 0.0
        for end in cell.timeline["steps"]:
            compute.add(place + 0.17, before, end, span, cell.method)
            before = end
        for launched, arrived, asked, landed in cell.timeline["flights"]:
            if landed - asked >= _SHORTEST_WAIT:
                waits.add(place + 0.17, asked, landed, span, cell.method)
            air.add(place - 0.17, launched, arrived, span, cell.method)
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": "seconds"}, "range": [0, span]},
        "yaxis": {
            "tickvals": list(lanes.values()),
            "ticktext": [label(name) for name in lanes],
            "range": [-0.6, len(cells) - 0.4],
            "automargin": True,
            "ticklabelstandoff": 6,
        },
        "height": 130 + 44 * len(cells),
    }
    edge = {"width": 1, "color": "@paper"}
    traces = [
        compute.trace({"color": "@compute", "line": edge}),
        waits.trace({"color": "@wait", "line": edge}),
        air.trace({"color": "@air", "opacity": 0.75, "line": {"width": 0}}),
    ]
    return {"data": [trace for trace in traces if trace["x"]], "layout": layout}


class _Lane:
    """Bars of one meaning."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bars: list[tuple[float, float, float, str]] = []

    def add(self, y: float, start: float, end: float, span: float, method: str) -> None:
        end = min(end, span)
        if end > start:
            self._bars.append((y, start, end, method))

    def trace(self, marker: dict[str, Any]) -> Figure:
        return {
            "type": "bar",
            "orientation": "h",
            "name": self._name,
            "y": [bar[0] for bar in self._bars],
            "base": [round(bar[1], 4) for bar in self._bars],
            "x": [round(bar[2] - bar[1], 4) for bar in self._bars],
            "width": 0.3,
            "marker": marker,
            "customdata": [label(bar[3]) for bar in self._bars],
            "hovertemplate": f"{self._name}, %{{x:.3f}} s<extra>%{{customdata}}</extra>",
        }


def _span(cells: list[Cell]) -> float:
    """Seconds to show: two steps of the slowest, eight of the fastest, if there are as many."""
    ends = [cell.timeline["steps"] for cell in cells if cell.timeline]
    if not ends:
        return 1.0
    mean = [steps[-1] / len(steps) for steps in ends]
    longest = max(steps[-1] for steps in ends)
    return float(min(longest, max(2.2 * max(mean), 8 * min(mean))))
