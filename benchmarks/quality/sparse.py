"""What sparse averaging costs in quality: validation loss at equal tokens, by delay and correction.

    python -m benchmarks.quality.sparse             4 replicas, 480 steps, 3 seeds (an hour)
    python -m benchmarks.quality.sparse --quick     60 steps, 1 seed, 4 methods
    python -m benchmarks.quality.sparse --only "5 %, delay 0" "5 %, delay 10, ema"
    python -m benchmarks.quality.sparse --results FILE    keeps finished runs there, and skips them

Four virtual replicas in one process (harness/virtual.py; the optimizers are the real ones), a byte
GPT of 0.3M parameters on the Python standard library, AdamW inside, the mean of the replicas
evaluated at the end (`finish()`), the same data, weights and learning rate for every method: those
of quality/local_updates.py. Prints a table and, as its last line, one JSON object: {"loss":
{method: {"mean", "spread", "seeds", "apart"}}, "checks": {...}}. `apart` is how far the replicas
are from their mean in the end, relative to its norm.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.results import Job, Record, Results, over_seeds, run_here
from benchmarks.harness.virtual import train_virtual
from thinwire.train.data.corpus import load_corpus
from thinwire.train.data.tokens import DataConfig
from thinwire.train.loop.optimizers import OptimizerConfig, build_optimizer

LR = 2e-3

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
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--only", nargs="+", choices=METHODS, help="these methods")
    arguments.add_argument("--results", type=Path, help="a file of JSON lines")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    steps, seeds = given.size.of(full=(480, given.seeds), quick=(60, 1), tiny=(12, 1))
    sizes = given.size.of(full=(4, 64, 400), quick=(4, 64, 400), tiny=(1, 16, 4))
    names = given.only or given.size.of(full=list(METHODS), quick=QUICK, tiny=QUICK)
    jobs: list[Job] = [
        {"method": name, "seed": seed, "steps": steps} for seed in range(seeds) for name in names
    ]
    corpus, results = load_corpus(DataConfig()), Results(given.results)

    def train(job: Job) -> Record:
        settings = OptimizerConfig(lr=LR)
        batch, context, windows = sizes
        found = train_virtual(
            lambda model: METHODS[job["method"]](build_optimizer(settings, model), steps),
            corpus,
            replicas=given.size.of(full=4, quick=4, tiny=2),
            steps=steps,
            seed=job["seed"],
            settings=settings,
            batch=batch,
            context=context,
            windows=windows,
        )
        return {"loss": found["loss"], "apart": found["apart"]}

    run_here(jobs, results, train)
    report([r for r in results.records if r["steps"] == steps], given.size)


def report(records: list[Record], size: Size) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name in METHODS:
        if runs := [r for r in records if r["method"] == name]:
            apart = round(statistics.mean(r["apart"] for r in runs), 4)
            found[name] = over_seeds([r["loss"] for r in runs]) | {"apart": apart}
    table = Table("method", "loss", "", "apart")
    for name, cell in found.items():
        spread = f"±{cell['spread'] / 2:.3f}"
        table.row(name, f"{cell['mean']:.3f}", spread, f"{cell['apart']:.4f}")
    checks = {
        label: round(found[a]["mean"] / found[b]["mean"], 4)
        for label, (a, b) in CHECKS.items()
        if a in found and b in found
    }
    end({"loss": found, "checks": checks}, size)


if __name__ == "__main__":
    main()
