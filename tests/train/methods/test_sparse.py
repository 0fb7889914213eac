"""Sparse averaging through the trainer: flags, the run's length, resuming, shards."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Ranks
from tests.programs import corpus, small  # noqa: F401
from tests.train.methods.test_local import stop_at
from thinwire.errors import UsageError
from thinwire.train.checkpoints import checkpoint
from thinwire.train.config import parse
from thinwire.train.loop.trainer import Trainer
from thinwire.train.worker import run_worker

METHOD = ["--method", "sparse-average", "--fraction", "0.2", "--averaging-delay", "3"]


def train(argv: list[str]) -> dict[str, Any]:
    return run_worker(parse(argv))[1]


def weights(run: Path, replica: int) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = checkpoint.load(run, replica=replica).private["model"]
    return model


@pytest.mark.parametrize("workers", [2, 4])
def test_training_and_resuming_with_rounds_in_the_air(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
    workers: int,
) -> None:
    """Two whole replicas, or two of two shards each."""
    shards = ["--shards", "2"] if workers == 4 else ["--codec", "bf16"]
    argv = [*small, *METHOD, *shards, "--eval-every", "0", "--steps", "14"]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    summary = ranks(workers, train, [*argv, "--run", str(straight)])[0]
    assert summary["val_loss"] < 5.5
    ranks(workers, stop_at, [*argv, "--save-every", "8", "--run", str(halved)], 8)
    assert len(checkpoint.load(halved, replica=0).private["method"]["flights"]) == 3
    ranks(workers, train, ["--run", str(halved), "--resume"])
    for rank in range(workers):
        before, after = weights(straight, rank), weights(halved, rank)
        assert all(torch.equal(before[key], after[key]) for key in before)
    first, last = weights(straight, 0), weights(straight, workers // 2)
    assert all(torch.equal(first[key], last[key]) for key in first), "replicas end equal"


def test_resuming_on_more_and_on_fewer_workers(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    argv = [*small, *METHOD, "--steps", "12", "--run", str(run)]
    ranks(2, stop_at, [*argv, "--save-every", "8"], 8)
    summary = ranks(3, train, ["--run", str(run), "--resume"])[0]
    assert summary["step"] == 12
    summary = ranks(1, train, ["--run", str(run), "--resume", "--steps", "16"])[0]
    assert summary["step"] == 16
    assert summary["val_loss"] < 5.5


def test_the_optimizer_learns_the_length_of_the_run(
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def no_training(self: Trainer, metrics: Any) -> dict[str, Any]:
        seen.append(self.replica.optimizer.steps)  # type: ignore[attr-defined]
        return {}

    monkeypatch.setattr(Trainer, "train", no_training)
    train([*small, *METHOD, "--steps", "37", "--run", str(tmp_path / "run")])
    assert seen == [37]


BAD = [
    (["--fraction", "0"], "^--fraction takes a number in"),
    (["--fraction", "1.01"], "fraction"),
    (["--averaging-delay", "-1"], "^--averaging-delay takes a whole number >= 0"),
    (["--every", "0"], "every"),
    (["--codec", "int3"], "unknown codec"),
    (["--codec", "int4+ef"], "--codec int4.ef: error feedback.* use int4$"),
]


@pytest.mark.parametrize(("argv", "message"), BAD)
def test_bad_settings_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(["--method", "sparse-average", *argv])
