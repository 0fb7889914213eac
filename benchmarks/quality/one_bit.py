"""What one bit a value costs in quality: validation loss after as many steps as the dense method.

    python -m benchmarks.quality.one_bit                    4 replicas, 600 steps, 3 seeds
    python -m benchmarks.quality.one_bit --tune             the dense methods at several lr
    python -m benchmarks.quality.one_bit --quick            60 steps, 1 seed
    python -m benchmarks.quality.one_bit --results FILE     keep each run, skip those kept
    python -m benchmarks.quality.one_bit --runs one-bit-lamb:freeze_at=24 one-bit-adam:whiten=no

Four real workers on loopback train a byte-level model of 0.3M parameters on the Python standard
library: masked objective, micro-batches of 8 windows of 64 tokens, two to a step and replica, so
64 windows or 4096 tokens a step. A one-bit method gets the learning rate of its dense one, with the
same weights, data, clipping and schedule: find that of the dense ones with --tune, give it by --lr.
The freeze is automatic. Nothing here is timed. `less` is the traffic of data parallelism in 16 bits
over the method's, both over the whole run. Prints a table and, as its last line, one JSON object:
{"loss": {run: {"mean", "spread", "seeds", "frozen_at", "less"}}, "over_dense": {run: ...}}.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.learning import joined, set_learning_rate, take_step, validate
from benchmarks.harness.results import Job, Record, Results, over_seeds, run_on_hosts
from benchmarks.harness.telling import tell
from thinwire.train.data.corpus import Corpus, load_corpus
from thinwire.train.data.tokens import Batches, DataConfig
from thinwire.train.loop.optimizers import OptimizerConfig, build_optimizer
from thinwire.train.methods.registry import find_method
from thinwire.train.methods.replica import Replica
from thinwire.train.tasks.models import GPT, ModelConfig, build_model
from thinwire.wire.wire import Wire

REPLICAS, MICRO, ACCUMULATE, CONTEXT = 4, 8, 2, 64
STEPS, EVAL_EVERY = 600, 25
DENSE = {"one-bit-adam": "average", "zero-one-adam": "average", "one-bit-lamb": "lamb"}
LR = {"average": 1e-3, "lamb": 1e-2}  # the best of those tuned over, with 600 steps
TUNED = {"average": (5e-4, 1e-3, 2e-3), "lamb": (5e-3, 1e-2, 2e-2)}
RUNS = ["average", "lamb", *DENSE]
QUICK = ["lamb", "one-bit-lamb:freeze_at=20"]
TINY = ["lamb", "one-bit-lamb:freeze_at=2"]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tune", action="store_true")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--results", type=Path, help="a file of JSON lines")
    arguments.add_argument(
        "--lr", nargs="*", default=[], help="DENSE-METHOD=RATE, over the tuned one"
    )
    arguments.add_argument(
        "--runs", nargs="*", default=RUNS, help="METHOD or METHOD:NAME=VALUE,..."
    )
    given = arguments.parse_args()
    hosts = given.size.of(full=REPLICAS, quick=REPLICAS, tiny=2)
    results = Results(given.results)
    report(run_on_hosts(planned(given), results, worker, given.size, hosts=hosts), given.size)


def planned(given: argparse.Namespace) -> list[Job]:
    if given.tune:
        return [
            {"run": name, "lr": lr, "seed": 0, "steps": STEPS}
            for name, rates in TUNED.items()
            for lr in rates
        ]
    steps, seeds = given.size.of(full=(STEPS, given.seeds), quick=(60, 1), tiny=(4, 1))
    runs = given.size.of(full=given.runs, quick=QUICK, tiny=TINY)
    rates = LR | {name: float(rate) for name, rate in (word.split("=") for word in given.lr)}
    return [
        {"run": run, "lr": rates[dense_of(run)], "seed": seed, "steps": steps}
        for seed in range(seeds)
        for run in runs
    ]


def method_of(run: str) -> str:
    return run.partition(":")[0]


def dense_of(run: str) -> str:
    return DENSE.get(method_of(run), method_of(run))


def worker(jobs: list[Job], size: Size) -> None:
    """Every run in turn, on all replicas; the first replica tells what came of it."""
    with joined(timeout=1e6) as world:  # a long computation may be stopped for a while
        control = Wire(name="control")
        corpus = load_corpus(DataConfig(context=CONTEXT))
        for job in jobs:
            record = job | train(job, corpus, control, Size(size))
            if world.rank == 0:
                tell(record)
        control.barrier()


def train(job: Job, corpus: Corpus, control: Wire, size: Size) -> Record:
    shape = ModelConfig(model="gpt-0.3m", objective="masked")
    model = build_model(shape, corpus.vocab, CONTEXT, job["seed"])
    settings = OptimizerConfig(lr=job["lr"])
    replica = build(job["run"], model, settings)
    share = control.rank, control.size, job["seed"]
    batches = Batches(corpus.train, CONTEXT, MICRO, *share, mask_vocab=corpus.vocab)
    windows = size.of(full=512, quick=512, tiny=8)
    curve, norms = [], []
    for step in range(job["steps"]):
        set_learning_rate(replica.optimizer, settings, step, job["steps"])
        norms.append(float(f"{take_step(replica, batches, settings.clip, ACCUMULATE):.4g}"))
        if (step + 1) % EVAL_EVERY == 0 and step + 1 < job["steps"]:
            curve.append((step + 1, evaluate(replica, corpus, control, windows)))
    replica.finish()
    curve.append((job["steps"], evaluate(replica, corpus, control, windows)))
    parameters = sum(p.numel() for p in model.parameters())
    sixteen_bits = job["steps"] * 2 * (control.size - 1) / control.size * 2 * parameters
    return {
        "loss": curve[-1][1],
        "frozen_at": getattr(replica.optimizer, "frozen_at", None),
        "bytes": replica.account.bytes,
        "less": sixteen_bits / replica.account.bytes,
        "skipped": replica.account.skipped,
        "curve": curve,
        "norms": norms,
    }


def build(run: str, model: GPT, settings: OptimizerConfig) -> Replica:
    """The trainer's own replica of the method, with the flags named in the run."""
    name, _, flags = run.partition(":")
    method = find_method(name)
    options = method.settings()
    for flag in flags.split(",") if flags else []:
        field, _, value = flag.partition("=")
        kind = type(getattr(options, field))
        setattr(options, field, {"yes": True, "no": False}[value] if kind is bool else kind(value))
    method.check(options)
    return method.build(model, build_optimizer(settings, model), options, None)


def evaluate(replica: Replica, corpus: Corpus, control: Wire, windows: int) -> float:
    sizes = {"context": CONTEXT, "windows": windows, "batch": 64}
    with replica.consensus():
        loss = validate(replica.model, corpus, control, **sizes, mask_vocab=corpus.vocab)
    return round(loss, 5)


def report(records: list[Record], size: Size) -> None:
    rates = {run["run"]: {r["lr"] for r in records if r["run"] == run["run"]} for run in records}
    named: dict[str, list[Record]] = {}
    for run in records:
        name = run["run"] if len(rates[run["run"]]) == 1 else f"{run['run']} lr {run['lr']:g}"
        named.setdefault(name, []).append(run)
    found = {name: summed_up(runs) for name, runs in named.items()}
    ratio = {
        name: round(cell["mean"] / found[dense_of(name)]["mean"], 4)
        for name, cell in found.items()
        if dense_of(name) in found and dense_of(name) != name
    }
    table = Table("run", "loss", "spread", "over dense", "frozen after", "less", first=36)
    for name, cell in found.items():
        over = f"{100 * (ratio[name] - 1):+.2f} %" if name in ratio else ""
        frozen = "/".join(str(at) for at in cell["frozen_at"] if at)
        losses = f"{cell['mean']:.4f}", f"{cell['spread']:.4f}"
        table.row(name, *losses, over, frozen, f"{cell['less']:.2f}x")
    end({"loss": found, "over_dense": ratio}, size)


def summed_up(runs: list[Record]) -> dict[str, Any]:
    return over_seeds([run["loss"] for run in runs]) | {
        "frozen_at": [run["frozen_at"] for run in runs],
        "less": round(statistics.mean(run["less"] for run in runs), 2),
    }


if __name__ == "__main__":
    main()
