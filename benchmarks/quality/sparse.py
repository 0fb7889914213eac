"""What sparse averaging costs in quality: validation loss at equal tokens, by delay and correction.

    python benchmarks/sparse_quality.py             4 replicas, 480 steps, 3 seeds (an hour)
    python benchmarks/sparse_quality.py --quick     60 steps, 1 seed, 4 methods: under a minute
    python benchmarks/sparse_quality.py --only "5 %, delay 0" "5 %, delay 10, ema"
    python benchmarks/sparse_quality.py --results FILE    keeps finished runs there, and skips them

Four virtual replicas in one process (virtual.py; the optimizers are the real ones), a byte GPT of
0.3M parameters on the Python standard library, AdamW inside, the mean of the replicas evaluated
at the end (`finish()`), the same data, weights and learning rate for every method: those of
quality.py. Prints a table and, as its last line, one JSON object: {"loss": {method: {"mean",
"spread", "seeds", "apart"}}, "checks": {...}}. `apart` is how far the replicas are
from their mean in the end, relative to its norm.
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

REPLICAS, BATCH, CONTEXT, LR = 4, 4, 64, 2e-3
VALIDATION_WINDOWS = 400

Inner = torch.optim.Optimizer
Make = Callable[[Inner, int], tw.WireOptimizer]  # (inner, steps) -> optimizer


def sparse(**settings: Any) -> Make:
    return lambda inner, steps: tw.SparseAverage(inner, **{"steps": steps, **settings})


METHODS: dict[str, Make] = {
    "ddp (every step)": lambda inner, steps: tw.GradientAverage(inner),
    "none (averaged at the end)": lambda inner, steps: tw.LocalSGD(inner, every=10**9),
    "all weights, delay 0": sparse(fraction=1.0, delay=0),
    "5 %, delay 0": sparse(delay=0),
    "5 %, delay 10, ema": sparse(delay=10),
    "5 %, delay 10, delta": sparse(delay=10, correction="delta"),
    "5 %, delay 10, overwrite": sparse(delay=10, correction="overwrite"),
    "5 %, delay 10, ema to 0.01": sparse(delay=10, ema=(0.5, 0.01)),
    "5 %, delay 10, ema, bf16": sparse(delay=10, codec=tw.codecs.Dense(torch.bfloat16)),
    "5 %, delay 10, ema, int8": sparse(delay=10, codec=tw.codecs.Int8()),
    "5 %, delay 40, ema": sparse(delay=40),
    "5 %, delay 40, delta": sparse(delay=40, correction="delta"),
    "5 %, delay 40, overwrite": sparse(delay=40, correction="overwrite"),
    "5 %, delay 40, ema to 0.01": sparse(delay=40, ema=(0.5, 0.01)),
}
QUICK = ["ddp (every step)", "5 %, delay 0", "5 %, delay 10, ema", "5 %, delay 10, overwrite"]
CHECKS = {  # name: (method, over method), both of them means of the seeds
    "delay 10 ema / delay 0 (<= 1.015)": ("5 %, delay 10, ema", "5 %, delay 0"),
    "delay 10 overwrite / ema (clearly > 1)": ("5 %, delay 10, overwrite", "5 %, delay 10, ema"),
    "delay 40 ema / delta (< 1)": ("5 %, delay 40, ema", "5 %, delay 40, delta"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=METHODS, help="these methods")
    parser.add_argument("--results", type=Path, help="a file of JSON lines")
    given = parser.parse_args()
    torch.set_num_threads(1)
    steps, seeds = (60, 1) if given.quick else (480, given.seeds)
    kept = given.results.read_text() if given.results and given.results.exists() else ""
    results = [json.loads(line) for line in kept.splitlines()]
    done = {(r["method"], r["seed"], r["steps"]) for r in results}
    corpus = load_corpus(DataConfig())
    for seed in range(seeds):
        for name in QUICK if given.quick else given.only or METHODS:
            if (name, seed, steps) in done:
                continue
            loss, apart = train(METHODS[name], corpus, steps, seed)
            record = {"method": name, "seed": seed, "steps": steps, "loss": loss, "apart": apart}
            results.append(record)
            print(json.dumps(record), file=sys.stderr, flush=True)
            if given.results:
                with given.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    report([r for r in results if r["steps"] == steps and r["method"] in METHODS], given.quick)


def train(make: Make, corpus: Corpus, steps: int, seed: int) -> tuple[float, float]:
    """Validation loss of the mean model, and how far apart the replicas were before it."""
    world = VirtualWorld(REPLICAS)

    def replica(rank: int) -> tuple[float, float]:
        settings = OptimizerConfig(lr=LR)
        with world.lock:  # one random number generator for all threads
            model = build_model(ModelConfig(), corpus.vocab, CONTEXT, seed)
        inner = build_optimizer(settings, model)
        optimizer = world.build(lambda: make(inner, steps))
        batches = Batches(corpus.train, CONTEXT, BATCH, rank, REPLICAS, seed)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step, steps)
            model(*batches.next()).backward()
            if isinstance(optimizer, tw.GradientAverage):
                optimizer.average()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
        own = weights_of(model)
        optimizer.finish()
        mean = weights_of(model)
        apart = float((own - mean).norm() / mean.norm())
        return validate(model, corpus, rank, optimizer.wire), apart

    answers = world.run(replica)
    return answers[0][0], statistics.mean(apart for _, apart in answers)


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@torch.no_grad()
def validate(model: torch.nn.Module, corpus: Corpus, rank: int, wire: Any) -> float:
    windows = validation_batches(corpus.validation, CONTEXT, 16, rank, REPLICAS, VALIDATION_WINDOWS)
    losses = [(float(model(x, y)) * y.numel(), y.numel()) for x, y in windows]
    total, count = wire.agree([sum(a for a, _ in losses), sum(b for _, b in losses)], "sum")
    return float(total / count)


def report(results: list[dict[str, Any]], quick: bool) -> None:
    table: dict[str, dict[str, Any]] = {}
    for name in METHODS:
        runs = [r for r in results if r["method"] == name]
        if not runs:
            continue
        losses = [round(r["loss"], 4) for r in runs]
        table[name] = {
            "mean": round(statistics.mean(losses), 4),
            "spread": round(max(losses) - min(losses), 4),
            "seeds": losses,
            "apart": round(statistics.mean(r["apart"] for r in runs), 4),
        }
    print(f"{'method':32}{'loss':>9}{'':9}{'apart':>8}")
    for name, cell in table.items():
        print(f"{name:32}{cell['mean']:9.3f} ±{cell['spread'] / 2:.3f}  {cell['apart']:8.4f}")
    checks = {
        label: round(table[a]["mean"] / table[b]["mean"], 4)
        for label, (a, b) in CHECKS.items()
        if a in table and b in table
    }
    print(json.dumps({"loss": table, "checks": checks, "quick": quick}))


if __name__ == "__main__":
    main()
