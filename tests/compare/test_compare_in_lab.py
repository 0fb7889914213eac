"""`thinwire compare`, whole: real workers on emulated hosts, interrupted and taken up again."""

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.programs import Program, Start, corpus, steps_done, thinwire  # noqa: F401
from thinwire.compare import records
from thinwire.errors import LabError
from thinwire.lab import Lab, Link

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def lab() -> None:
    try:
        with Lab(2, Link.of("1gbit")):
            pass
    except LabError as error:
        pytest.skip(str(error))
    return


def start(thinwire: Start, corpus: str, *flags: str) -> Program:
    common = ["--methods", "ddp,overlapped,powersgd", "--hosts", "2", "--delay", "1ms"]
    common += ["--data", corpus, "--context", "16", "--batch", "2", "--warmup", "2"]
    common += ["--eval-windows", "8", "--steps", "12", "--evals", "4", "--overtime", "1"]
    common += ["--set", "overlapped.every=2", "powersgd.dense-steps=40"]
    return thinwire("compare", *common, "--run", "race", *flags)


def losses(rate: str, method: str) -> dict[int, float | None]:
    return records.step_losses(Path("race") / rate / "seed-0" / method, 0)


def test_a_comparison_interrupted_and_taken_up(thinwire: Start, corpus: str) -> None:
    rates = ["--rate", "200mbit"]
    first = start(thinwire, corpus, *rates)
    heat = Path("race/200mbit/seed-0")
    first.until(lambda: steps_done(heat / "overlapped") >= 4, within=150)
    first.signal(signal.SIGINT)
    assert first.wait(150) == 130, first.err
    assert "of what was asked for" in first.out
    unfinished = [line for line in first.out.splitlines() if line.endswith(": not finished")]
    assert any("ddp" in line for line in unfinished), first.out  # methods of one fate share a line
    assert "interrupted: the same command" in first.out
    before = losses("200mbit", "ddp")
    assert 0 < len(before) < 12
    other = start(thinwire, corpus, *rates, "--steps", "13")
    assert other.wait() == 2
    assert "was made with --steps 12, this one has --steps 13" in other.err

    again = start(thinwire, corpus, *rates, "--json")
    assert again.wait(150) == 0, again.err
    for step, loss in before.items():
        assert losses("200mbit", "ddp")[step] == loss
    table = json.loads(again.out)
    assert "the report is in race/report.html" in again.err
    _check_table(table)
    _check_files(table)
    _check_report_again(thinwire)


def _check_table(table: dict[str, Any]) -> None:
    assert table["rates"] == ["200mbit"]
    cells = {(cell["rate"], cell["method"]): cell for cell in table["cells"]}
    assert len(cells) == 4
    for (rate, method), cell in cells.items():
        assert cell["status"] == "finished", cell
        assert cell["tokens"] == 12 * 2 * 2 * 16
        if method == "none":
            assert cell["bytes_per_token"] == 0
            continue
        # The kernel's count also has headers, and the pulse of a few bytes.
        counted, seen = cell["bytes_per_token"], cell["wire_bytes_per_token"]
        assert counted == pytest.approx(seen, rel=0.05), (rate, method)
        assert cell["val_loss"]["value"] > 0
    ddp = cells["200mbit", "ddp"]
    assert ddp["sooner"] == pytest.approx(1.0)
    assert 0 < ddp["efficiency"]["value"] < 1


def _check_files(table: dict[str, Any]) -> None:
    with open("race/table.csv") as file:
        assert len(list(csv.DictReader(file))) == 4
    whole = json.loads(Path("race/comparison.json").read_text())
    assert whole["target"] == table["target"]
    assert all(cell["curve"] for cell in whole["cells"])
    assert all(cell["timeline"]["steps"] for cell in whole["cells"])
    assert "What 2 hosts at 200mbit" in Path("race/report.html").read_text()


def _check_report_again(thinwire: Start) -> None:
    Path("race/report.html").unlink()
    report = thinwire("report", "race")
    assert report.wait() == 0, report.err
    assert Path("race/report.html").exists()
    assert "200mbit, 2 hosts, 12 steps" in report.out
    top = thinwire("top", "race")
    assert top.wait() == 0, top.err
    assert "200mbit, seed 0  ended" in top.out
    nothing = thinwire("report", "nowhere")
    assert nothing.wait() == 2
    assert "nowhere holds no comparison" in nothing.err
