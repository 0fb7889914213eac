"""What thresholds cost in quality: validation loss and bytes beside dense averaging.

    python benchmarks/dct.py                   2 replicas, 600 steps, 3 seeds (an hour)
    python benchmarks/dct.py --quick           60 steps, 1 seed, 3 methods: under a minute
    python benchmarks/dct.py --only sgd        methods whose name has that in it
    python benchmarks/dct.py --only sgd --seeds 1 --lr 0.1     another learning rate of SGD
    python benchmarks/dct.py --results FILE    keeps finished runs there, and skips them

Virtual replicas in one process (virtual.py; optimizers and codecs are the real ones), a byte GPT of
0.3M parameters on the Python standard library, 4 windows of 64 tokens a replica and step, the same
data, weights and schedule for every method. `share` is the least and the largest share of a bucket
that was sent in any step, over the density asked for. Prints a table and, as its last line, one
JSON object: {"loss": {method: {"mean", "spread", "seeds", "bytes"}}, "checks": {...}}.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from virtual import VirtualWorld  # isort: skip

import thinwire as tw
from thinwire.train.corpus import Corpus, load_corpus
from thinwire.train.data import Batches, DataConfig, validation_batches
from thinwire.train.models import ModelConfig, build_model
from thinwire.train.optimizers import OptimizerConfig, build_optimizer, learning_rate
from thinwire.wire.codecs import Threshold

BATCH, CONTEXT, VALIDATION_WINDOWS = 4, 64, 400
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--lr", type=float, default=SGD, help="of the SGD methods")
    parser.add_argument("--results", type=Path, help="a file of JSON lines")
    given = parser.parse_args()
    torch.set_num_threads(1)
    steps, seeds = (60, 1) if given.quick else (600, given.seeds)
    kept = given.results.read_text() if given.results and given.results.exists() else ""
    results = [json.loads(line) for line in kept.splitlines()]
    done = {(r["method"], r["seed"], r["steps"], r["replicas"], r["lr"]) for r in results}
    corpus = load_corpus(DataConfig())
    names = [name for name in (QUICK if given.quick else METHODS) if given.only in name]
    for seed in range(seeds):
        for name in names:
            lr = METHODS[name][0] or given.lr
            if (name, seed, steps, given.replicas, lr) in done:
                continue
            record = {"method": name, "seed": seed, "steps": steps, "replicas": given.replicas}
            make = METHODS[name][1]
            record |= {"lr": lr} | train(make, lr, corpus, steps, seed, given.replicas)
            results.append(record)
            print(json.dumps(record), file=sys.stderr, flush=True)
            if given.results:
                with given.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    mine = [r for r in results if (r["steps"], r["replicas"]) == (steps, given.replicas)]
    named = [r for r in mine if r["method"] in METHODS]
    report([r for r in named if r["lr"] == (METHODS[r["method"]][0] or given.lr)], given.quick)


def train(
    make: Callable[[torch.nn.Module], tw.WireOptimizer],
    lr: float,
    corpus: Corpus,
    steps: int,
    seed: int,
    replicas: int,
) -> dict[str, Any]:
    """Validation loss, bytes a rank has sent, and the extremes of the share that was sent."""
    world = VirtualWorld(replicas)

    def replica(rank: int) -> dict[str, Any]:
        settings = OptimizerConfig(lr=lr)
        with world.lock:  # one random number generator for all threads
            model = build_model(ModelConfig(), corpus.vocab, CONTEXT, seed)
        optimizer = world.build(lambda: make(model))
        batches = Batches(corpus.train, CONTEXT, BATCH, rank, replicas, seed)
        shares = []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step, steps)
            model(*batches.next()).backward()
            if isinstance(optimizer, tw.GradientAverage):
                optimizer.average()
                shares += shares_of(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
        sent = optimizer.account.bytes
        optimizer.finish()
        loss = validate(model, corpus, rank, optimizer.wire)
        return {"loss": loss, "bytes": sent, "share": [min(shares), max(shares)] if shares else []}

    return world.run(replica)[0]


def shares_of(optimizer: tw.GradientAverage) -> list[float]:
    """Of every bucket, what was sent over what was asked for."""
    codecs = [bucket.memory for bucket in optimizer.buckets]
    return [c.share / c.density for c in codecs if isinstance(c, Threshold)]


@torch.no_grad()
def validate(model: torch.nn.Module, corpus: Corpus, rank: int, wire: tw.Wire) -> float:
    windows = validation_batches(
        corpus.validation, CONTEXT, 16, rank, wire.size, VALIDATION_WINDOWS
    )
    losses = [(float(model(x, y)) * y.numel(), y.numel()) for x, y in windows]
    total, count = wire.agree([sum(a for a, _ in losses), sum(b for _, b in losses)], "sum")
    return total / count


def report(results: list[dict[str, Any]], quick: bool) -> None:
    table: dict[str, dict[str, Any]] = {}
    for name in METHODS:
        runs = [r for r in results if r["method"] == name]
        if runs:
            losses = [round(r["loss"], 4) for r in runs]
            table[name] = {
                "mean": round(statistics.mean(losses), 4),
                "spread": round(max(losses) - min(losses), 4),
                "seeds": losses,
                "bytes": runs[0]["bytes"],
                "share": _extremes([r["share"] for r in runs if r["share"]]),
            }
    checks = {name: _against_dense(name, table) for name in table}
    print(f"{'method':30}{'loss':>8}{'':8}{'over dense':>11}{'bytes, times less':>19}{'share':>14}")
    for name, cell in table.items():
        ratio, fewer = checks[name].get("loss", 1.0), checks[name].get("bytes", 1.0)
        share = " - ".join(f"{s:.2f}" for s in cell["share"])
        loss = f"{cell['mean']:8.3f} ±{cell['spread'] / 2:.3f}"
        print(f"{name:30}{loss}{ratio:11.4f}{fewer:19.1f}{share:>16}")
    print(json.dumps({"loss": table, "checks": checks, "quick": quick}))


def _against_dense(name: str, table: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Loss over that of the same optimizer with dense averaging, and how many times less bytes."""
    dense = table.get(PAIRS[name.split(",")[0]])
    if dense is None:
        return {}
    mine = table[name]
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
