"""The display of a run, on a terminal and elsewhere."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from thinwire.report.live import Display
from thinwire.report.table import print_summary

STEP = {
    "kind": "step",
    "step": 3,
    "loss": 4.25,
    "tokens_per_s": 12345.6,
    "bytes": 2_500_000,
    "exposed": 1.0,
    "hidden": 0.5,
    "seconds": 4.0,
    "skipped": 0,
}
SUMMARY = {
    "method": "ddp",
    "workers": 2,
    "step": 7,
    "stopped_by": None,
    "tokens": 1000,
    "seconds": 4.0,
    "tokens_per_s": 250.0,
    "bytes": 4_000_000.0,
    "bytes_per_token": 4000.0,
    "exposed": 1.0,
    "hidden": 0.5,
    "skipped": 0,
    "loss": 4.25,
    "val_loss": 4.5,
}


def shown(records: list[dict[str, Any]], terminal: bool, width: int = 120) -> str:
    console = Console(file=StringIO(), force_terminal=terminal, width=width)
    with Display(10, "ddp", console) as display:
        for record in records:
            display.update(record)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_plain_lines_away_from_a_terminal() -> None:
    text = shown([STEP, {**STEP, "step": 4}, {"kind": "eval", "step": 4, "val_loss": 4.5}], False)
    assert text.splitlines() == [
        "ddp 3/10  loss 4.250  12,346 tokens/s  2.5 MB sent  25% waiting",
        "ddp 4/10  loss 4.250  val 4.500  12,346 tokens/s  2.5 MB sent  25% waiting",
    ]  # step 4 alone came too soon after step 3
    assert "\x1b" not in text


def test_a_bar_on_a_terminal() -> None:
    text = shown([STEP, {**STEP, "step": 10}], True)
    assert "\x1b" in text
    assert "━" in text
    assert "10/10" in text
    assert "2.5 MB sent" in text


@pytest.mark.parametrize("loss", [None, float("nan")])
def test_a_loss_that_is_not_finite_is_not_hidden(loss: float | None) -> None:
    text = shown([STEP, {**STEP, "step": 10, "loss": loss, "skipped": 1}], False)
    assert text.splitlines()[-1].startswith("ddp 10/10  loss not finite  ")
    assert "1 skipped" in text


def test_a_line_of_a_worker_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=StringIO(), force_terminal=False, width=20)
    with Display(10, "ddp", console) as display:
        display.print("worker0 | [red]a line far longer than the console is wide[/red] :smile:")
        display.print("worker0 | oh no", error=True)
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().splitlines() == [
        "worker0 | [red]a line far longer than the console is wide[/red] :smile:"
    ]
    assert capsys.readouterr().err == "worker0 | oh no\n"


def summary(**changes: Any) -> str:
    console = Console(file=StringIO(), force_terminal=False, width=80)
    print_summary(SUMMARY | changes, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_summary_fits_a_narrow_terminal() -> None:
    text = summary(tokens_per_s=1234567.0, bytes=1e12, exposed=12345.6, hidden=99999.9)
    assert "1,234,567" in text
    assert "500 GB" in text
    assert "…" not in text
    (header,) = [line for line in text.splitlines() if "method" in line]
    assert all(name in header for name in ("tokens/s", "exposed", "hidden", "loss", "val loss"))


def test_the_summary_says_what_was_not_measured_or_skipped() -> None:
    assert "7 steps on 1 worker\n" in summary(workers=1).replace(" \n", "\n").replace("  ", "")
    row = [line for line in summary(loss=None, val_loss=float("nan")).splitlines() if "ddp" in line]
    assert row[0].count(" - ") == 2
    assert "skipped" not in summary()
    assert "1 step was skipped: its values were not finite" in summary(skipped=1)
    assert "3 steps were skipped: their values were not finite" in summary(skipped=3)
