"""The directory of a run: who may use it, and that a refusal leaves it as it was."""

import json
import math
import os
from pathlib import Path

import pytest

from tests.programs import listing
from thinwire.errors import UsageError
from thinwire.train import run_directory
from thinwire.train.checkpoints import checkpoint
from thinwire.train.config import CONFIG, TrainConfig, parse


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def config(run: Path, *argv: str) -> TrainConfig:
    return parse(["--run", str(run), *argv])


def refusal(run: Path, *argv: str) -> str:
    before = listing(run.parent)
    with pytest.raises(UsageError) as caught:  # parsing looks into a run that is resumed
        run_directory.check(config(run, *argv), run)
    assert listing(run.parent) == before
    return str(caught.value)


def save(run: Path, step: int) -> None:
    checkpoint.save(
        run,
        step,
        shared={},
        private={},
        replica=0,
        replicas=1,
        meta={},
        barrier=lambda: None,
        leader=True,
    )


def test_a_new_directory_is_not_made_by_looking(run: Path) -> None:
    run_directory.check(config(run), run)
    assert not run.exists()


def test_without_a_name_every_run_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_directory.choose(parse([]))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert first != run_directory.choose(parse([]))
    assert first.parts[0] == "runs"
    assert first.name.startswith("ddp-")


def test_a_run_is_not_overwritten(run: Path) -> None:
    run.mkdir()
    run_directory.write_config(run, config(run))
    assert "already holds a run: remove it, or name another" in refusal(run)
    save(run, 3)
    assert "already holds a run: continue it with --resume, or name another" in refusal(run)


def test_what_cannot_be_resumed_is_refused(run: Path) -> None:
    assert "no such file or directory" in refusal(run, "--resume")
    run.mkdir()
    assert "no thinwire checkpoint" in refusal(run, "--resume")
    save(run, 3)
    assert "config.json is missing" in refusal(run, "--resume")
    (run / CONFIG).write_text("{}")
    assert "nothing left to do; raise --steps" in refusal(run, "--resume", "--steps", "3")
    run_directory.check(config(run, "--resume", "--steps", "4"), run)


def test_a_place_that_cannot_be_written_is_refused(run: Path) -> None:
    run.write_text("a file")
    assert "is a file, not a directory" in refusal(run)
    assert "is a file, not a directory" in refusal(run / "below" / "it")
    with pytest.raises(UsageError, match="cannot be written"):
        run_directory.Lock(Path("/proc/run"))


def test_only_one_holds_the_lock(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = run_directory.Lock(run)
    assert "in use by another run" in refusal(run)
    with pytest.raises(UsageError, match="in use by another run"):
        run_directory.Lock(run)
    monkeypatch.setenv(run_directory.LAUNCHED, "1")
    run_directory.check(config(run), run)  # the launcher holds it for its workers
    monkeypatch.delenv(run_directory.LAUNCHED)
    lock.release()
    run_directory.check(config(run), run)
    run_directory.Lock(run).release()


def test_a_lock_that_came_to_nothing_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    run_directory.Lock(run).release()
    assert listing(tmp_path) == {}
    lock = run_directory.Lock(run)
    (run / CONFIG).touch()
    lock.release()
    assert set(listing(tmp_path)) == {"runs", "runs/run", "runs/run/.lock", f"runs/run/{CONFIG}"}


def test_settings_and_summary_are_json(run: Path) -> None:
    run.mkdir()
    run_directory.write_config(run, config(run, "--optimizer-arg", "eps=1"))
    assert json.loads((run / CONFIG).read_text())["optimizer_arg"] == ["eps=1"]
    assert run_directory.read_summary(run) is None
    run_directory.write_summary(run, {"loss": math.nan, "step": 3})
    assert run_directory.read_summary(run) == {"loss": None, "step": 3}
    run_directory.forget_summary(run)
    run_directory.forget_summary(run)
    assert run_directory.read_summary(run) is None
    assert [path.name for path in run.iterdir()] == [CONFIG]


@pytest.mark.parametrize("name", [".lock", CONFIG, "summary.json", "metrics", "checkpoints"])
def test_a_link_in_a_directory_of_somebody_elses_is_not_followed(run: Path, name: str) -> None:
    target = run.parent / "target"
    run.mkdir()
    for folder in (False, True):
        target.mkdir() if folder else target.write_text("kept")
        (run / name).symlink_to(target)
        said = refusal(run)
        assert f"{run / name} should be " in said
        assert "is a symbolic link" in said
        (run / name).unlink()
        target.rmdir() if folder else target.unlink()


def test_a_lock_that_leads_elsewhere_cuts_nothing_off(run: Path) -> None:
    run.mkdir()
    (run.parent / "target").write_text("kept")
    (run / ".lock").symlink_to(run.parent / "target")
    with pytest.raises(UsageError, match="cannot be written"):
        run_directory.Lock(run)
    assert (run.parent / "target").read_text() == "kept"
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock")
    with pytest.raises(UsageError, match="no plain file"):
        run_directory.Lock(run)


def test_names_that_no_disk_can_hold_are_refused(tmp_path: Path) -> None:
    assert "File name too long" in refusal(tmp_path / ("x" * 5000))


@pytest.mark.parametrize(
    "name",
    ["../../etc", "/etc/passwd", "", ".", "ddp-1/../..", "co2-1", "ddp-\n", "ddp-" + "x" * 200],
)
def test_the_first_rank_chooses_no_path_here(run: Path, name: str) -> None:
    with pytest.raises(UsageError, match="name one with --run-dir"):
        run_directory.agreed(parse([]), name)
    assert run_directory.agreed(config(run), name) == run


def test_of_a_directory_that_nobody_named_ranks_share_the_name() -> None:
    chosen = run_directory.choose(parse([]))
    assert run_directory.agreed(parse([]), chosen.name) == chosen
