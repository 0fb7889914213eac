"""A replica in stages (`thinwire train --stages`) against the same model in one piece."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import corpus, records, small  # noqa: F401
from thinwire.errors import UsageError
from thinwire.train.checkpoints.export import export, load_exported
from thinwire.train.config import parse
from thinwire.train.loop.stage_trainer import StageTrainer
from thinwire.train.loop.stop_consensus import PERIOD, StopConsensus
from thinwire.train.loop.trainer import Trainer
from thinwire.train.preflight import preflight
from thinwire.train.tasks.registry import find_task
from thinwire.train.worker import run_worker

BRIEF = ["--model", "gpt-0.3m", "--eval-every", "4", "--lr", "1e-3"]


def run(argv: list[str], stop_at: int = 0) -> dict[str, Any]:
    """One worker; `stop_at`: worker 1 is asked to stop after that step."""
    torch.set_num_threads(1)
    beat = StopConsensus.beat

    def asked(self: StopConsensus, step: int, loss: float, norm: float) -> int:
        if step == stop_at and self._wire.rank == 1:
            self.stop_asked = 15
        return beat(self, step, loss, norm)

    if stop_at:
        StopConsensus.beat = asked  # type: ignore[method-assign]
    return run_worker(parse(argv))[1]


def losses(folder: Path, kind: str = "step", rank: int = 0) -> list[float]:
    name = "loss" if kind == "step" else "val_loss"
    return [r[name] for r in records(folder, rank) if r["kind"] == kind]


@pytest.mark.parametrize("replicas", [1, 2])
def test_without_delay_stages_are_the_model_in_one_piece(ranks, small, tmp_path, replicas):
    """`flush` computes the same gradients; data parallel replicas of it, too."""
    flags = [*small, *BRIEF, "--method", "average", "--steps", "8", "--accumulate", "2"]
    ranks(replicas, run, [*flags, "--tied", "no", "--run", str(tmp_path / "whole")])
    staged = ["--stages", "2", "--schedule", "flush", "--clip", "0"]
    ranks(2 * replicas, run, [*flags, *staged, "--run", str(tmp_path / "staged")])
    ranks(replicas, run, [*flags, "--tied", "no", "--clip", "0", "--run", str(tmp_path / "free")])
    for kind in ("step", "eval"):
        whole, cut = losses(tmp_path / "free", kind), losses(tmp_path / "staged", kind)
        assert cut == pytest.approx(whole, rel=2e-5)
    assert losses(tmp_path / "whole") != losses(tmp_path / "free")  # clipping is by stage


def settled(folder: Path, rank: int) -> list[dict[str, Any]]:
    """A worker's metrics but for the bytes, which are counted as they leave: a step sooner or
    later."""
    return [{k: v for k, v in r.items() if k != "bytes"} for r in records(folder, rank)]


MESH = ["--stages", "2", "--method", "overlapped", "--every", "3", "--save-every", "6"]


def test_resume_is_bit_exact_and_export_is_what_was_evaluated(ranks, small, tmp_path):
    flags = [*small, *BRIEF, *MESH, "--steps", "12"]
    through, back = tmp_path / "through", tmp_path / "back"
    summaries = ranks(4, run, [*flags, "--run", str(through)])
    assert all(s["val_loss"] == summaries[0]["val_loss"] for s in summaries)
    assert losses(through)[-1] < losses(through)[0]
    assert losses(through, rank=0) == losses(through, rank=1)  # which makes them

    shutil.copytree(through, back)
    (back / "checkpoints" / "latest").write_text("step-00000006\n")
    ranks(4, run, [*flags, "--run", str(back), "--resume"])
    for rank in range(4):
        assert settled(back, rank) == settled(through, rank)
    assert records(back)[-2]["bytes"] == records(through)[-2]["bytes"]

    model = load_exported(export(through, tmp_path / "model.safetensors"))
    assert not model.config.tied
    total = count = 0.0
    with torch.no_grad():
        for x, y in find_task(parse([*flags, "--replicas", "2"])).validation(0, 1):
            total, count = total + float(model(x, y)) * y.numel(), count + y.numel()
    assert total / count == pytest.approx(summaries[0]["val_loss"], rel=1e-5)


def test_a_stop_in_mid_leg_and_other_numbers_of_replicas(ranks, small, tmp_path) -> None:
    flags = [*small, *BRIEF, *MESH, "--steps", "24", "--eval-every", "0"]
    folder = ["--run", str(tmp_path / "run")]
    early = ranks(4, run, [*flags, "--save-every", "0", *folder], 4)
    stop = early[0]["step"]
    assert stop == 2 * PERIOD + 1  # one micro-batch was under way
    assert {s["step"] for s in early} == {stop}
    assert early[0]["stopped_by"] == "SIGTERM"
    for workers, steps in ((2, 12), (6, 14)):
        ranks(workers, run, [*flags, "--steps", str(steps), *folder, "--resume"])
        assert len(losses(tmp_path / "run")) == steps
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stages", "99", "--workers", "99"], "the model has 8 parts"),
        (["--stages", "2", "--workers", "3"], "3 workers are no multiple"),
        (["--stages", "2", "--workers", "2", "--replicas", "3"], "contradict each other"),
        (["--lead", "2"], "--lead is a setting of pipelines: add --stages"),
        (["--stages", "2", "--workers", "2", "--method", "ddp"], "ddp needs each replica whole"),
        (["--stages", "2", "--replicas", "1", "--shards", "2"], "use one of them"),
        (["--stages", "2", "--replicas", "1", "--compile"], "leave it out"),
        (["--stages", "2", "--replicas", "1", "--schedule", "2bw"], "--accumulate 2 or more"),
        (["--stages", "2", "--replicas", "1", "--tied", "yes"], "are one parameter"),
        (["--stages", "2", "--replicas", "1", "--cut", "9"], "rising numbers"),
        (["--stages", "2", "--replicas", "1", "--activation-codec", "int8+ef"], "use int8"),
        (["--stages", "2", "--activation-codec", "threshold:2"], "threshold:2 takes a share"),
        (
            ["--stages", "2", "--activation-codec", "threshold:0.1", "--gradient-codec", "int8"],
            "--gradient-codec int8",
        ),
    ],
)
def test_bad_stages_are_refused_before_anything_starts(flags, message, small, tmp_path):
    method = [] if "--method" in flags else ["--method", "none"]

    def start() -> None:
        preflight(parse([*small, *method, *flags]), tmp_path / "run")

    with pytest.raises(UsageError, match=message):
        start()


def test_replicas_give_the_number_of_workers() -> None:
    config = parse(["--stages", "2", "--replicas", "3", "--method", "none"])
    assert config.place.workers == 6
    assert parse(["--stages", "3", "--method", "none"]).place.workers == 3
    assert parse(["--method", "none"]).place.workers == 1
    assert issubclass(StageTrainer, Trainer)
