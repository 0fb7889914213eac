"""A disk that is full, and a directory that is gone: one line, exit code 3, and what was written
before is whole."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.programs import (  # noqa: F401
    Program,
    Start,
    corpus,
    small,
    steps_done,
    thinwire,
    worker_pid,
)
from tests.small_disk import run_scenarios
from thinwire.lab.environment import free_port
from thinwire.train.checkpoints import checkpoint

MB = 1 << 20


def on_disk(size: int, tmp_path: Path, steps: list[list[Any]]) -> list[Any]:
    found = run_scenarios(size, tmp_path / "disk", steps)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def one_line(done: dict[str, Any], *facts: str) -> None:
    assert done["code"] == 3, done["err"][-3000:]
    (line,) = done["err"].splitlines()
    for fact in ("thinwire: cannot write ", *facts):
        assert fact in line, line


def train(small: list[str], *words: object) -> list[Any]:
    return ["thinwire", "train", *small, "--run-dir", "run", "--eval-every", 0, *words]


def test_a_checkpoint_that_does_not_fit(small: list[str], tmp_path: Path) -> None:
    """The one before it stays, the half one goes, and with more room the run goes on."""
    steps = [
        ["fill", 6 * MB],
        train(small, "--steps", 6, "--save-every", 2),
        ["list"],
        ["load", "run"],
        ["free"],
        ["thinwire", "train", "--run-dir", "run", "--resume"],
        ["load", "run"],
    ]
    _, failed, files, step, _, again, after = on_disk(40 * MB, tmp_path, steps)
    one_line(failed, "run/checkpoints/step-00000004.tmp", "No space left", str(tmp_path / "disk"))
    assert "what was written before is whole" in failed["err"]
    assert step == 2
    assert not [name for name in files if ".tmp" in name or ".gone" in name]
    assert again["code"] == 0, again["err"]
    assert after == 6


@pytest.mark.parametrize(
    ("left", "file"), [(0, "run/config.json"), (12 << 10, "run/metrics/rank-0.jsonl")]
)
def test_a_disk_that_is_full_at_the_start_or_soon(
    small: list[str], tmp_path: Path, left: int, file: str
) -> None:
    steps = [["fill", left], train(small, "--steps", 400)]
    _, failed = on_disk(2 * MB, tmp_path, steps)
    one_line(failed, file, "No space left", str(tmp_path / "disk"), "MB free")


def test_an_export_that_does_not_fit(small: list[str], tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    steps = [
        ["thinwire", "train", *small, "--steps", 1, "--run-dir", run],
        ["fill", 64 << 10],
        ["thinwire", "export", run, "--out", "model.safetensors"],
        ["list"],
    ]
    first, _, failed, files = on_disk(2 * MB, tmp_path, steps)
    assert first["code"] == 0, first["err"]
    one_line(failed, "model.safetensors", "No space left")
    assert list(files) == ["filler"]


def test_all_workers_say_what_one_of_them_could_not_write(small: list[str], tmp_path: Path) -> None:
    steps = [["fill", 6 * MB], train(small, "--steps", 4, "--save-every", 2, "--workers", 2)]
    _, failed = on_disk(40 * MB, tmp_path, steps)
    assert failed["code"] == 3
    first, last = failed["err"].splitlines()
    assert "cannot write run/checkpoints/step-00000004.tmp: " in first
    assert last == "continue with: thinwire train --run-dir run --resume"


def worker(rank: int, port: int) -> dict[str, str]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    return {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "127.0.0.1"}


def remove(run: Path) -> None:
    """All at once, as far as the run can see."""
    run.rename(run.with_name("trash"))
    shutil.rmtree(run.with_name("trash"))


def test_a_directory_that_is_removed_under_its_launcher(thinwire: Start, small: list[str]) -> None:
    run = Path.cwd() / "run"
    argv = [*small, "--steps", 100_000, "--workers", 2, "--eval-every", 0, "--run-dir", run]
    program = thinwire("train", *argv)
    program.until(lambda: steps_done(run, 1) >= 2)
    pids = [worker_pid(run, rank) for rank in (0, 1)]
    remove(run)
    assert program.wait(within=30) == 3
    first, last = program.err.splitlines()
    assert first.startswith(f"thinwire: cannot write {run}/metrics/rank-")
    assert "was removed or moved while it was in use" in first
    assert last == f"no checkpoint has been written to {run}"
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not run.exists()


def test_a_directory_that_is_removed_under_workers_alone(thinwire: Start, small: list[str]) -> None:
    run = Path.cwd() / "run"
    port = free_port()
    argv = [*small, "--steps", 100_000, "--eval-every", 0, "--run-dir", run, "--timeout", 5]
    programs = [thinwire("train", *argv, env=worker(rank, port)) for rank in (0, 1)]
    for rank, program in enumerate(programs):
        program.until(lambda rank=rank: steps_done(run, rank) >= 2)
    remove(run)
    for program in programs:
        # The other one may be lost before this one has looked at its own file.
        assert program.wait(within=40) in (1, 3)
        (line,) = program.err.splitlines()
        assert "was removed or moved while it was in use" in line or " lost rank " in line
    assert 3 in [program.wait() for program in programs]
    assert not run.exists()


def test_a_directory_that_is_moved_is_not_made_again(thinwire: Start, small: list[str]) -> None:
    """Its files are still there for a worker that holds them: the checkpoint finds out."""
    run = Path.cwd() / "run"
    program = thinwire("train", *small, "--steps", 100_000, "--eval-every", 0, "--run-dir", run)
    program.until(lambda: steps_done(run) >= 2)
    run.rename("moved")
    program.signal(signal.SIGTERM)
    assert program.wait() == 3
    assert f"thinwire: cannot write {run}/checkpoints/" in program.err
    assert not run.exists()
    assert checkpoint.latest(Path("moved")) is None
    assert os.listdir("moved/metrics") == ["rank-0.jsonl"]
