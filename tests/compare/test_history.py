"""From records to curves, and to what was not run."""

import math
from pathlib import Path

import pytest

from thinwire.compare import records
from thinwire.compare.history import History


def write(folder: Path, turns: list[tuple[int, float, float]], losses: list[float]) -> History:
    """Turns of (tokens, seconds so far, bytes so far), each followed by its evaluation."""
    before = 0.0
    for cycle, (tokens, seconds, sent) in enumerate(turns):
        records.append(
            folder,
            "turn",
            cycle=cycle,
            step=tokens // 10,
            tokens=tokens,
            wall=seconds - before,
            seconds=seconds,
            bytes=sent,
        )
        before = seconds
        if cycle < len(losses):
            records.append(folder, "eval", step=0, tokens=tokens, val_loss=losses[cycle])
    return History.read(folder)


def test_totals_between_turns_and_beyond_them(tmp_path: Path) -> None:
    course = write(tmp_path, [(100, 10.0, 0), (200, 20.0, 50), (400, 60.0, 250)], [])
    assert course.total("seconds", 50) == 5.0
    assert course.total("seconds", 300) == 40.0
    assert course.total("seconds", 400) == 60.0
    assert course.total("bytes", 400) == 250
    # The second half went at 5 tokens a second.
    assert course.total("seconds", 500) == pytest.approx(80.0)
    assert course.slope("bytes") == pytest.approx(1.0)


def test_a_loss_is_read_off_between_evaluations(tmp_path: Path) -> None:
    course = write(tmp_path, [(100, 1, 0), (200, 2, 0), (300, 3, 0)], [5.0, 4.0, 3.5])
    assert course.loss_at(200) == 4.0
    assert course.loss_at(250) == pytest.approx(3.75)
    assert course.loss_at(50) is None
    assert course.loss_at(301) is None
    assert course.tokens_to(4.5) == pytest.approx(150)
    assert course.tokens_to(3.5) == pytest.approx(300)
    assert course.tokens_to(6.0) == 100  # it was there at the first look
    assert course.tokens_to(3.4) is None


def test_a_loss_that_is_not_finite_is_no_loss(tmp_path: Path) -> None:
    course = write(tmp_path, [(100, 1, 0), (200, 2, 0)], [5.0, math.nan])
    assert course.loss_at(100) == 5.0
    assert course.loss_at(200) is None
    assert course.tokens_to(4.0) is None


def test_only_a_steady_run_is_continued_on_paper(tmp_path: Path) -> None:
    even = write(tmp_path / "even", [(100, 1, 100), (200, 2, 200), (300, 3, 300)], [])
    later = write(tmp_path / "later", [(100, 1, 100), (200, 2, 110), (300, 3, 120)], [])
    cut = write(tmp_path / "cut", [(50, 9, 50), (100, 18, 100)], [])
    assert cut.steady(even, 300)
    assert not cut.steady(later, 300)  # it sends less after what was timed
    assert cut.steady(later, 100)  # nothing is left to compute
    assert not cut.steady(cut, 300)  # nobody knows


def test_turns_of_one_cycle_belong_together(tmp_path: Path) -> None:
    course = write(tmp_path, [(100, 10.0, 0)], [])
    for tokens, wall in ((130, 2.0), (200, 5.0)):
        records.append(tmp_path, "turn", cycle=1, tokens=tokens, wall=wall, seconds=0, bytes=0)
    course = History.read(tmp_path)
    assert course.walls() == {0: (10.0, 100.0), 1: (7.0, 100.0)}


def test_half_a_line_is_no_record(tmp_path: Path) -> None:
    write(tmp_path, [(100, 1.0, 0)], [5.0])
    with (tmp_path / records.TURNS).open("a") as file:
        file.write('{"kind": "end", "why"')
    course = History.read(tmp_path)
    assert course.why is None
    assert course.evaluated == 100
