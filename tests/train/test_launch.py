"""`thinwire train` as a launcher of real workers: stopping it, resuming it, what it says."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.programs import (  # noqa: F401
    Start,
    corpus,
    records,
    small,
    steps_done,
    thinwire,
    worker_pid,
)
from thinwire.train.checkpoints import checkpoint

FOREVER = 100_000


def caught(pid: int, signum: int, field: str) -> bool:
    """Whether a process has the signal waiting (ShdPnd) or a handler for it (SigCgt)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith(field))
    return bool(int(mask, 16) >> (signum - 1) & 1)


def test_a_launcher_that_is_asked_to_stop_and_taken_up_again(
    thinwire: Start,
    small: list[str],
) -> None:
    run = Path.cwd() / "run"
    (Path.cwd() / "random.py").write_text("raise SystemExit('not the random you meant')")
    argv = ["train", *small, "--steps", FOREVER, "--workers", 2, "--run", run]
    program = thinwire(*argv, "--eval-every", 0)
    program.until(lambda: steps_done(run, 1) >= 2)
    program.signal(signal.SIGTERM)
    assert program.wait() == 143
    assert program.err == ""
    assert "worker0 | stopping after the next few steps, with a checkpoint" in program.out
    last = program.out.splitlines()[-1]
    step = checkpoint.read_manifest(run).step
    assert last == (
        f"stopped by SIGTERM after step {step}; "
        f"continue with: thinwire train --run-dir {run} --resume"
    )
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == "SIGTERM"
    # The message's command, with an end: it knows the workers and all other settings.
    again = thinwire("train", "--run", run, "--resume", "--steps", step + 3)
    assert again.wait() == 0, again.err
    assert f"{step + 3} steps on 2 workers" in again.out
    assert again.out.splitlines()[0].startswith(f"ddp {step + 1}/{step + 3} ")
    for rank in (0, 1):
        steps = [r["step"] for r in records(run, rank) if r["kind"] == "step"]
        assert steps == list(range(1, step + 4))


def test_ctrl_c_twice(
    thinwire: Start,
    small: list[str],
) -> None:
    """The workers are frozen, so that the first cannot be obeyed."""
    run = Path.cwd() / "run"
    program = thinwire("train", *small, "--steps", FOREVER, "--workers", 2, "--run", run)
    program.until(lambda: steps_done(run, 1) >= 1)
    workers = [worker_pid(run, rank) for rank in (0, 1)]
    for pid in workers:
        program.until(lambda pid=pid: caught(pid, signal.SIGINT, "SigCgt"))
        os.kill(pid, signal.SIGSTOP)
    program.signal(signal.SIGINT)
    for pid in workers:
        program.until(lambda pid=pid: caught(pid, signal.SIGINT, "ShdPnd"))
    assert program.running
    program.signal(signal.SIGINT)
    assert program.wait(within=20) == 130
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    said = program.err.splitlines()
    assert said == ["interrupted by SIGINT", f"no checkpoint has been written to {run}"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_worker_alone_stops_with_a_checkpoint(
    thinwire: Start,
    small: list[str],
    signum: int,
    code: int,
) -> None:
    run = Path.cwd() / "run"
    program = thinwire("train", *small, "--steps", FOREVER, "--run", run)
    program.until(lambda: steps_done(run) >= 1)
    program.signal(signum)
    assert program.wait() == code
    name = signal.Signals(signum).name
    assert f"stopped by {name} after step {checkpoint.read_manifest(run).step}" in program.out


def test_a_signal_too_late_to_stop_anything_is_no_stop(
    thinwire: Start,
    small: list[str],
) -> None:
    program = thinwire("train", *small, "--steps", 3, "--run", "run", before=signal_at_the_end)
    assert program.wait() == 0, program.err
    assert "the run is in run" in program.out


def signal_at_the_end() -> None:
    from thinwire.train.loop.trainer import Trainer

    evaluate = Trainer.evaluate

    def signalled(self: Trainer) -> dict[str, object]:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self)

    Trainer.evaluate = signalled  # type: ignore[method-assign]
