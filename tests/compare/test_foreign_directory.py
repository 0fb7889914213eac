"""`thinwire report` and `thinwire top` on a directory that somebody else has made."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.compare.test_results import run, settings, write  # noqa: F401
from thinwire.cli import main
from thinwire.compare import records

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def change(run: Path, **values: Any) -> None:
    """Settings in the comparison's own file."""
    path = run / records.SETTINGS
    stored = json.loads(path.read_text())
    stored["settings"] |= values
    path.write_text(json.dumps(stored))


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("thinwire: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Somebody's, with a file that is none of a report's business."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"token": "hunter2"}))
    return folder


def test_a_method_named_like_a_path(
    run: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("../../home", str(home), ".."):
        change(run, methods=f"ddp,{name}")
        assert f"a method takes a name that is no path, got {name!r}" in refused(
            capsys, "report", str(run)
        )
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("place", ["1gbit", "1gbit/seed-0/ddp", "1gbit/seed-0/ddp/config.json"])
def test_a_link_to_elsewhere(
    run: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    if (run / place).exists():
        (run / place).rename(home / "moved")
    (run / place).symlink_to(home / ("moved" if (home / "moved").exists() else "config.json"))
    assert "it is a symbolic link" in refused(capsys, "report", str(run))


@pytest.mark.parametrize("name", ["report.html", "table.csv", "comparison.json", "comparison.tmp"])
def test_a_link_that_waits_for_the_report(
    run: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    target = home / "config.json"
    before = target.read_text()
    (run / name).symlink_to(target)
    assert main(["report", str(run)]) == 0
    assert target.read_text() == before
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert not (run / "report.html").is_symlink()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (records.SETTINGS, "[" * 100_000),
        (records.SETTINGS, '{"settings": ' + "[" * 900 + "]" * 900 + "}"),
        (records.SETTINGS, "[]"),
        ("1gbit/seed-0/ddp/turns.jsonl", "[" * 100_000 + "\n"),
        ("1gbit/seed-0/ddp/turns.jsonl", '{"kind": "turn"}\n'),
        ("1gbit/seed-0/ddp/turns.jsonl", "null\n"),
        ("1gbit/seed-0/ddp/config.json", "[" * 100_000 + "]" * 100_000),
        ("1gbit/seed-0/lab.json", "3"),
    ],
)
def test_damaged_records_are_one_line(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    content: str,
) -> None:
    (run / file).write_text(content)
    refused(capsys, "report", str(run))
    assert not (run / "report.html").exists()


def test_settings_that_ask_for_too_much(
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(run, seeds=10**12)
    assert "--seeds takes a whole number below 2**31" in refused(capsys, "report", str(run))
    change(run, seeds=10**6)
    assert "seeds takes 1 to 10000" in refused(capsys, "report", str(run))
    (run / records.SETTINGS).write_bytes(b" " * (1 << 20))
    assert "more than 65536" in refused(capsys, "report", str(run))


def test_a_pipe_in_the_place_of_records_is_not_waited_for(
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    turns = run / "1gbit" / "seed-0" / "ddp" / "turns.jsonl"
    turns.unlink()
    os.mkfifo(turns)
    assert "it is no regular file" in refused(capsys, "report", str(run))


def test_words_of_others_are_shown_and_do_nothing(
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"[red]{ESCAPE}x"
    write(run, "1gbit", name, step_seconds=[1.0], why=records.FAILED, message=f"=1+1{ESCAPE}[/]")
    write(run, "1gbit", "=cmd", step_seconds=[1.0], why=records.FAILED, message="-1.5e3")
    assert main(["report", str(run)]) == 0
    shown = capsys.readouterr().out
    for text in (shown, *((run / n).read_text() for n in ("report.html", "table.csv"))):
        assert "\x1b]0" not in text
        assert "\x07" not in text
        assert "\\x1b]0;owned\\x07" in text
    assert "[red]" in shown
    with (run / "table.csv").open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file) if row["rate"] == "1gbit"}
    assert "=cmd" not in rows
    assert rows["'=cmd"]["message"] == "-1.5e3", "a number is no formula"
    assert next(r for n, r in rows.items() if n.startswith("[red]"))["message"].startswith("'=1+1")


def test_an_error_of_the_command_line_moves_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "report", str(tmp_path / f"a{ESCAPE}"))
    assert "\x1b" not in said
    assert "\\x1b" in said
