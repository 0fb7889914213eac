"""The noise scale of a run: which methods show it, that it is the right one, and its flag."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Ranks
from tests.programs import corpus, records, small  # noqa: F401
from thinwire.errors import UsageError
from thinwire.train.config import TrainConfig, parse
from thinwire.train.methods.registry import METHODS, find_method
from thinwire.train.tasks.registry import find_task
from thinwire.train.worker import run_worker
from thinwire.wire import world

STEPS, BATCH, CONTEXT = 20, 2, 16


def train(argv: list[str]) -> dict[str, Any]:
    return run_worker(parse(argv))[1]


def by_hand(config: TrainConfig, size: int, passes: int) -> tuple[float, float]:
    """Mean noise and signal of a run that never moves (--lr 0), from gradients of single passes."""
    task = find_task(config)
    model = task.build_model()
    readers = [task.batches(rank, size) for rank in range(size)]
    b, big_b = BATCH * CONTEXT, BATCH * CONTEXT * size * passes
    noise = signal = 0.0
    for _ in range(STEPS):
        each = []
        for reader in readers:
            for _ in range(passes):
                model.zero_grad()
                model(*reader.next()).backward()
                each.append(torch.cat([p.grad.view(-1) for p in model.parameters()]))  # type: ignore
        small = sum(float(g.square().sum()) for g in each) / len(each)
        big = float(torch.stack(each).mean(0).square().sum())
        noise += (small - big) / (1 / b - 1 / big_b) / STEPS
        signal += (big_b * big - b * small) / (big_b - b) / STEPS
    return noise, signal


@pytest.mark.parametrize(
    ("method", "size", "passes"),
    [("average", 2, 2), ("one-bit-adam", 2, 1), ("overlapped", 1, 2)],
)
def test_a_run_reports_the_noise_scale_of_its_gradients(
    ranks: Ranks, small: list[str], tmp_path: Path, method: str, size: int, passes: int
) -> None:
    run = tmp_path / "run"
    argv = [*small, "--method", method, "--lr", "0", "--steps", str(STEPS), "--run", str(run)]
    argv += ["--accumulate", str(passes), "--eval-every", "0", "--noise-scale", "on"]
    argv += ["--dense", "fp32", "--freeze-at", "19"] if method == "one-bit-adam" else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", str(size))
        config = parse(argv)
    summaries = ranks(size, train, argv)
    noise, signal = by_hand(config, size, passes)
    if method == "one-bit-adam":  # the last step is no longer dense: it compares nothing
        assert summaries[0]["noise_scale"] == pytest.approx(noise / signal, rel=0.2)
    else:
        # Blocks weigh by their age: 8 steps, 8 and 4.
        assert summaries[0]["noise_scale"] == pytest.approx(noise / signal, rel=0.1)
    steps = [r for r in records(run) if r["kind"] == "step"]
    assert steps[14]["noise_scale"] is None, "the first block lands with the second"
    assert steps[15]["noise_scale"] > 0
    now = f"; this run has {BATCH * CONTEXT * size * passes:,}"
    assert now in summaries[0]["noise_scale_reading"]


def test_where_there_is_nothing_to_compare_nothing_is_reported(
    ranks: Ranks, small: list[str], tmp_path: Path
) -> None:
    argv = [*small, "--steps", "9", "--eval-every", "0"]
    for number, flags in enumerate([["--method", "average"], ["--noise-scale", "off"]]):
        run = tmp_path / str(number)
        flags += ["--accumulate", str(1 + number)]
        summary = ranks(1, train, [*argv, *flags, "--run", str(run)])[0]
        assert "noise_scale" not in summary
        assert "noise_scale" not in records(run)[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "ddp"], "--noise-scale on: one replica needs two passes a step"),
        (["--method", "none", "--workers", "2"], "none never shows the exact mean gradient"),
        (["--method", "average", "--codec", "int4+ef", "--workers", "2"], "--accumulate 2"),
        (["--method", "zero-one-adam", "--workers", "2"], "zero-one-adam never shows"),
    ],
)
def test_on_is_refused_where_it_cannot_be(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse([*flags, "--noise-scale", "on"])
    parse([*flags, "--noise-scale", "on", "--accumulate", "2"])
    parse([*flags, "--noise-scale", "auto"])


def promised() -> list[str]:
    """Methods whose replica and whose entry in the registry disagree."""
    world.init()
    wrong = []
    for name, method in METHODS.items():
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
        settings = method.settings()
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        try:
            replica = find_method(name).build(model, inner, settings, None)
        except UsageError:
            continue
        if replica.averages_gradients != method.averages(settings):
            wrong.append(name)
    return wrong


def test_the_registry_says_what_the_replicas_do(ranks: Ranks) -> None:
    assert ranks(1, promised) == [[]]
