"""Metrics on disk: valid JSON always, cut back on resume, readable while they are written."""

import json
import sys
from pathlib import Path

import pytest

from thinwire.errors import UsageError
from thinwire.train.loop.metrics import (
    MetricsTail,
    MetricsWriter,
    Record,
    metrics_file,
    require_tensorboard,
)


def step(number: int, loss: float = 1.0) -> Record:
    return {"kind": "step", "step": number, "loss": loss}


def lines(run: Path) -> list[Record]:
    return [json.loads(line) for line in metrics_file(run, 0).read_text().splitlines()]


def strict(text: str) -> object:
    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_finite_is_null_on_disk_only(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    heard: list[Record] = []
    writer.also.append(heard.append)
    for loss in (float("nan"), float("inf"), -float("inf"), 2.5):
        writer.write(step(1, loss))
    writer.close()
    text = metrics_file(tmp_path, 0).read_text().splitlines()
    assert [strict(line)["loss"] for line in text] == [None, None, None, 2.5]  # type: ignore[index]
    assert heard[1]["loss"] == float("inf")


def test_a_resumed_run_takes_back_what_it_will_write_again(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    for number in range(1, 6):
        writer.write(step(number))
    writer.close()
    with metrics_file(tmp_path, 0).open("a") as file:
        file.write('{"kind": "step", "st')  # killed half-way through a line
    writer = MetricsWriter(tmp_path, 0, resume_step=3)
    writer.write(step(4, 9.0))
    writer.close()
    assert [(r["step"], r["loss"]) for r in lines(tmp_path)] == [(1, 1), (2, 1), (3, 1), (4, 9.0)]


def test_a_new_worker_of_a_resumed_run_starts_an_empty_file(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, 5, resume_step=3).close()
    assert metrics_file(tmp_path, 5).read_text() == ""


def test_a_new_run_starts_with_an_empty_file(tmp_path: Path) -> None:
    for _ in range(2):
        writer = MetricsWriter(tmp_path, 0)
        writer.write(step(1))
        writer.close()
    assert len(lines(tmp_path)) == 1


def test_the_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    tail = MetricsTail(metrics_file(tmp_path, 0))
    assert list(tail.read()) == []
    writer = MetricsWriter(tmp_path, 0)
    assert list(tail.read()) == []
    writer.write(step(1))
    writer.write(step(2))
    assert [r["step"] for r in tail.read()] == [1, 2]
    with metrics_file(tmp_path, 0).open("a") as file:
        file.write('{"kind": "step", ')
        file.flush()
        assert list(tail.read()) == []
        file.write('"step": 3}\n')
    assert [r["step"] for r in tail.read()] == [3]
    assert list(tail.read()) == []


def test_the_tail_of_a_resumed_run_is_not_misled_by_the_old_lines(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    for number in range(1, 9):
        writer.write(step(number))
    writer.close()
    tail = MetricsTail(metrics_file(tmp_path, 0), after=4)
    assert list(tail.read()) == []  # the worker has not started yet
    writer = MetricsWriter(tmp_path, 0, resume_step=4)
    assert list(tail.read()) == []
    writer.write(step(5, 0.123456789))
    assert [(r["step"], r["loss"]) for r in tail.read()] == [(5, 0.123456789)]


def test_tensorboard_is_asked_for_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'thinwire\[tensorboard\]'"):
        require_tensorboard()
