"""The table of a comparison, on a terminal and as CSV."""

import csv
import io

import pytest
from rich.console import Console

from tests.report.samples import METHODS, sample
from thinwire.report.comparison import UNFINISHED
from thinwire.report.comparison_table import csv_text, notes, print_comparison


def printed(width: int = 120, **changes: object) -> str:
    output = io.StringIO()
    console = Console(width=width, file=output)
    comparison = sample()
    for name, value in changes.items():
        setattr(comparison, name, value)
    print_comparison(comparison, console)
    return output.getvalue()


def row(text: str, method: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"│ {method} "))


def test_every_figure_is_there() -> None:
    text = printed()
    assert "100mbit, 4 hosts, 100 steps" in text
    assert "970" in row(text, "overlapped")
    assert "0.97 ±.02" in row(text, "overlapped")
    assert "400 B" in row(text, "overlapped")
    assert "0.050" in row(text, "overlapped")
    assert "2.100 ±.010" in row(text, "overlapped")
    assert "30.0 s (75%)" in row(text, "ddp")
    assert "3.53x" in row(text, "overlapped")
    assert "2.050, where ddp ended" in text


@pytest.mark.parametrize(
    ("width", "missing"), [(120, []), (100, ["bytes/token", "waiting"]), (80, "all")]
)
def test_it_fits_the_terminal(width: int, missing: list[str] | str) -> None:
    console = Console(width=width, record=True, force_terminal=True, file=io.StringIO())
    print_comparison(sample(["100mbit"]), console)
    lines = console.export_text().splitlines()
    assert all("…" not in line for line in lines)
    assert max(len(line.rstrip()) for line in lines if line.startswith(("│", "┃"))) <= width
    said = [line for line in lines if line.startswith("a wider terminal")]
    expected = ["bytes/token", "waiting", "tokens/s"] if missing == "all" else missing
    assert said == ([f"a wider terminal also shows {', '.join(expected)}"] if expected else [])


def test_a_file_gets_the_whole_table() -> None:
    assert "0.97 ±.02" in row(printed(width=40), "overlapped")


def test_nothing_is_left_out_silently() -> None:
    said = notes(sample(), "10mbit")
    assert said == [
        "ddp: timed for part of the budget; the rest is computed",
        "eager: diverged: step 90: the loss is not finite",
        "power<sgd>: could not run: RuntimeError: <gloo> has gone",
    ]
    for line in said:
        assert line in printed()
    assert "~" in row(printed().split("10mbit, 4 hosts")[1], "ddp")


def test_several_rates_give_a_grid() -> None:
    assert "all rates" in printed()
    assert "all rates" not in printed(rates=["100mbit"])


def test_one_that_is_not_finished_says_how_far_it_came() -> None:
    text = printed(asked=40_000)
    assert "(25% of what was asked for)" in text
    comparison = sample()
    comparison.cells[1].status = UNFINISHED
    assert "ddp: not finished" in notes(comparison, "100mbit")


def test_without_a_baseline_there_is_nothing_to_hold_against() -> None:
    text = printed(baseline=None, target=None)
    assert "of none" in text
    assert "ddp's loss" not in text
    assert "sooner" not in text.split("all rates")[0]


def test_csv_has_a_line_for_each_method_and_rate() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(sample()))))
    assert len(rows) == 2 * len(METHODS)
    ddp = next(r for r in rows if (r["method"], r["rate"]) == ("ddp", "100mbit"))
    assert float(ddp["efficiency"]) == pytest.approx(0.25)
    assert float(ddp["efficiency_plus_minus"]) == pytest.approx(0.02)
    assert rows[5]["status"] == "failed"
    assert rows[5]["efficiency"] == ""
