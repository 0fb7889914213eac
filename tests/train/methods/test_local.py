"""The local-update methods through the trainer: flags, resuming, shards, export."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Ranks
from tests.programs import corpus, small  # noqa: F401
from thinwire.errors import UsageError
from thinwire.train.checkpoints import checkpoint
from thinwire.train.checkpoints.export import export, load_exported
from thinwire.train.config import parse
from thinwire.train.methods.local import PRESETS
from thinwire.train.methods.registry import METHODS
from thinwire.train.worker import run_worker


def train(argv: list[str]) -> dict[str, Any]:
    return run_worker(parse(argv))[1]


def weights(run: Path, replica: int) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = checkpoint.load(run, replica=replica).private["model"]
    return model


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_and_leaves_equal_replicas(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
    name: str,
) -> None:
    short = {"streaming-diloco": ["--fragments", "2", "--fragment-delay", "1"]}.get(name, [])
    argv = [*small, "--method", name, "--every", "4", "--steps", "10", *short]
    summary = ranks(2, train, [*argv, "--run", str(tmp_path / "run")])[0]
    assert summary["val_loss"] < 5.5
    assert summary["bytes"] > 0
    first, second = weights(tmp_path / "run", 0), weights(tmp_path / "run", 1)
    assert all(torch.equal(first[key], second[key]) for key in first)


RESUMED = {
    "co2": ["--method", "co2", "--every", "4", "--codec", "int4+ef"],
    "overlapped": ["--method", "overlapped", "--every", "4"],
    "sharded": ["--method", "overlapped", "--every", "4", "--shards", "2"],
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_mid_round_is_bit_exact(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
    name: str,
) -> None:
    workers = 4 if name == "sharded" else 2
    argv = [*small, *RESUMED[name], "--eval-every", "0"]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    ranks(workers, train, [*argv, "--steps", "16", "--run", str(straight)])
    # A checkpoint at step 10, in the middle of a round; --steps is the same, so is the schedule.
    ranks(
        workers, stop_at, [*argv, "--steps", "16", "--save-every", "10", "--run", str(halved)], 10
    )
    assert checkpoint.read_manifest(halved).step == 10
    ranks(workers, train, ["--run", str(halved), "--resume"])
    for rank in range(workers):
        before, after = weights(straight, rank), weights(halved, rank)
        assert all(torch.equal(before[key], after[key]) for key in before)


def stop_at(argv: list[str], step: int) -> None:
    """A worker that is gone right after the checkpoint of this step."""
    from thinwire.train.loop.trainer import Trainer

    save = Trainer.save

    def save_and_go(self: Trainer) -> None:
        save(self)
        if self.step == step:
            raise SystemExit

    Trainer.save = save_and_go  # type: ignore[method-assign]
    try:
        run_worker(parse(argv))
    except SystemExit:
        return


def test_shards_equal_whole_replicas(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
) -> None:
    """2 x 2 with a batch of 2 on each rank is 2 replicas with a batch of 4."""
    common = [*small, "--method", "overlapped", "--every", "4", "--steps", "10", "--clip", "0"]
    split = ranks(4, train, [*common, "--shards", "2", "--run", str(tmp_path / "split")])[0]
    whole = ranks(2, train, [*common, "--batch", "4", "--run", str(tmp_path / "whole")])[0]
    assert split["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-4)
    export(tmp_path / "split", tmp_path / "split.safetensors")
    ours = load_exported(tmp_path / "split.safetensors").state_dict()
    for key, wanted in weights(tmp_path / "whole", 0).items():
        torch.testing.assert_close(ours[key], wanted, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("workers", [1, 3])
def test_resume_with_another_number_of_replicas(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
    workers: int,
) -> None:
    run = tmp_path / "run"
    argv = [*small, "--method", "overlapped", "--every", "4", "--steps", "20", "--run", str(run)]
    ranks(2, stop_at, [*argv, "--save-every", "10"], 10)
    summary = ranks(workers, train, ["--run", str(run), "--resume"])[0]
    assert summary["step"] == 20
    assert summary["val_loss"] < 5.5


BAD = [
    (["--method", "co2", "--every", "0"], "^--every takes"),
    (["--method", "co2", "--every", "often"], "--every takes"),
    (["--method", "co2", "--penalty", "0.5"], "^--penalty takes"),
    (["--method", "co2", "--penalty", "wide"], "--penalty takes"),
    (["--method", "co2", "--outer-momentum", "1"], "^--outer-momentum takes"),
    (["--method", "overlapped", "--codec", "int3"], "unknown codec"),
    (["--method", "streaming-diloco", "--every", "10"], "do not divide"),
    (["--method", "streaming-diloco", "--fragment-delay", "30"], "longer than"),
    (["--method", "ddp", "--shards", "2"], "ddp keeps each replica whole"),
    (["--method", "co2", "--shards", "0"], "--shards takes"),
]


@pytest.mark.parametrize(("argv", "message"), BAD)
def test_bad_settings_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(argv)


def odd_shards(argv: list[str]) -> str:
    with pytest.raises(UsageError) as error:
        run_worker(parse(argv))
    return str(error.value)


def test_shards_that_do_not_divide_the_workers(ranks: Ranks, small: list[str]) -> None:
    argv = [*small, "--method", "co2", "--shards", "2", "--steps", "2"]
    for message in ranks(3, odd_shards, argv):
        assert "do not divide" in message


@pytest.mark.parametrize("name", METHODS)
def test_no_flag_of_a_method_has_the_name_of_another_flag(name: str) -> None:
    config = parse(["--method", name])
    parts = [config, config.data, config.model, config.optimizer, config.loop, config.place]
    parts += [config.network, config.adversary, config.settings]
    names = [f.name for part in parts for f in fields(part)]
    inner = {"data", "model", "optimizer", "adversary", "loop", "place", "network", "settings"}
    leaves = [n for n in names if n not in inner] + ["data", "model", "optimizer"]
    assert len(leaves) == len(set(leaves))
