"""From a directory of records to the figures of the table."""

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.compare import records
from thinwire.compare.config import parse
from thinwire.compare.results import gather
from thinwire.errors import UsageError
from thinwire.report.comparison import CUT, DIVERGED, FAILED, FINISHED, UNFINISHED
from thinwire.train.flags import flat_values

STEP = 2 * 4 * 16  # tokens of a step of both hosts


def settings(run: Path, *flags: str) -> None:
    common = ["--hosts", "2", "--batch", "4", "--context", "16", "--steps", "40", "--evals", "4"]
    config = parse([*common, "--methods", "ddp,co2", *flags])
    stored = {"settings": flat_values(config), "machine": {}, "unit": "tokens", "step": STEP}
    records.write_json(run / records.SETTINGS, stored)


def write(
    run: Path,
    rate: str,
    method: str,
    *,
    step_seconds: list[float],
    step_bytes: float = 0.0,
    losses: list[float] | None = None,
    why: str | None = records.BUDGET,
    message: str = "",
    seed: int = 0,
) -> None:
    """One turn of ten steps for each of `step_seconds`."""
    folder = records.heat_folder(run, rate, seed) / method
    seconds = 0.0
    for cycle, each in enumerate(step_seconds):
        seconds += 10 * each
        step = 10 * (cycle + 1)
        totals: dict[str, Any] = {
            "bytes": 2 * step * step_bytes,
            "most_bytes": step * step_bytes,
            "wire_bytes": 2.06 * step * step_bytes,
            "exposed": seconds / 4,
            "hidden": 0.0,
        }
        records.append(
            folder,
            "turn",
            cycle=cycle,
            step=step,
            tokens=step * STEP,
            wall=10 * each,
            seconds=seconds,
            **totals,
        )
        if losses is not None and cycle < len(losses):
            records.append(folder, "eval", step=step, tokens=step * STEP, val_loss=losses[cycle])
    if why is not None:
        records.append(folder, "end", why=why, message=message)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """At 1 Gbit/s everything was run; at 10 Mbit/s ddp was cut in the second of four cycles."""
    settings(tmp_path, "--rate", "10mbit,1gbit")
    fast = {"none": 0.1, "ddp": 0.2, "co2": 0.125}
    curves = {
        "none": [5.0, 4.8, 4.6, 4.5],
        "ddp": [4.0, 3.5, 3.2, 3.0],
        "co2": [4.4, 3.8, 3.4, 3.2, 3.0, 2.9],
    }
    sent = {"none": 0.0, "ddp": 1000.0, "co2": 50.0}
    for name, each in fast.items():
        losses = curves[name]
        walls = [each] * len(losses)
        write(
            run=tmp_path,
            rate="1gbit",
            method=name,
            step_seconds=walls,
            losses=losses,
            step_bytes=sent[name],
        )
    slow = {"none": [0.1] * 4, "ddp": [1.0, 2.0], "co2": [0.2] * 4}
    for name, walls in slow.items():
        why = records.LIMIT if name == "ddp" else records.BUDGET
        write(tmp_path, "10mbit", name, step_seconds=walls, step_bytes=sent[name], why=why)
    return tmp_path


def test_the_fastest_rate(run: Path) -> None:
    comparison = gather(run)
    assert comparison.rates == ["1gbit", "10mbit"]
    assert comparison.methods == ["none", "ddp", "co2"]
    assert comparison.budget == comparison.asked == 40 * STEP
    assert comparison.steps == 40
    assert comparison.target is not None
    assert comparison.target.value == 3.0
    ddp, co2 = comparison.cell("1gbit", "ddp"), comparison.cell("1gbit", "co2")
    assert ddp is not None
    assert co2 is not None
    assert ddp.status == FINISHED
    assert ddp.tokens_per_s == pytest.approx(STEP / 0.2)
    assert ddp.efficiency is not None
    assert ddp.efficiency.value == pytest.approx(0.5)
    assert ddp.efficiency.plus_minus == pytest.approx(0.0)
    assert ddp.seconds == pytest.approx(8.0)
    assert ddp.exposed == pytest.approx(2.0)
    assert ddp.bytes_per_token == pytest.approx(2000 / STEP)
    assert ddp.wire_bytes_per_token == pytest.approx(2060 / STEP)
    assert ddp.wire_limit == pytest.approx(1.25e8 / (1000 / STEP))
    assert ddp.compute_limit == pytest.approx(STEP / 0.1)
    assert ddp.sooner == pytest.approx(1.0)
    assert co2.val_loss is not None
    assert co2.val_loss.value == 3.2  # at equal tokens, not where it ended
    assert co2.bytes_ratio == pytest.approx(0.05)
    assert co2.time_to_loss is not None
    assert co2.time_to_loss.value == pytest.approx(50 * 0.125)  # in its overtime
    assert co2.sooner == pytest.approx(8.0 / 6.25)
    assert not co2.computed
    assert [point.tokens for point in co2.curve] == [10 * n * STEP for n in range(1, 7)]
    assert co2.curve[1].bytes == pytest.approx(20 * 50)
    none = comparison.cell("1gbit", "none")
    assert none is not None
    assert none.time_to_loss is None


def test_a_slower_rate_takes_its_losses_from_the_fastest(run: Path) -> None:
    comparison = gather(run)
    ddp, co2 = comparison.cell("10mbit", "ddp"), comparison.cell("10mbit", "co2")
    assert ddp is not None
    assert co2 is not None
    assert ddp.status == CUT
    assert ddp.computed
    # The second half of what was timed took 2 s a step, and there are 20 more.
    assert ddp.seconds == pytest.approx(30 + 20 * 2.0)
    assert ddp.val_loss is not None
    assert ddp.val_loss.value == 3.0
    assert ddp.curve[-1].seconds == pytest.approx(70.0)
    assert co2.time_to_loss is not None
    assert co2.time_to_loss.value == pytest.approx(50 * 0.2)
    assert co2.computed  # the last ten steps were not run at this rate
    assert co2.sooner == pytest.approx(7.0)


def test_what_can_not_be_computed_is_left_open(run: Path) -> None:
    """A method that sends more at first than later, cut before it changed."""
    folder = records.heat_folder(run, "1gbit", 0) / "ddp"
    lines = (folder / records.TURNS).read_text().splitlines()
    changed = []
    for line in lines:
        record = json.loads(line)
        if record["kind"] == "turn" and record["cycle"] > 1:
            record["bytes"] = 2 * 20 * 1000.0
        changed.append(json.dumps(record) + "\n")
    (folder / records.TURNS).write_text("".join(changed))
    ddp = gather(run).cell("10mbit", "ddp")
    assert ddp is not None
    assert ddp.seconds is None
    assert ddp.time_to_loss is None
    assert "cut after 50% of the budget, and what it sends changes later" in ddp.message


def test_seeds_give_a_spread(run: Path) -> None:
    stored = json.loads((run / records.SETTINGS).read_text())
    stored["settings"]["seeds"] = 2
    records.write_json(run / records.SETTINGS, stored)
    for name, losses in (("ddp", [4.0, 3.5, 3.2, 3.1]), ("co2", [4.4, 3.8, 3.4, 3.1])):
        walls = [0.2] * 4
        write(run, "1gbit", name, step_seconds=walls, losses=losses, step_bytes=1.0, seed=1)
    comparison = gather(run)
    assert comparison.target is not None
    assert comparison.target.value == pytest.approx(3.05)
    assert comparison.target.plus_minus == pytest.approx(0.05)
    co2 = comparison.cell("1gbit", "co2")
    assert co2 is not None
    assert co2.time_to_loss is not None
    assert co2.time_to_loss.value == pytest.approx((6.25 + 8.0) / 2)


def test_an_interrupted_comparison_is_held_at_what_all_have_read(tmp_path: Path) -> None:
    settings(tmp_path, "--rate", "100mbit")
    walls = {"none": [0.1] * 2, "ddp": [0.3] * 2, "co2": [0.1]}
    for name, each in walls.items():
        losses = [4.0, 3.0][: len(each)]
        write(tmp_path, "100mbit", name, step_seconds=each, losses=losses, why=None)
    comparison = gather(tmp_path)
    assert comparison.budget == 10 * STEP
    assert comparison.asked == 40 * STEP
    assert {cell.status for cell in comparison.cells} == {UNFINISHED}
    ddp = comparison.cell("100mbit", "ddp")
    assert ddp is not None
    assert ddp.val_loss is not None
    assert ddp.val_loss.value == 4.0


def test_the_failed_and_the_diverged_have_a_place(run: Path) -> None:
    for name, why in (("eager", records.DIVERGED), ("powersgd", records.FAILED)):
        write(run, "1gbit", name, step_seconds=[], why=why, message="because")
    comparison = gather(run)
    assert comparison.methods == ["none", "ddp", "co2", "eager", "powersgd"]
    assert comparison.budget == 40 * STEP
    statuses = {cell.method: cell.status for cell in comparison.at("1gbit")}
    assert statuses["eager"] == DIVERGED
    assert statuses["powersgd"] == FAILED
    assert all(c.message == "because" for c in comparison.at("1gbit")[3:])


def test_noise_is_in_the_spread(tmp_path: Path) -> None:
    settings(tmp_path, "--rate", "100mbit")
    write(tmp_path, "100mbit", "none", step_seconds=[9.0, 0.1, 0.1, 0.1, 0.1])
    write(tmp_path, "100mbit", "ddp", step_seconds=[9.0, 0.2, 0.3, 0.2, 0.3])
    ddp = gather(tmp_path).cell("100mbit", "ddp")
    assert ddp is not None
    assert ddp.efficiency is not None
    assert ddp.efficiency.value == pytest.approx(0.4)  # without the first cycle
    # The jackknife of a ratio with an even denominator: the standard error of the mean.
    assert ddp.efficiency.plus_minus == pytest.approx(0.092, abs=0.005)


def test_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no comparison"):
        gather(tmp_path)
    (tmp_path / records.SETTINGS).write_text("{")
    with pytest.raises(UsageError, match="cannot read"):
        gather(tmp_path)
