"""What thresholds cost in quality: validation loss and bytes beside dense averaging.

    python -m benchmarks.quality.threshold                   2 replicas, 600 steps, 3 seeds
    python -m benchmarks.quality.threshold --quick           60 steps, 1 seed, 3 methods
    python -m benchmarks.quality.threshold --only sgd        methods whose name has that in it
    python -m benchmarks.quality.threshold --only sgd --seeds 1 --lr 0.1     another rate of SGD
    python -m benchmarks.quality.threshold --results FILE    keeps finished runs, and skips them

Virtual replicas in one process (harness/virtual.py; optimizers and codecs are the real ones), a
byte GPT of 0.3M parameters on the Python standard library, 4 windows of 64 tokens a replica and
step, the same data, weights and schedule for every method. `share` is the least and the largest
share of a bucket that was sent in any step, over the density asked for. Prints a table and, as its
last line, one JSON object: {"loss": {method: {"mean", "spread", "seeds", "bytes", "share"}},
"checks": {...}}.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.results import Job, Record, Results, over_seeds, run_here
from benchmarks.harness.virtual import train_virtual
from thinwire.train.data.corpus import Corpus, load_corpus
from thinwire.train.data.tokens import DataConfig
from thinwire.train.loop.optimizers import OptimizerConfig, build_optimizer
from thinwire.wire.codecs import Threshold

SGD, ADAMW = 0.3, 2e-3  # learning rates

Method = tuple[float | None, Callable[[torch.nn.Module], tw.WireOptimizer]]
"""The learning rate, None where --lr says it, and what makes the optimizer."""


def sgd(own_momentum: float = 0.0, /, **codec: Any) -> Method:
    def make(model: torch.nn.Module) -> tw.WireOptimizer:
        inner = torch.optim.SGD(model.parameters(), lr=SGD, momentum=own_momentum)
        return tw.GradientAverage(inner, codec=Threshold(**codec) if codec else None)

    return None, make


def adamw(wrap: Callable[[torch.optim.Optimizer], tw.WireOptimizer], **config: Any) -> Method:
    settings = OptimizerConfig(lr=ADAMW, **config)
    return ADAMW, lambda model: wrap(build_optimizer(settings, model))


METHODS: dict[str, Method] = {
    "sgd, dense": sgd(0.9),
    "sgd, dct 2 % 4 bits": sgd(density=0.02, momentum=0.9),
    "sgd, dct 2.4 % 2 bits": sgd(density=0.024, value_bits=2, momentum=0.9),
    "sgd, dct 2 %, own momentum": sgd(0.9, density=0.02),
    "adamw, dense": adamw(tw.GradientAverage),
    "adamw, dct 2 % 4 bits": adamw(lambda i: tw.GradientAverage(i, codec=Threshold(0.02))),
    "adamw, sparseloco every 8": adamw(lambda i: tw.SparseLoCo(i, every=8)),
}
QUICK = ["sgd, dense", "sgd, dct 2 % 4 bits", "adamw, sparseloco every 8"]
PAIRS = {"sgd": "sgd, dense", "adamw": "adamw, dense"}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="", help="methods with this in their name")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--replicas", type=int, default=2)
    arguments.add_argument("--lr", type=float, default=SGD, help="of the SGD methods")
    arguments.add_argument("--results", type=Path, help="a file of JSON lines")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    corpus, results = load_corpus(DataConfig()), Results(given.results)
    run_here(planned(given), results, lambda job: train(job, corpus, given.size))
    steps = steps_of(given)[0]
    mine = [r for r in results.records if (r["steps"], r["replicas"]) == (steps, given.replicas)]
    named = [r for r in mine if r["method"] in METHODS]
    report([r for r in named if r["lr"] == (METHODS[r["method"]][0] or given.lr)], given.size)


def steps_of(given: argparse.Namespace) -> tuple[int, int]:
    """Of a run, and the seeds."""
    found: tuple[int, int] = given.size.of(full=(600, given.seeds), quick=(60, 1), tiny=(8, 1))
    return found


def planned(given: argparse.Namespace) -> list[Job]:
    steps, seeds = steps_of(given)
    names = METHODS if given.size is Size.FULL else QUICK
    return [
        {"method": name, "seed": seed, "steps": steps, "replicas": given.replicas}
        | {"lr": METHODS[name][0] or given.lr}
        for seed in range(seeds)
        for name in names
        if given.only in name
    ]


def train(job: Job, corpus: Corpus, size: Size) -> Record:
    """Validation loss, bytes a rank has sent, and the extremes of the share that it sent."""
    batch, context, windows = size.of(full=(4, 64, 400), quick=(4, 64, 400), tiny=(1, 16, 4))
    shares: list[float] = []

    def averaged(optimizer: tw.GradientAverage) -> None:
        if optimizer.wire.rank == 0:
            shares.extend(shares_of(optimizer))

    found = train_virtual(
        METHODS[job["method"]][1],
        corpus,
        replicas=job["replicas"],
        steps=job["steps"],
        seed=job["seed"],
        settings=OptimizerConfig(lr=job["lr"]),
        batch=batch,
        context=context,
        windows=windows,
        averaged=averaged,
    )
    share = [min(shares), max(shares)] if shares else []
    return {"loss": found["loss"], "bytes": found["bytes"], "share": share}


def shares_of(optimizer: tw.GradientAverage) -> list[float]:
    """Of every bucket, what was sent over what was asked for."""
    codecs = [bucket.memory for bucket in optimizer.buckets]
    return [c.share / c.density for c in codecs if isinstance(c, Threshold)]


def report(records: list[Record], size: Size) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name in METHODS:
        if runs := [r for r in records if r["method"] == name]:
            share = _extremes([r["share"] for r in runs if r["share"]])
            more = {"bytes": runs[0]["bytes"], "share": share}
            found[name] = over_seeds([r["loss"] for r in runs]) | more
    checks = {name: _against_dense(name, found) for name in found}
    table = Table("method", "loss", "", "over dense", "bytes, times less", "share", width=14)
    for name, cell in found.items():
        ratio, fewer = checks[name].get("loss", 1.0), checks[name].get("bytes", 1.0)
        losses = f"{cell['mean']:.3f}", f"±{cell['spread'] / 2:.3f}"
        extremes = " - ".join(f"{s:.2f}" for s in cell["share"])
        table.row(name, *losses, f"{ratio:.4f}", f"{fewer:.1f}", extremes)
    end({"loss": found, "checks": checks}, size)


def _against_dense(name: str, found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Loss over that of the same optimizer with dense averaging, and how many times less bytes."""
    dense = found.get(PAIRS[name.split(",")[0]])
    if dense is None:
        return {}
    mine = found[name]
    return {
        "loss": round(mine["mean"] / dense["mean"], 4),
        "bytes": round(dense["bytes"] / mine["bytes"], 1),
    }


def _extremes(shares: list[list[float]]) -> list[float]:
    if not shares:
        return []
    return [round(min(s[0] for s in shares), 3), round(max(s[1] for s in shares), 3)]


if __name__ == "__main__":
    main()
