"""The training loop against plain PyTorch ones, its metrics, its evaluation, and resuming.

Everything runs in real processes; what they leave in the run's directory is compared.
"""

import math
import os
import signal
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.conftest import Ranks
from tests.programs import corpus, records, small  # noqa: F401
from thinwire.train.checkpoints import checkpoint
from thinwire.train.checkpoints.export import export, load_exported
from thinwire.train.config import TrainConfig, parse
from thinwire.train.data.corpus import load_corpus
from thinwire.train.data.tokens import IGNORED, Batches, validation_batches
from thinwire.train.loop.metrics import MetricsWriter
from thinwire.train.tasks.models import GPT, build_model
from thinwire.train.worker import run_worker

SGD = ["--optimizer", "SGD", "--lr", "0.5", "--weight-decay", "0"]


def train(argv: list[str]) -> dict[str, Any]:
    """On every rank: a worker, from its flags to its summary."""
    return run_worker(parse(argv))[1]


def train_until_killed(argv: list[str], signum: int, at: int, victim: int) -> dict[str, Any]:
    """The same, with a signal for one of them right after its step `at`."""
    write = MetricsWriter.write

    def write_and_signal(self: MetricsWriter, record: dict[str, Any]) -> None:
        write(self, record)
        if record["step"] == at and os.environ["RANK"] == str(victim):
            os.kill(os.getpid(), signum)

    MetricsWriter.write = write_and_signal  # type: ignore[method-assign]
    return train(argv)


def model_of(run: Path, replica: int = 0) -> dict[str, torch.Tensor]:
    loaded = checkpoint.load(run, replica=replica)
    model: dict[str, torch.Tensor] = (loaded.shared | loaded.private)["model"]
    return model


def losses(run: Path) -> list[float]:
    return [r["loss"] for r in records(run) if r["kind"] == "step"]


# -- oracles -------------------------------------------------------------------------------------


def plain_loop(argv: list[str]) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """What a user would write without us: (weights, losses, validation loss)."""
    config = parse(argv)
    text = load_corpus(config.data)
    mask = text.vocab if config.model.objective == "masked" else None
    model = build_model(config.model, text.vocab, config.data.context, config.loop.seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}],
        lr=config.optimizer.lr,
    )
    steps, warmup = config.loop.steps, config.optimizer.warmup

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.1 + 0.9 * (0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))

    scheduler = LambdaLR(optimizer, factor)
    data, seed = config.data, config.loop.seed
    batches = Batches(text.train, data.context, data.batch, 0, 1, seed, mask_vocab=mask)
    history = []
    for _ in range(steps):
        total = 0.0
        for _ in range(config.loop.accumulate):
            x, y = batches.next()
            with autocast(config):
                loss = model(x, y)
            (loss / config.loop.accumulate).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        history.append(total / config.loop.accumulate)
    return model.state_dict(), history, plain_evaluation(model, config)


@torch.no_grad()
def plain_evaluation(model: GPT, config: TrainConfig) -> float:
    text, data = load_corpus(config.data), config.data
    mask = text.vocab if config.model.objective == "masked" else None
    windows = validation_batches(
        text.validation, data.context, data.batch, 0, 1, config.loop.eval_windows, mask_vocab=mask
    )
    total, count = 0.0, 0
    for x, y in windows:
        targets = int((y != IGNORED).sum())
        with autocast(config):
            total += float(model(x, y)) * targets
        count += targets
    return total / count


def autocast(config: TrainConfig) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16) if config.loop.bf16 else nullcontext()


@pytest.mark.parametrize(
    "extra",
    [
        ["--clip", "0.5", "--seed", "5"],
        ["--accumulate", "3"],
        ["--objective", "masked"],
        ["--bf16"],
    ],
    ids=["plain", "accumulate", "masked", "bf16"],
)
@pytest.mark.parametrize("method", ["none"])
def test_one_worker_is_a_plain_loop_bit_for_bit(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
    method: str,
    extra: list[str],
) -> None:
    argv = [*small, "--method", method, "--steps", "6", "--eval-every", "0", *extra]
    expected, history, evaluation = plain_loop(argv)
    (summary,) = ranks(1, train, [*argv, "--run", str(tmp_path / "run")])
    assert losses(tmp_path / "run") == history
    found = model_of(tmp_path / "run")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert summary["val_loss"] == evaluation
    assert summary["loss"] == history[-1]
    assert len(set(history)) == 6


def test_workers_together_are_one_worker_with_their_batch(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
) -> None:
    """ddp, average, and micro-batches: all the same gradient, up to the order of the sum."""
    argv = [*small, *SGD, "--steps", "5"]
    shapes = {
        "one": (1, ["--method", "none", "--batch", "4"]),
        "micro": (1, ["--method", "none", "--batch", "1", "--accumulate", "4"]),
        "ddp": (2, ["--method", "ddp"]),
        "ddp-micro": (2, ["--method", "ddp", "--batch", "1", "--accumulate", "2"]),
        "average": (2, ["--method", "average"]),
    }
    models = {}
    for name, (workers, extra) in shapes.items():
        ranks(workers, train, [*argv, *extra, "--run", str(tmp_path / name)])
        models[name] = model_of(tmp_path / name)
    start = build_model(parse([]).model, 256, 16, 0).state_dict()
    # Two workers with two micro-batches read the windows in another order than one worker does.
    for name in ("micro", "ddp", "average"):
        for key, value in models["one"].items():
            assert torch.allclose(models[name][key], value, rtol=0, atol=2e-6), (name, key)
    assert all(torch.equal(models["ddp"][k], v) for k, v in models["average"].items())
    assert any((models["one"][k] - start[k]).abs().max() > 1e-2 for k in start)
    assert {records(tmp_path / name)[-1]["tokens"] for name in shapes} == {5 * 4 * 16}


def test_the_evaluation_does_not_depend_on_the_number_of_replicas(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
) -> None:
    argv = [*small, "--lr", "0", "--weight-decay", "0", "--steps", "1", "--eval-windows", "7"]
    config = parse(argv)
    plain = plain_evaluation(build_model(config.model, 256, 16, 0), config)
    for workers in (1, 2, 3):
        for objective in ("causal",):
            flags = ["--objective", objective, "--run", str(tmp_path / f"{workers}")]
            for summary in ranks(workers, train, [*argv, *flags]):
                assert summary["val_loss"] == pytest.approx(plain, rel=1e-6)


def test_metrics_have_a_line_for_every_step_and_evaluation(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    argv = [*small, "--steps", "5", "--eval-every", "2", "--accumulate", "2"]
    first, second = ranks(2, train, [*argv, "--run", str(run)])
    assert first == second
    for rank in (0, 1):
        lines = records(run, rank)
        shape = [(r["kind"], r["step"]) for r in lines]
        assert shape == [
            *[("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("step", 4), ("eval", 4)],
            *[("step", 5), ("eval", 5)],
        ]
        steps = [r for r in lines if r["kind"] == "step"]
        fields = {"kind", "step", "loss", "tokens", "bytes", "lag", "skipped", "lr", "grad_norm"}
        fields |= {"noise_scale", "noise_scale_error"}
        assert all(set(r) == fields for r in steps)
        assert [r["tokens"] for r in steps] == [n * 2 * 2 * 2 * 16 for n in range(1, 6)]
        assert all(a["bytes"] < b["bytes"] for a, b in pairwise(steps))
    raw = (run / "metrics" / "rank-0.jsonl").read_text().splitlines()[0]
    assert all(name in raw for name in ('"exposed"', '"hidden"', '"seconds"', '"tokens_per_s"'))
    assert first["tokens"] == 5 * 2 * 2 * 2 * 16
    assert first["bytes"] == 2 * records(run)[-2]["bytes"]
    assert first["stopped_by"] is None


def test_an_exported_model_has_the_loss_of_the_run(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
) -> None:
    """Also where replicas have weights of their own: their mean is evaluated and exported."""
    for method in ("none", "average"):
        argv = [*small, "--steps", "3", "--method", method, "--run", str(tmp_path / method)]
        summary = ranks(2, train, argv)[0]
        model = load_exported(export(tmp_path / method, tmp_path / f"{method}.safetensors"))
        assert plain_evaluation(model, parse(argv)) == pytest.approx(summary["val_loss"], rel=1e-6)


# -- resuming ------------------------------------------------------------------------------------

METHODS = {
    "none": (1, ["--method", "none"]),
    "ddp-2": (2, ["--method", "ddp", "--bucket-mb", "0.1"]),
    "ddp-3": (3, ["--method", "ddp", "--bucket-mb", "0.1"]),
    "int4": (2, ["--method", "average", "--codec", "int4+ef"]),
}


def assert_equal_ends(one: Path, other: Path, workers: int) -> None:
    """Weights, optimizer, position, randomness, the method's own state and every metric."""
    for rank in range(workers):
        a, b = (checkpoint.load(run, replica=rank) for run in (one, other))
        assert (a.step, a.replicas) == (b.step, b.replicas)
        for left, right in ((a.shared, b.shared), (a.private, b.private)):
            for part in (left, right):
                part.pop("seconds", None)
                for account in part.get("accounts", []):
                    account.update(exposed=0, hidden=0)
            assert_same(left, right)
        assert records(one, rank) == records(other, rank)


def assert_same(a: Any, b: Any, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}/{index}")
    else:
        assert a == b, where


@pytest.mark.parametrize("name", METHODS)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
    name: str,
) -> None:
    """SIGTERM for one worker after step 2 stops all of them after step 8, half-way."""
    workers, extra = METHODS[name]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    argv = [*small, *extra, "--steps", "16", "--eval-every", "4"]
    ranks(workers, train, [*argv, "--run", str(straight)])
    stop = [*argv, "--run", str(halved)]
    ends = ranks(workers, train_until_killed, stop, signal.SIGTERM, 2, workers - 1)
    assert [(end["step"], end["stopped_by"]) for end in ends] == [(8, "SIGTERM")] * workers
    assert checkpoint.read_manifest(halved).step == 8
    ends = ranks(workers, train, ["--run", str(halved), "--resume"])
    assert [(end["step"], end["stopped_by"]) for end in ends] == [(16, None)] * workers
    assert_equal_ends(straight, halved, workers)


@pytest.mark.parametrize("name", ["none", "int4"])
def test_a_killed_run_goes_on_from_its_last_checkpoint(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
    name: str,
) -> None:
    workers, extra = METHODS[name]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    argv = [*small, *extra, "--steps", "8", "--eval-every", "3", "--save-every", "3"]
    argv += ["--timeout", "2"]
    ranks(workers, train, [*argv, "--run", str(straight)])
    flags = [*argv, "--run", str(killed)]
    ranks(workers, train_until_killed, flags, signal.SIGKILL, 5, workers - 1, errors=True)
    assert checkpoint.read_manifest(killed).step == 3
    assert records(killed)[-1]["step"] >= 5
    ranks(workers, train, ["--run", str(killed), "--resume"])
    assert_equal_ends(straight, killed, workers)


@pytest.mark.parametrize(
    ("method", "before", "after"),
    [("ddp", 2, 3), ("none", 3, 2), ("average", 2, 1), ("none", 1, 2)],
)
def test_a_run_goes_on_with_another_number_of_workers(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
    method: str,
    before: int,
    after: int,
) -> None:
    run = str(tmp_path)
    flags = ["--method", method, *(["--codec", "int4+ef"] if method == "average" else [])]
    ranks(before, train, [*small, *flags, "--steps", "3", "--run", run])
    weights = model_of(tmp_path)
    ends = ranks(after, train, ["--run", run, "--resume", "--steps", "5"])
    windows = 3 * before * 2 + 2 * after * 2
    assert checkpoint.load(run, replica=0).shared["position"] == windows
    assert {end["tokens"] for end in ends} == {windows * 16}
    lines = [r for r in records(tmp_path) if r["kind"] == "step"]
    per_step = [b["tokens"] - a["tokens"] for a, b in pairwise(lines)]
    assert per_step == [before * 32] * 2 + [after * 32] * 2
    assert not all(torch.equal(weights[k], v) for k, v in model_of(tmp_path).items())
    assert ends[0]["val_loss"] < 5.6


def test_a_resumed_run_may_change_its_pace_and_nothing_that_its_state_depends_on(
    ranks: Ranks,
    small: list[str],
    tmp_path: Path,
) -> None:
    run = str(tmp_path)
    ranks(1, train, [*small, "--steps", "3", "--run", run])
    resume = ["--run", run, "--resume", "--steps", "5"]
    for flags, said in {
        ("--seed", "1"): "--seed 0, this one has --seed 1",
        ("--optimizer", "SGD"): "--optimizer AdamW, this one has --optimizer SGD",
        ("--weight-decay", "0.5"): "--weight-decay 0.01",
        ("--method", "none"): "--method ddp, this one has --method none",
        ("--bucket-mb", "3"): "--bucket-mb 25.0",
        ("--context", "8"): "the checkpoint is of another model",
        ("--validation", "0.6"): "has read other data",
    }.items():
        (refused,) = ranks(1, train, [*resume, *flags], errors=True)
        assert refused.kind == "UsageError"
        assert said in refused.message
    ranks(1, train, [*resume, "--lr", "0.25", "--batch", "1", "--final-lr", "1", "--clip", "2"])
    lines = [r for r in records(tmp_path) if r["kind"] == "step"]
    assert [r["lr"] for r in lines][3:] == [0.25, 0.25]
    assert [r["tokens"] for r in lines] == [32, 64, 96, 112, 128]
