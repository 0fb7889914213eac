"""What one bit a value costs in quality: validation loss after as many steps as the dense method.

    python benchmarks/one_bit_learning.py                       4 replicas, 600 steps, 3 seeds
    python benchmarks/one_bit_learning.py --tune                the dense methods at several lr
    python benchmarks/one_bit_learning.py --quick               60 steps, 1 seed: under a minute
    python benchmarks/one_bit_learning.py --results FILE        keep each run, skip those kept
    python benchmarks/one_bit_learning.py --runs one-bit-lamb:freeze_at=24 one-bit-adam:whiten=no

Four real workers on loopback train a byte-level model of 0.3M parameters on the Python standard
library: masked objective, micro-batches of 8 windows of 64 tokens, two to a step and replica, so
64 windows or 4096 tokens a step. A one-bit method gets the learning rate of its dense one, with the
same weights, data, clipping and schedule: find that of the dense ones with --tune, give it by --lr.
The freeze is automatic. Nothing here is timed. `less` is the traffic of data parallelism in 16 bits
over the method's, both over the whole run. Prints a table and, as its last line, one JSON object:
{"loss": {run: {"mean", "spread", "seeds", "frozen_at", "less"}}, "over_dense": {run: ...}}.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from thinwire.train.corpus import Corpus, load_corpus
from thinwire.train.data import IGNORED, Batches, DataConfig, validation_batches
from thinwire.train.methods import find_method
from thinwire.train.models import GPT, ModelConfig, build_model
from thinwire.train.optimizers import OptimizerConfig, build_optimizer, learning_rate
from thinwire.train.replica import Replica
from thinwire.wire.wire import Wire
from thinwire.wire.world import current

REPLICAS, MICRO, ACCUMULATE, CONTEXT = 4, 8, 2, 64
STEPS, EVAL_EVERY, EVAL_WINDOWS = 600, 25, 512
DENSE = {"one-bit-adam": "average", "zero-one-adam": "average", "one-bit-lamb": "lamb"}
LR = {"average": 1e-3, "lamb": 1e-2}  # the best of those tuned over, with 600 steps
TUNED = {"average": (5e-4, 1e-3, 2e-3), "lamb": (5e-3, 1e-2, 2e-2)}
RUNS = ["average", "lamb", *DENSE]
Run = dict[str, Any]


def main() -> None:
    given = arguments()
    jobs = planned(given)
    results = kept(given.results)
    done = {key(run) for run in results}
    results += compute([job for job in jobs if key(job) not in done], given.results)
    wanted = {key(job) for job in jobs}
    report([run for run in results if key(run) in wanted])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--lr", nargs="*", default=[], help="DENSE-METHOD=RATE, over the tuned one")
    parser.add_argument("--runs", nargs="*", default=RUNS, help="METHOD or METHOD:NAME=VALUE,...")
    return parser.parse_args()


def planned(given: argparse.Namespace) -> list[Run]:
    if given.tune:
        return [
            {"run": name, "lr": lr, "seed": 0, "steps": STEPS}
            for name, rates in TUNED.items()
            for lr in rates
        ]
    steps, seeds = (60, 1) if given.quick else (STEPS, given.seeds)
    runs = ["lamb", "one-bit-lamb:freeze_at=20"] if given.quick else given.runs
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


def key(run: Run) -> tuple[Any, ...]:
    return run["run"], run["lr"], run["seed"], run["steps"]


def kept(results: Path | None) -> list[Run]:
    if results is None or not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def compute(jobs: list[Run], results: Path | None) -> list[Run]:
    """All replicas are children of this process and in its process group, so that a signal which
    stops and continues them reaches them all."""
    if not jobs:
        return []
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    pipe, theirs = fork.Pipe(duplex=False)
    workers = [
        fork.Process(target=worker, args=(r, port, jobs, theirs), daemon=True)
        for r in range(REPLICAS)
    ]
    for process in workers:
        process.start()
    theirs.close()
    found = []
    try:
        for _ in jobs:
            found.append(pipe.recv())
            show(found[-1])
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps(found[-1]) + "\n")
    finally:
        for process in workers:
            process.join() if len(found) == len(jobs) else process.terminate()
    return found


def worker(rank: int, port: int, jobs: list[Run], pipe: Any) -> None:
    """Every run in turn, on all replicas; the first replica sends what came of it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(REPLICAS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    tw.init(timeout=1e6)  # a long computation may be stopped for a while and continued
    control = Wire(name="control")
    corpus = load_corpus(DataConfig(context=CONTEXT))
    for job in jobs:
        result = train(job, corpus, control)
        if rank == 0:
            pipe.send(job | result)
    control.barrier()
    tw.shutdown()


def train(job: Run, corpus: Corpus, control: Wire) -> Run:
    shape = ModelConfig(model="gpt-0.3m", objective="masked")
    model = build_model(shape, corpus.vocab, CONTEXT, job["seed"])
    settings = OptimizerConfig(lr=job["lr"])
    replica = build(job["run"], model, settings)
    world = current()
    batches = Batches(
        corpus.train,
        CONTEXT,
        MICRO,
        world.rank,
        world.size,
        job["seed"],
        mask_vocab=corpus.vocab,
    )
    curve, norms = [], []
    for step in range(job["steps"]):
        for group in replica.optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, job["steps"])
        norms.append(float(f"{train_step(replica, batches, settings.clip):.4g}"))
        if (step + 1) % EVAL_EVERY == 0 and step + 1 < job["steps"]:
            curve.append((step + 1, evaluate(replica, corpus, control)))
    replica.finish()
    curve.append((job["steps"], evaluate(replica, corpus, control)))
    parameters = sum(p.numel() for p in model.parameters())
    sixteen_bits = job["steps"] * 2 * (REPLICAS - 1) / REPLICAS * 2 * parameters
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


def train_step(replica: Replica, batches: Batches, clip: float) -> float:
    for micro in range(ACCUMULATE):
        with replica.accumulating(last=micro == ACCUMULATE - 1):
            (replica.module(*batches.next()) / ACCUMULATE).backward()
    norm = replica.step(clip)
    replica.optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def evaluate(replica: Replica, corpus: Corpus, control: Wire) -> float:
    total = count = 0.0
    with replica.consensus():
        for x, y in validation_batches(
            corpus.validation,
            CONTEXT,
            64,
            control.rank,
            control.size,
            EVAL_WINDOWS,
            mask_vocab=corpus.vocab,
        ):
            targets = float((y != IGNORED).sum())
            total, count = total + float(replica.model(x, y)) * targets, count + targets
    total, count = control.agree([total, count], "sum")
    return round(total / count, 5)


def show(run: Run) -> None:
    """One line for each run as it ends, for somebody who waits."""
    frozen = f", frozen after {run['frozen_at']}" if run["frozen_at"] else ""
    print(
        f"  {run['run']:34} lr {run['lr']:g}  seed {run['seed']}  loss {run['loss']:.4f}"
        f"  {run['less']:.2f}x less{frozen}",
        flush=True,
    )


def report(results: list[Run]) -> None:
    table: dict[str, dict[str, Any]] = {}
    rates = {run["run"]: {r["lr"] for r in results if r["run"] == run["run"]} for run in results}
    for run in results:
        name = run["run"] if len(rates[run["run"]]) == 1 else f"{run['run']} lr {run['lr']:g}"
        cell = table.setdefault(name, {"seeds": [], "frozen_at": [], "all_less": []})
        cell["seeds"].append(round(run["loss"], 4))
        cell["frozen_at"].append(run["frozen_at"])
        cell["all_less"].append(run["less"])
    for cell in table.values():
        cell["mean"] = round(statistics.mean(cell["seeds"]), 4)
        cell["spread"] = round(max(cell["seeds"]) - min(cell["seeds"]), 4)
        cell["less"] = round(statistics.mean(cell.pop("all_less")), 2)
    ratio = {
        name: round(cell["mean"] / table[dense_of(name)]["mean"], 4)
        for name, cell in table.items()
        if dense_of(name) in table and dense_of(name) != name
    }
    print(f"{'run':36}{'loss':>8}{'spread':>8}{'over dense':>12}{'frozen after':>16}{'less':>8}")
    for name, cell in table.items():
        over = f"{100 * (ratio[name] - 1):+.2f} %" if name in ratio else ""
        frozen = "/".join(str(at) for at in cell["frozen_at"] if at)
        print(
            f"{name:36}{cell['mean']:8.4f}{cell['spread']:8.4f}{over:>12}{frozen:>16}"
            f"{cell['less']:7.2f}x"
        )
    print(json.dumps({"loss": table, "over_dense": ratio}))


if __name__ == "__main__":
    main()
