"""Workers that die, hang, are cut off or produce NaN: they are named, and the others end."""

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Ranks
from tests.programs import (  # noqa: F401
    Program,
    Start,
    corpus,
    records,
    small,
    steps_done,
    thinwire,
    worker_pid,
)
from thinwire.errors import LabError
from thinwire.lab import Lab, Link
from thinwire.lab.environment import free_port
from thinwire.lab.output import Line
from thinwire.train.config import parse
from thinwire.train.loop.trainer import Trainer
from thinwire.train.worker import run_worker
from thinwire.wire.agreement import digest

FOREVER = ["--steps", "100000", "--timeout", "2"]


def worker(rank: int, size: int, port: int) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    values = map(str, (rank, rank, size, port))
    return {**dict(zip(names, values, strict=True)), "MASTER_ADDR": "127.0.0.1"}


def workers_alone(start: Start, size: int, *argv: object, before: Any = None) -> list[Program]:
    """Workers that nobody launched, as on several machines."""
    port = free_port()
    return [
        start("train", *argv, env=worker(rank, size, port), before=before) for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("signum", "code", "said"),
    [
        (signal.SIGKILL, 137, "worker1 (rank 1) failed: killed by SIGKILL"),
        (signal.SIGSTOP, 1, "thinwire: rank 0 lost rank 1 ("),
    ],
)
def test_the_launcher_names_the_worker_that_failed(
    thinwire: Start,
    small: list[str],
    signum: int,
    code: int,
    said: str,
) -> None:
    run = Path.cwd() / "run"
    argv = [*small, *FOREVER, "--workers", "2", "--save-every", "1", "--run", str(run)]
    program = thinwire("train", *argv)
    program.until(lambda: steps_done(run, 1) >= 3)
    pids = [worker_pid(run, rank) for rank in (0, 1)]
    os.kill(pids[1], signum)
    assert program.wait() == code
    first, last = program.err.splitlines()
    assert first.startswith(said)
    assert last == f"continue with: thinwire train --run-dir {run} --resume"
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("method", ["ddp", "none"])
@pytest.mark.parametrize("victim", [0, 1])
def test_workers_alone_name_the_one_that_hangs(
    thinwire: Start,
    small: list[str],
    method: str,
    victim: int,
) -> None:
    """Even the one whose store all others use."""
    run = Path.cwd() / "run"
    argv = [*small, *FOREVER, "--method", method, "--run", run]
    programs = workers_alone(thinwire, 2, *argv)
    for rank, program in enumerate(programs):
        program.until(lambda rank=rank: steps_done(run, rank) >= 2)
    programs[victim].signal(signal.SIGSTOP)
    survivor = programs[1 - victim]
    assert survivor.wait() == 1
    (line,) = survivor.err.splitlines()
    assert line.startswith(f"thinwire: rank {1 - victim} lost rank {victim} (")


def nan_from_step_3() -> None:
    """On rank 1 every loss from the third step on is NaN."""
    if os.environ["RANK"] == "1":
        spoil(range(3, 10**9))


def spoil(steps: range) -> None:
    loss = Trainer._loss

    def spoiled(self: Trainer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        training = torch.is_grad_enabled() and self.step + 1 in steps
        return loss(self, x, y) * (math.nan if training else 1.0)

    Trainer._loss = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("method", ["none", "ddp", "average"])
def test_a_worker_that_keeps_producing_nan_is_named(
    thinwire: Start,
    small: list[str],
    method: str,
) -> None:
    argv = [*small, *FOREVER, "--method", method, "--run", "run"]
    for program in workers_alone(thinwire, 2, *argv, before=nan_from_step_3):
        assert program.wait() == 1
        (line,) = program.err.splitlines()
        assert line.startswith("thinwire: the loss of worker 1 has not been finite for 8 steps")
    losses = [r["loss"] for r in records(Path("run"), 1) if r["kind"] == "step"]
    assert None not in losses[:2]
    assert set(losses[2:]) == {None}


def one_bad_step(argv: list[str]) -> tuple[bytes, dict[str, Any]]:
    if os.environ["RANK"] == "1":
        spoil(range(3, 4))
    trainers = []
    train = Trainer.train

    def remember(self: Trainer, metrics: Any) -> dict[str, Any]:
        trainers.append(self)
        return train(self, metrics)

    Trainer.train = remember  # type: ignore[method-assign]
    _, summary = run_worker(parse(argv))
    return digest(trainers[0].model.parameters()), summary


@pytest.mark.parametrize(
    "flags",
    [["--method", "ddp"], ["--method", "average"], ["--method", "average", "--codec", "int4+ef"]],
)
def test_one_bad_step_is_skipped_by_all_and_counted(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
    flags: list[str],
) -> None:
    argv = [*small, *flags, "--steps", "6", "--eval-every", "0", "--run", str(tmp_path / "run")]
    (first, summary), (second, _) = ranks(2, one_bad_step, argv)
    assert first == second
    assert summary["skipped"] == 1
    assert math.isfinite(summary["val_loss"])
    for rank in (0, 1):
        steps = [r for r in records(tmp_path / "run", rank) if r["kind"] == "step"]
        assert [r["skipped"] for r in steps] == [0, 0, 1, 1, 1, 1]
        assert [r["grad_norm"] is None for r in steps] == [n == 3 for n in range(1, 7)]
        assert (steps[2]["loss"] is None) == (rank == 1)
        assert steps[5]["loss"] < steps[0]["loss"]


def test_a_host_that_is_cut_off_is_named(
    small: list[str],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    argv = [sys.executable, "-m", "thinwire", "train", *small, *FOREVER, "--run", str(run)]
    lines: list[Line] = []
    try:
        lab = Lab(2, Link.of("1gbit"))
        lab.open()
    except LabError as error:
        pytest.skip(str(error))
    try:
        job = lab.start(argv, sink=lines.append)
        while job.poll(0.1) and steps_done(run, 1) < 2:
            pass
        lab.partition(1)
        outcome = job.wait()
    finally:
        lab.close()
    assert outcome.code == 1
    said = [line.text for line in lines if line.label == "host0" and line.error]
    assert len(said) == 1, "\n".join(said)
    assert said[0].startswith("thinwire: rank 0 lost rank 1 (on host1, silent ")
