"""Images through the trainer: against a plain loop, and under several methods with BatchNorm."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thinwire as tw
from tests.conftest import Ranks
from tests.programs import TIMES
from thinwire.errors import UsageError
from thinwire.train.checkpoints import checkpoint
from thinwire.train.checkpoints.export import export, load_exported
from thinwire.train.config import parse
from thinwire.train.data.images import ImageBatches, load_digits
from thinwire.train.loop.trainer import Trainer
from thinwire.train.methods.running_statistics import RunningStatistics
from thinwire.train.preflight import preflight
from thinwire.train.tasks.image_models import ImageShape, build_image_model
from thinwire.train.tasks.models import ModelConfig
from thinwire.train.tasks.registry import find_task
from thinwire.train.worker import run_worker
from thinwire.wire.wire import Wire

pytest.importorskip("sklearn", reason="digits come with scikit-learn: thinwire[images]")

RUN = ["--data", "digits", "--model", "resnet-0.1m", "--batch", "8", "--eval-windows", "64"]
RUN += ["--warmup", "0", "--final-lr", "1", "--lr", "0.01"]


def train(argv: list[str]) -> dict[str, Any]:
    return run_worker(parse(argv))[1]


def records(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics" / "rank-0.jsonl").read_text().splitlines()
    times = TIMES | {"images_per_s", "lag", "bytes", "adversary_exposed", "adversary_hidden"}
    return [{k: v for k, v in json.loads(line).items() if k not in times} for line in lines]


def test_it_equals_a_plain_loop(ranks: Ranks, tmp_path: Path) -> None:
    argv = [*RUN, "--optimizer", "SGD", "--steps", "4", "--accumulate", "2", "--clip", "0"]
    (summary,) = ranks(1, train, [*argv, "--weight-decay", "0", "--run", str(tmp_path)])
    digits = load_digits()
    model = build_image_model(ModelConfig("resnet-0.1m"), ImageShape(1, 8, 10), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches, losses = ImageBatches(digits.train, 8, 0, 1, seed=0), []
    for _ in range(4):
        total = 0.0
        for _ in range(2):
            x, y = batches.next()
            loss = F.cross_entropy(model(x), y)
            (loss / 2).backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / 2)
    assert [r["loss"] for r in records(tmp_path) if r["kind"] == "step"] == losses
    assert [r["images"] for r in records(tmp_path)] == [16, 32, 48, 64, 64]
    model.eval()
    chosen = torch.arange(64) * 359 // 64
    x, y = digits.validation.pixels[chosen], digits.validation.labels[chosen]
    with torch.no_grad():
        assert summary["val_loss"] == pytest.approx(float(F.cross_entropy(model(x), y)), rel=1e-5)
        right = float((model(x).argmax(1) == y).float().mean())
    assert summary["val_accuracy"] == pytest.approx(right)
    assert (summary["unit"], summary["images"]) == ("images", 64)
    assert summary["bytes_per_image"] == 0


METHODS = {
    "ddp": ["--method", "ddp", "--optimizer", "Lamb"],
    "none": ["--method", "none"],
    "average": ["--method", "average", "--codec", "int8"],
    "lamb": ["--method", "lamb", "--model", "vit-0.1m"],
    "one-bit-adam": ["--method", "one-bit-adam", "--freeze-at", "3", "--adversarial", "0.1"],
    "one-bit-lamb": ["--method", "one-bit-lamb", "--freeze-at", "3"],
    "zero-one-adam": ["--method", "zero-one-adam", "--freeze-at", "3", "--double-after", "1"],
    "overlapped": ["--method", "overlapped", "--every", "3", "--optimizer", "Lars"],
    "co2": ["--method", "co2", "--every", "3", "--adversarial", "0.1"],
    "adversarial": ["--method", "average", "--optimizer", "lars", "--adversarial", "0.1"],
    "adversarial ddp": ["--adversarial", "0.1", "--accumulate", "2"],
}


@pytest.mark.parametrize("name", METHODS)
def test_batch_norm_under_every_kind_of_method(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """A run that is resumed ends as one that was not; the replicas end equal, and what is exported
    is what was evaluated."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    argv = [*RUN, *METHODS[name], "--steps", "7", "--eval-every", "3"]
    summary = ranks(2, train, [*argv, "--save-every", "5", "--run", str(straight)])[0]
    shutil.copytree(straight, resumed)
    (resumed / "checkpoints" / "latest").write_text("step-00000005\n")
    ranks(2, train, ["--run", str(resumed), "--resume"])
    assert records(resumed) == records(straight)
    export(straight, tmp_path / "model.safetensors")
    exported = load_exported(tmp_path / "model.safetensors").eval()
    images = load_digits().validation
    chosen = torch.arange(64) * 359 // 64
    with torch.no_grad():
        found = F.cross_entropy(exported(images.pixels[chosen]), images.labels[chosen])
    assert float(found) == pytest.approx(summary["val_loss"], rel=1e-4)
    if "--adversarial" in argv:
        assert all(r["adversarial_loss"] > 0 for r in records(straight) if r["kind"] == "step")
    if name not in ("none", "lamb"):  # replicas that stay apart; a model without statistics
        first, second = (statistics(straight, replica) for replica in range(2))
        assert first.equal(second)
        assert not first[: len(first) // 2].equal(torch.zeros(len(first) // 2))


def test_another_number_of_replicas_goes_on_from_the_mean(ranks: Ranks, tmp_path: Path) -> None:
    argv = [*RUN, "--method", "average", "--eval-every", "0", "--save-every", "3", "--steps", "4"]
    ranks(2, train, [*argv, "--run", str(tmp_path)])
    (tmp_path / "checkpoints" / "latest").write_text("step-00000003\n")
    two = [statistics(tmp_path, replica) for replica in range(2)]
    assert not two[0].equal(two[1])
    (found,) = ranks(1, resumed_statistics, str(tmp_path))
    torch.testing.assert_close(found, (two[0] + two[1]) / 2)


def resumed_statistics(run: str) -> torch.Tensor:
    """What a run on one worker goes on with."""
    world = tw.init()
    config = parse(["--run", run, "--resume"])
    control, task = Wire(name="control"), preflight(config, Path(run))
    trainer = Trainer(config, world, control, task, Path(run))
    trainer.resume()
    state = trainer.replica.model.state_dict()
    return torch.cat([v.flatten() for k, v in sorted(state.items()) if "running" in k])


def statistics(run: Path, replica: int) -> torch.Tensor:
    """A replica's running statistics, as its checkpoint has them."""
    loaded = checkpoint.load(run, replica=replica)
    found = loaded.private.get("statistics") or loaded.private["model"]
    return torch.cat([v.flatten() for k, v in sorted(found.items()) if "running" in k])


def meet() -> list[list[float]]:
    """(own, in the consensus, own again, as a checkpoint's, settled) of this rank's mean."""
    world = tw.init()
    norm = nn.BatchNorm1d(1, momentum=1.0)
    statistics = RunningStatistics(norm, None)
    norm(torch.tensor([[1.0], [3.0]]) + 2 * world.rank)  # means 2 and 4
    seen = [norm.running_mean.tolist()]
    with statistics.consensus():
        seen.append(norm.running_mean.tolist())
    seen.append(norm.running_mean.tolist())
    seen.append(statistics.means()["running_mean"].tolist())
    statistics.settle()
    seen.append(norm.running_mean.tolist())
    return seen


def test_running_statistics_meet_in_their_mean(ranks: Ranks) -> None:
    first, second = ranks(2, meet)
    assert first == [[2.0], [3.0], [2.0], [3.0], [3.0]]
    assert second == [[4.0], [3.0], [4.0], [3.0], [3.0]]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "gpt-1m"], "for images it takes resnet-0.1m"),
        (["--model", "resnet-9m"], "got 'resnet-9m'"),
        (["--context", "64"], "--context is for text"),
        (["--vocab", "64"], "--vocab is for text"),
        (["--objective", "masked"], "--objective is for text"),
        (["--shards", "2", "--method", "average"], "--shards 2: every rank of a replica"),
        (["--stages", "2", "--method", "none"], "--stages 2: every rank of a replica"),
        (["--validation", "1"], "--validation must be between 0 and 1"),
        (["--data", "stdlib"], "resnet-0.1m reads images, and --data stdlib is text"),
        (["--adversarial", "0.1", "--compile"], "--compile: perturbed images are made beside"),
        (["--adversarial", "-1"], "--adversarial takes a number >= 0, got -1"),
        (
            ["--adversarial", "0.1", "--data", "stdlib", "--model", "gpt-1m"],
            "is text: leave it out",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_task(parse([*RUN, *flags])).build_model()
