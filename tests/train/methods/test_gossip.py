"""The decentralized methods through the trainer: flags, resuming, shards, what is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Ranks
from tests.programs import corpus, records, small  # noqa: F401
from thinwire.errors import UsageError
from thinwire.train.checkpoints import checkpoint
from thinwire.train.checkpoints.export import export, load_exported
from thinwire.train.config import parse
from thinwire.train.methods.gossip import KINDS
from thinwire.train.worker import run_worker


def train(argv: list[str]) -> dict[str, Any]:
    return run_worker(parse(argv))[1]


def weights(run: Path, replica: int) -> torch.Tensor:
    model = checkpoint.load(run, replica=replica).private["model"]
    return torch.cat([value.view(-1) for value in model.values()])


FLAGS = ["--lr", "0.05", "--steps", "9", "--eval-every", "0", "--save-every", "5", "--keep", "3"]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("decentlam", ["--topology", "ring", "--clip", "0", "--accumulate", "2"]),
        ("dmsgd", ["--topology", "edges:0-1,1-2", "--codec", "int8"]),
    ],
)
def test_a_run_ends_with_equal_replicas_and_goes_on_bit_for_bit(
    ranks: Ranks, small: list[str], tmp_path: Path, name: str, flags: list[str]
) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    argv = [*small, *FLAGS, "--method", name, *flags]
    summary = ranks(3, train, [*argv, "--run", str(run)])[0]
    assert summary["val_loss"] < 5.5
    assert torch.equal(weights(run, 0), weights(run, 1)), "finish() makes them equal"
    apart = [weights(run / "checkpoints/step-00000005", replica) for replica in (0, 1, 2)]
    assert not torch.equal(apart[0], apart[1])

    copy_without(run, again, "step-00000009")
    ranks(3, train, ["--run", str(again), "--resume"])
    assert records(again) == records(run)
    for replica in (0, 1, 2):
        assert torch.equal(weights(again, replica), weights(run, replica))

    # The model of a checkpoint in between is the mean of its replicas.
    file = export(run / "checkpoints/step-00000005", tmp_path / "model.safetensors")
    mean = torch.cat([value.view(-1) for value in load_exported(file).state_dict().values()])
    torch.testing.assert_close(mean, torch.stack(apart).mean(0))


def copy_without(run: Path, again: Path, name: str) -> None:
    """The run as it was before its last checkpoint."""
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / name)
    (again / "checkpoints/latest").write_text("step-00000005\n")


def test_another_number_of_replicas_and_shards(
    ranks: Ranks, small: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv = [*small, *FLAGS, "--method", "decentlam", "--codec", "bf16", "--run", str(run)]
    ranks(2, train, argv)
    summary = ranks(3, train, ["--run", str(run), "--resume", "--steps", "12"])[0]
    assert summary["step"] == 12
    assert summary["val_loss"] < 5.5
    argv = [*argv[:-1], str(tmp_path / "sharded"), "--shards", "2", "--topology", "complete"]
    assert ranks(4, train, argv)[0]["val_loss"] < 5.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology", "star"], r"--topology star: topology takes one of ring, torus"),
        (["--topology", "torus", "--workers", "3"], "at least 2 x 2 ranks"),
        (["--topology", "edges:0-1,2-3", "--workers", "4"], "not connected"),
        (["--topology", "edges:0>1,1>0", "--workers", "2"], "in one direction"),
        (["--topology", "edges:0-1,1-2", "--workers", "2"], r"a rank that is none of 0..1"),
        (["--topology", "edges:0-1,1-2", "--workers", "4"], "not connected.*rank 3"),
        (["--momentum", "1"], r"--momentum takes a number in \[0, 1\), got 1.0"),
        (["--codec", "onebit"], "--codec takes fp32, bf16, fp16, int8 or int4 here"),
        (["--codec", "int8+ef"], "--codec takes fp32"),
        (["--bucket-mb", "-1"], "--bucket-mb takes a number >= 0"),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(["--method", "decentlam", *flags])


@pytest.mark.parametrize("name", KINDS)
def test_the_optimizer_is_the_methods_own(small: list[str], tmp_path: Path, name: str) -> None:
    argv = [*small, "--method", name, "--steps", "2", "--run", str(tmp_path / "run")]
    with pytest.raises(UsageError, match=r"--optimizer Adagrad: .* is an optimizer of its own"):
        train([*argv, "--optimizer", "Adagrad"])
    with pytest.raises(UsageError, match="--optimizer-arg momentum"):
        train([*argv, "--optimizer", "SGD", "--optimizer-arg", "momentum=0.9"])
