"""`thinwire top`: a run as its files show it."""

import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from thinwire.errors import UsageError
from thinwire.report.top import Run, TopConfig, course, find, top


def record(step: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "kind": "step",
        "step": step,
        "loss": 5.0 - 0.1 * step,
        "tokens": 1000 * step,
        "tokens_per_s": 500.0,
        "seconds": 2.0 * step,
        "bytes": 1_000_000 * step,
        "exposed": 0.5 * step,
        "hidden": 1.5 * step,
        "lag": 8,
        "skipped": 0,
    }
    return values | changes


def write(run: Path, rank: int, records: list[dict[str, Any]], how: str = "a") -> None:
    path = run / "metrics" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(how) as file:
        file.write("".join(json.dumps(r) + "\n" for r in records))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write(folder, 0, [record(step) for step in range(1, 11)])
    write(folder, 1, [record(step) for step in range(1, 9)])
    write(folder, 0, [{"kind": "eval", "step": 10, "val_loss": 3.25}])
    (folder / "config.json").write_text(json.dumps({"method": "overlapped", "steps": 40}))
    return folder


def shown(folder: Path, **flags: Any) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    assert top(TopConfig(str(folder), once=True, **flags), console) == 0
    return console.export_text()


def test_every_worker_has_a_row(run: Path) -> None:
    text = shown(run)
    assert "overlapped  step 10 of 40  running" in text
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    place = next(number for number, cells in enumerate(lines) if cells[0] == "worker")
    first, second = lines[place + 1 : place + 3]
    assert first == ["0", "10", "0", "4.000", "500", "10 MB", "25%", "75%", "8", "0"]
    assert second[:3] == ["1", "8", "2"]
    assert "val loss 3.250" in text
    assert "loss 4.900 █" in text


def test_it_follows_a_run_that_goes_on(run: Path) -> None:
    watched = Run(run)
    watched.read()
    write(run, 0, [record(11)])
    with (run / "metrics" / "rank-0.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 12')  # the writer is not done with it
    watched.read()
    assert watched.workers[0].last["step"] == 11
    with (run / "metrics" / "rank-0.jsonl").open("a") as file:
        file.write(json.dumps(record(12)).removeprefix('{"kind": "step", "step": 12') + "\n")
    watched.read()
    assert watched.workers[0].last["step"] == 12
    # A resumed run writes a new file, with fewer steps at first.
    aside = run / "metrics" / "rank-0.tmp"
    aside.write_text(json.dumps(record(5)) + "\n")
    aside.replace(run / "metrics" / "rank-0.jsonl")
    watched.read()
    assert watched.workers[0].last["step"] == 5
    assert watched.workers[0].losses == [4.5]


def test_after_the_fact(run: Path) -> None:
    (run / "summary.json").write_text(json.dumps({"stopped_by": None}))
    assert "finished" in shown(run)
    (run / "summary.json").write_text(json.dumps({"stopped_by": "SIGINT"}))
    assert "stopped by SIGINT" in shown(run)


def test_a_run_that_says_nothing_is_called_so(run: Path) -> None:
    long_ago = time.time() - 600
    for path in (run / "metrics").iterdir():
        os.utime(path, (long_ago, long_ago))
    assert "no news for 60" in shown(run)


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    assert "starting" in shown(tmp_path)


def test_a_loss_that_is_not_finite(run: Path) -> None:
    write(run, 0, [record(11, loss=None)])
    assert " - " in shown(run)


def test_a_comparison_is_shown_method_by_method(tmp_path: Path, run: Path) -> None:
    heat = tmp_path / "race" / "100mbit" / "seed-0"
    for name in ("none", "ddp"):
        write(heat / name, 0, [record(step) for step in range(1, 4)])
    (tmp_path / "race" / "compare.json").write_text("{}")
    assert "starting" in shown(tmp_path / "race")
    (heat / "heat.json").write_text(json.dumps({"rate": "100mbit", "seed": 0}))
    (heat / "active.json").write_text(json.dumps({"contestant": "ddp"}))
    text = shown(tmp_path / "race")
    assert "race  100mbit, seed 0  running" in text
    rows = [line.split()[0] for line in text.splitlines()[2:] if line.strip()]
    assert rows == ["none", "ddp"], "the yardstick, then as they were asked for"


def test_a_comparison_that_goes_on_after_its_report_is_running(tmp_path: Path) -> None:
    race = tmp_path / "race"
    heat = race / "100mbit" / "seed-0"
    write(heat / "ddp", 0, [record(1)])
    (race / "compare.json").write_text("{}")
    (heat / "heat.json").write_text(json.dumps({"rate": "100mbit", "seed": 0}))
    (race / "report.html").write_text("")
    assert "ended" in shown(race)
    later = time.time() + 60
    os.utime(heat / "heat.json", (later, later))
    assert "running" in shown(race)


def test_bad_input(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UsageError, match="is no directory"):
        find(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="neither a run nor a comparison"):
        find(tmp_path / "empty")
    with pytest.raises(UsageError, match="--interval takes seconds > 0"):
        top(TopConfig(str(run), interval=0.0))


def test_the_course_of_a_loss() -> None:
    assert course([]) == ""
    assert course([2.0]) == "2.000 ▁ 2.000"
    assert course([4.0, 3.0, 2.0]) == "4.000 █▅▁ 2.000"
    assert len(course([float(n) for n in range(1000)]).split()[1]) == 60
