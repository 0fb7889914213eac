"""Names and messages of files and peers: shown on a terminal, and never obeyed by it."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.report.test_live import STEP, SUMMARY
from tests.report.test_top import record, write
from thinwire.errors import UsageError
from thinwire.report.live import Display
from thinwire.report.race_display import RaceDisplay
from thinwire.report.table import print_summary
from thinwire.report.top import TopConfig, top

NAME = "[red]a[nonsense] \x1b]0;owned\x07\x9b2J"
SHOWN = "[red]a[nonsense] \\x1b]0;owned\\x07\\x9b2J"


def screen(terminal: bool) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=160, color_system=None)


def seen(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b]" not in text
    assert "\x07" not in text
    assert "\x9b" not in text
    return text


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_of_a_run(terminal: bool) -> None:
    console = screen(terminal)
    with Display(10, NAME, console) as display:
        display.update(STEP)
        display.print(f"worker0 | {NAME}")
    text = seen(console)
    assert f"worker0 | {SHOWN}" in text
    assert text.count(SHOWN) >= 2


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_of_a_comparison(terminal: bool) -> None:
    console = screen(terminal)
    with RaceDisplay(f"title {NAME}", [NAME], 100, "tokens", console) as display:
        display.update(NAME, STEP | {"tokens": 50})
        display.print(NAME)
    text = seen(console)
    assert f"title {SHOWN}" in text
    assert text.count(SHOWN) >= 2


def test_the_closing_table() -> None:
    console = screen(False)
    print_summary(SUMMARY | {"method": NAME, "noise_scale_reading": NAME}, console)
    assert seen(console).count(SHOWN) == 2


def run_of(folder: Path, **changes: Any) -> Path:
    write(folder, 0, [record(1, **changes)])
    (folder / "config.json").write_text(json.dumps({"method": NAME, "steps": NAME}))
    return folder


def test_a_run_that_is_watched(tmp_path: Path) -> None:
    console = screen(False)
    folder = run_of(tmp_path / "run", lag=NAME)
    (folder / "summary.json").write_text(json.dumps({"stopped_by": NAME}))
    top(TopConfig(str(folder), once=True), console)
    assert seen(console).count(SHOWN) >= 3


def test_a_comparison_that_is_watched(tmp_path: Path) -> None:
    console = screen(False)
    heat = tmp_path / "10mbit" / "seed-0"
    run_of(heat / NAME)
    (heat / "heat.json").write_text(json.dumps({"rate": NAME, "seed": 0}))
    (tmp_path / "compare.json").write_text("{}")
    top(TopConfig(str(tmp_path), once=True), console)
    assert seen(console).count(SHOWN) >= 2


@pytest.mark.parametrize(
    "line",
    [b"[" * 100_000, b"{}", b"3", b'{"kind": "step"}', b"\xff", b" " * (1 << 20)],
)
def test_metrics_of_another_form_are_one_line(tmp_path: Path, line: bytes) -> None:
    folder = run_of(tmp_path / "run")
    (folder / "metrics" / "rank-0.jsonl").write_bytes(line + b"\n")
    with pytest.raises(UsageError, match=r"are damaged|a line has more"):
        top(TopConfig(str(folder), once=True), screen(False))


@pytest.mark.parametrize("place", ["metrics", "metrics/rank-0.jsonl"])
def test_metrics_that_are_a_link_are_not_followed(tmp_path: Path, place: str) -> None:
    folder = run_of(tmp_path / "run")
    metrics = folder / place
    metrics.rename(tmp_path / "elsewhere")
    metrics.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="it is a symbolic link"):
        top(TopConfig(str(folder), once=True), screen(False))
