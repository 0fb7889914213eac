"""What the local-update methods cost in quality: validation loss at equal tokens.

    python -m benchmarks.quality.local_updates            4 replicas, 480 steps, 3 seeds, rounds of
                                                          16 (and 40)
    python -m benchmarks.quality.local_updates --quick    60 steps, 1 seed, rounds of 10
    python -m benchmarks.quality.local_updates --only sparseloco    methods with that in their name
    python -m benchmarks.quality.local_updates --results FILE       keep each run, skip those kept

Four real workers on loopback, a byte-level GPT of 0.3M parameters on the Python standard library,
AdamW inside, the mean of the replicas evaluated at the end (`finish()`), the same data, weights and
learning rate for every method. Nothing here is timed. Prints a table and, as its last line, one
JSON object: {"loss": {method: {every: {"mean", "spread", "seeds"}}}, "checks": {...}}.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.learning import joined, train, validate
from benchmarks.harness.results import Job, Record, Results, over_seeds, run_on_hosts
from benchmarks.harness.telling import tell
from thinwire.train.data.corpus import Corpus, load_corpus
from thinwire.train.data.tokens import Batches, DataConfig
from thinwire.train.loop.optimizers import OptimizerConfig, build_optimizer
from thinwire.train.tasks.models import ModelConfig, build_model

LR = 2e-3

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
        own_weight=1.0,
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


QUICK = ["ddp (every step)", "slowmo 1/.5", "overlapped 1/.5", "co2 1/.2, gap"]
PAIRS = {
    "overlapped / slowmo": ("overlapped 1/.5", "slowmo 1/.5"),
    "co2 gap / no penalty": ("co2 1/.2, gap", "co2 1/.2, no penalty"),
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="", help="methods with this in their name")
    arguments.add_argument("--results", type=Path, help="a file of JSON lines")
    given = arguments.parse_args()
    jobs = planned(given.size, given.only)
    hosts = given.size.of(full=4, quick=4, tiny=2)
    records = run_on_hosts(jobs, Results(given.results), worker, given.size, hosts=hosts)
    report(records, given.size)


def planned(size: Size, only: str) -> list[Job]:
    steps, seeds, rounds = size.of(full=(480, 3, [16, 40]), quick=(60, 1, [10]), tiny=(4, 1, [2]))
    names = size.of(full=list(METHODS), quick=QUICK, tiny=QUICK[1:])
    return [
        {"method": name, "every": every, "seed": seed, "steps": steps}
        for seed in range(seeds)
        for name in names
        if only in name
        for every in (rounds if name in LONG_ROUNDS else rounds[:1])
    ]


def worker(jobs: list[Job], size: Size) -> None:
    """Every run in turn, on all replicas; the first replica tells each loss."""
    with joined() as world:
        corpus = load_corpus(DataConfig())
        for job in jobs:
            loss = loss_of(job, corpus, Size(size))
            if world.rank == 0:
                tell(job | {"loss": loss})


def loss_of(job: Job, corpus: Corpus, size: Size) -> float:
    batch, context, windows = size.of(full=(4, 64, 400), quick=(4, 64, 400), tiny=(1, 16, 4))
    settings = OptimizerConfig(lr=LR)
    model = build_model(ModelConfig(), corpus.vocab, context, job["seed"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these settings are unstable on purpose
        optimizer = METHODS[job["method"]](build_optimizer(settings, model), job["every"])
    wire = optimizer.wire
    batches = Batches(corpus.train, context, batch, wire.rank, wire.size, job["seed"])
    train(model, optimizer, batches, settings, job["steps"])
    optimizer.finish()
    loss = validate(model, corpus, wire, context=context, windows=windows)
    wire.close()
    return loss


def report(records: list[Record], size: Size) -> None:
    rounds = sorted({r["every"] for r in records})
    losses: dict[str, dict[str, list[float]]] = {}
    for record in records:
        cells = losses.setdefault(record["method"], {})
        cells.setdefault(str(record["every"]), []).append(record["loss"])
    found = {
        name: {every: over_seeds(each) for every, each in cells.items()}
        for name, cells in losses.items()
    }
    columns = [f"every={every}" for every in rounds]
    table = Table("method (outer lr / momentum)", *columns, "", width=16)
    for name, row in found.items():
        shown = (row.get(str(every)) for every in rounds)
        text = [f"{c['mean']:.3f} ±{c['spread'] / 2:.3f}" if c else "" for c in shown]
        table.row(name, *text, "waits" if name in BLOCKING else "never waits")
    end({"loss": found, "checks": checks(found)}, size)


def checks(found: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Overlapped over SlowMo (target <= 1.015), CO2 with the gap over without (target < 1)."""
    return {
        label: {
            every: round(found[a][every]["mean"] / found[b][every]["mean"], 4)
            for every in found[a].keys() & found[b].keys()
        }
        for label, (a, b) in PAIRS.items()
        if a in found and b in found
    }


if __name__ == "__main__":
    main()
