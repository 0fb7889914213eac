"""What the local-update methods cost in quality: validation loss at equal tokens.

    python benchmarks/quality.py             4 replicas, 480 steps, 3 seeds, rounds of 16 (and 40)
    python benchmarks/quality.py --quick     60 steps, 1 seed, rounds of 10: under a minute
    python benchmarks/quality.py --only sparseloco        the methods with that in their name

Four real workers on loopback, a byte-level GPT of 0.3M parameters on the Python standard library,
AdamW inside, the mean of the replicas evaluated at the end (`finish()`), the same data, weights and
learning rate for every method. Nothing here is timed. Prints a table and, as its last line, one
JSON object: {"loss": {method: {every: {"mean", "spread", "seeds"}}}, "checks": {...}}.
"""

import argparse
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from thinwire.lab import Lab
from thinwire.train.corpus import load_corpus
from thinwire.train.data import Batches, DataConfig, validation_batches
from thinwire.train.models import ModelConfig, build_model
from thinwire.train.optimizers import OptimizerConfig, build_optimizer, learning_rate

REPLICAS, BATCH, CONTEXT, LR = 4, 4, 64, 2e-3
VALIDATION_WINDOWS = 400

Inner = torch.optim.Optimizer
METHODS: dict[str, Callable[[Inner, int], tw.WireOptimizer]] = {
    "ddp (every step)": lambda inner, every: tw.GradientAverage(inner),
    "slowmo 1/.5": lambda inner, every: tw.SlowMo(inner, every=every),
    "local sgd 1/0": lambda inner, every: tw.LocalSGD(inner, every=every),
    "diloco .7/.9 nesterov": lambda inner, every: tw.DiLoCo(inner, every=every),
    "streaming diloco, int4": lambda inner, every: tw.StreamingDiLoCo(
        inner, every=every, fragments=2, delay=2
    ),
    "overlapped 1/.5": lambda inner, every: tw.Overlapped(inner, every=every),
    "overlapped 1/.5, int4+ef": lambda inner, every: tw.Overlapped(
        inner, every=every, codec=tw.codecs.ErrorFeedback(tw.codecs.Int4())
    ),
    "overlapped .7/.9 nesterov": lambda inner, every: tw.LocalUpdates(
        inner,
        every=every,
        delay="round",
        fresh=1.0,
        outer=tw.Outer(lr=0.7, momentum=0.9, nesterov=True),
    ),
    "overlapped 1/0 (cocod)": lambda inner, every: tw.Overlapped(
        inner, every=every, outer_momentum=0.0
    ),
    "co2 1/.2, gap": lambda inner, every: tw.CO2(inner, every=every),
    "co2 1/.2, no penalty": lambda inner, every: tw.CO2(inner, every=every, penalty=1.0),
    "eager .4/.9 nesterov": lambda inner, every: tw.Eager(inner, every=every),
    "sparseloco 1/0, published": lambda inner, every: tw.SparseLoCo(inner, every=every),
    "sparseloco 1/0, top-k twice": lambda inner, every: tw.SparseLoCo(
        inner,
        every=every,
        codec=tw.codecs.ErrorFeedback(tw.codecs.TopK(gather=False), decay=0.95),
    ),
}
LONG_ROUNDS = {"slowmo 1/.5", "diloco .7/.9 nesterov", "overlapped 1/.5"} | {
    "co2 1/.2, gap",
    "co2 1/.2, no penalty",
}
BLOCKING = {"ddp (every step)", "slowmo 1/.5", "local sgd 1/0", "diloco .7/.9 nesterov"} | {
    name for name in METHODS if name.startswith("sparseloco")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    quick = parser.parse_args().quick
    with Lab(REPLICAS, None) as lab:
        lines: list[str] = []
        outcome = lab.start(
            [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]],
            sink=lambda line: _show(line.text, lines),
        ).wait()
    if outcome.code:
        sys.exit(str(outcome))
    results = [json.loads(line) for line in lines if line.startswith("{")]
    report(results, quick)


def _show(text: str, lines: list[str]) -> None:
    lines.append(text)
    print(text, file=sys.stderr, flush=True)


def worker(quick: bool) -> None:
    """Every method in turn, on all replicas; the first replica prints each loss."""
    tw.init()
    torch.set_num_threads(1)
    steps, seeds, rounds = (60, 1, [10]) if quick else (480, 3, [16, 40])
    names = ["ddp (every step)", "slowmo 1/.5", "overlapped 1/.5", "co2 1/.2, gap"]
    for seed in range(seeds):
        for name in names if quick else filter(_wanted, METHODS):
            for every in rounds if name in LONG_ROUNDS else rounds[:1]:
                loss = train(name, every, steps, seed)
                if os.environ["RANK"] == "0":
                    record = {"method": name, "every": every, "seed": seed, "loss": loss}
                    print(json.dumps(record), flush=True)


def _wanted(name: str) -> bool:
    only = sys.argv.index("--only") if "--only" in sys.argv else None
    return only is None or sys.argv[only + 1] in name


def train(name: str, every: int, steps: int, seed: int) -> float:
    corpus = load_corpus(DataConfig())
    model = build_model(ModelConfig(), corpus.vocab, CONTEXT, seed)
    settings = OptimizerConfig(lr=LR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these settings are unstable on purpose
        optimizer = METHODS[name](build_optimizer(settings, model), every)
    wire = optimizer.wire
    batches = Batches(corpus.train, CONTEXT, BATCH, wire.rank, wire.size, seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, steps)
        model(*batches.next()).backward()
        if isinstance(optimizer, tw.GradientAverage):
            optimizer.average()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    with torch.no_grad():
        losses = [
            (float(model(x, y)) * y.numel(), y.numel())
            for x, y in validation_batches(
                corpus.validation, CONTEXT, 16, wire.rank, wire.size, VALIDATION_WINDOWS
            )
        ]
    total, count = wire.agree([sum(a for a, _ in losses), sum(b for _, b in losses)], "sum")
    wire.close()
    return total / count


def report(results: list[dict[str, Any]], quick: bool) -> None:
    rounds = sorted({r["every"] for r in results})
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for record in results:
        cell = table.setdefault(record["method"], {}).setdefault(str(record["every"]), {})
        cell.setdefault("seeds", []).append(round(record["loss"], 4))
    for cells in table.values():
        for cell in cells.values():
            cell["mean"] = round(statistics.mean(cell["seeds"]), 4)
            cell["spread"] = round(max(cell["seeds"]) - min(cell["seeds"]), 4)
    print(f"{'method (outer lr / momentum)':30}" + "".join(f"  every={e:<9}" for e in rounds))
    for name, cells in table.items():
        waits = "waits" if name in BLOCKING else "never waits"
        figures = (cells.get(str(e)) for e in rounds)
        text = "".join(
            f"  {c['mean']:.3f} ±{c['spread'] / 2:.3f}" if c else " " * 15 for c in figures
        )
        print(f"{name:30}{text}   {waits}")
    print(json.dumps({"loss": table, "checks": checks(table, rounds), "quick": quick}))


def checks(
    table: dict[str, dict[str, dict[str, Any]]], rounds: list[int]
) -> dict[str, dict[str, float]]:
    """Overlapped over SlowMo (target <= 1.015), CO2 with the gap over without (target < 1)."""
    found: dict[str, dict[str, float]] = {}
    pairs = {
        "overlapped / slowmo": ("overlapped 1/.5", "slowmo 1/.5"),
        "co2 gap / no penalty": ("co2 1/.2, gap", "co2 1/.2, no penalty"),
    }
    for label, (a, b) in pairs.items():
        if a in table and b in table:
            found[label] = {
                str(e): round(table[a][str(e)]["mean"] / table[b][str(e)]["mean"], 4)
                for e in rounds
            }
    return found


if __name__ == "__main__":
    worker("--quick" in sys.argv) if "RANK" in os.environ else main()
