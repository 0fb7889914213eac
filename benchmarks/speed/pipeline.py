"""How much of the compute's speed a pipeline keeps on a slow link.

    python benchmarks/pipeline_speed.py             2 stages, 3.2M parameters, 100 Mbit/s and 10 ms
    python benchmarks/pipeline_speed.py --replicas 2    2 x 2: replicas average, too
    python benchmarks/pipeline_speed.py --quick     1 repetition, fewer contenders, under a minute

Emulated hosts in the lab, one stage each, real sockets. With two replicas those of torch average
every gradient and those of thinwire 5 % of their weights (SparseAverage). Every rank holds all
contenders at once and they take turns, several times over; a turn's first updates (the warm-up) and
its last ones (the drain) are not timed. The figure is the median time of 4 micro-batches in a row,
over all turns, of the slower rank: neighbours on the machine slow single ones at random.

`compute` is the yardstick: both stages at once, each on values of its own, forward, backward and
step for every micro-batch, nothing sent. torch's schedules send float32 and flush before every
update of 4 micro-batches. Prints a table and, as its last line, one JSON object:
{"figures": {contender: {"ms_per_micro_batch", "tokens_per_s", ...}}, "checks": {...}}.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import thinwire as tw
from thinwire.lab import Lab, Link
from thinwire.pipeline import AsyncPipeline, Record, TorchPipeline, split
from thinwire.pipeline.stage import ClippedStep
from thinwire.train.corpus import Corpus, load_corpus
from thinwire.train.data import Batches, DataConfig
from thinwire.train.models import ModelConfig, build_model, token_loss
from thinwire.train.pipelining import make_mesh
from thinwire.wire.account import Account
from thinwire.wire.codecs import Dense, Int8
from thinwire.wire.wire import Wire

MODEL, BATCH, CONTEXT, WIDTH, STAGES, CUTS, PER_UPDATE = "gpt-3m", 8, 128, 256, 2, [3], 4
BF16 = Dense(torch.bfloat16)

Make = Callable[[nn.Module, torch.optim.Optimizer, DeviceMesh], Any]


class Compute:
    """A stage on its own: what the pipeline could do at best."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, stage: int) -> None:
        self.module, self.optimizer, self.stage = module, optimizer, stage
        self.account = Account()
        self._step = ClippedStep(module, optimizer, 1.0, self.account)
        self._values = torch.randn(BATCH, CONTEXT, WIDTH)

    def train(self, batches: Iterator[tuple[Tensor, Tensor]], updates: int) -> Iterator[Record]:
        for update in range(updates):
            x, y = next(batches)
            if self.stage == 0:
                self.module(x).backward(self._values)
            else:
                token_loss(self.module(self._values.clone().requires_grad_()), y).backward()
            norm = self._step()
            self.optimizer.zero_grad(set_to_none=True)
            yield Record(update, None, norm)


@dataclass
class Contender:
    make: Make
    updates: int
    skip: int
    """Updates at either end of a turn that are not timed."""
    micro_batches: int = 1
    """Per update."""
    turns: list[list[float]] = field(default_factory=list)
    """Seconds per micro-batch over every 4 of them in a row, a list for each turn."""
    exposed: list[float] = field(default_factory=list)
    """Seconds waited per micro-batch, for each turn."""

    def prepare(self, corpus: Corpus, mesh: DeviceMesh) -> None:
        model = build_model(ModelConfig(model=MODEL, tied="no"), corpus.vocab, CONTEXT, seed=0)
        module = split(model, STAGES, at=CUTS)[mesh["stage"].get_local_rank()]
        self.pipe = self.make(module, torch.optim.AdamW(module.parameters(), lr=1e-3), mesh)
        replicas = mesh["replica"]
        reader = replicas.get_local_rank(), replicas.size()
        source = Batches(corpus.train, CONTEXT, BATCH, *reader, seed=0)
        self._batches = iter(source.next, None)

    def turn(self, control: Wire) -> None:
        control.barrier()
        clock, before = [], self.pipe.account.exposed
        for _ in self.pipe.train(self._batches, self.updates):
            clock.append(time.perf_counter())
        timed = clock[self.skip : len(clock) - self.skip]
        width = PER_UPDATE // self.micro_batches
        self.turns.append(
            [(b - a) / PER_UPDATE for a, b in zip(timed, timed[width:], strict=False)]
        )
        waited = self.pipe.account.exposed - before
        self.exposed.append(waited / self.updates / self.micro_batches)
        control.barrier()

    @property
    def seconds(self) -> float:
        return statistics.median(value for turn in self.turns for value in turn)


def asynchronous(updates: int, **settings: Any) -> Contender:
    def make(module: nn.Module, inner: torch.optim.Optimizer, mesh: DeviceMesh) -> AsyncPipeline:
        several = mesh["replica"].size() > 1
        optimizer = tw.SparseAverage(inner, group=mesh["replica"]) if several else inner
        return AsyncPipeline(module, optimizer, group=mesh["stage"], loss=token_loss, **settings)

    return Contender(make, updates, skip=4 + settings.get("lead", 0))


def synchronous(schedule: Literal["gpipe", "1f1b"], updates: int) -> Contender:
    def make(module: nn.Module, inner: torch.optim.Optimizer, mesh: DeviceMesh) -> TorchPipeline:
        several = mesh["replica"].size() > 1
        optimizer = tw.GradientAverage(inner, group=mesh["replica"]) if several else inner
        return TorchPipeline(
            module,
            optimizer,
            group=mesh["stage"],
            loss=token_loss,
            schedule=schedule,
            accumulate=PER_UPDATE,
        )

    return Contender(make, updates, skip=1, micro_batches=PER_UPDATE)


def alone(module: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> Compute:
    return Compute(module, optimizer, mesh["stage"].get_local_rank())


def contenders(quick: bool) -> dict[str, Contender]:
    few, many = (4, 20) if quick else (6, 30)
    compute = Contender(alone, many, skip=1)
    both = {"codec": BF16, "gradient_codec": BF16}
    found = {
        "compute": compute,
        "torch 1f1b": synchronous("1f1b", few),
        "torch gpipe": synchronous("gpipe", few),
        "async, fp32": asynchronous(many),
        "async, fp32, lead 2": asynchronous(many, lead=2),
        "async, bf16": asynchronous(many, **both),
        "async, bf16, lead 1": asynchronous(many, lead=1, **both),
        "async, bf16, lead 2": asynchronous(many, lead=2, **both),
        "async, int8, lead 1": asynchronous(many, lead=1, codec=Int8(), gradient_codec=Int8()),
    }
    kept = ("compute", "torch 1f1b", "async, fp32", "async, bf16, lead 1")
    return {name: found[name] for name in kept} if quick else found


def worker(quick: bool) -> None:
    world = tw.init(timeout=120)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    corpus = load_corpus(DataConfig())
    control = Wire(name="race")
    mesh = make_mesh(world, STAGES)
    racing = contenders(quick)
    for contender in racing.values():
        contender.prepare(corpus, mesh)
    for _ in range(1 if quick else 5):
        for contender in racing.values():
            contender.turn(control)
    figures = {}
    for name, contender in racing.items():
        exposed = statistics.median(contender.exposed)
        slowest, exposed = control.agree([contender.seconds, exposed])
        figures[name] = {
            "ms_per_micro_batch": round(1000 * slowest, 1),
            "tokens_per_s": round(mesh["replica"].size() * BATCH * CONTEXT / slowest),
            "exposed_ms": round(1000 * exposed, 1),
            "turns_ms": [round(1000 * statistics.median(turn), 1) for turn in contender.turns],
        }
    if world.rank == 0:
        print(json.dumps(figures), flush=True)
    tw.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--delay", default="10ms")
    given = parser.parse_args()
    lines: list[str] = []
    with Lab(STAGES * given.replicas, Link.of(given.rate, delay=given.delay)) as lab:
        lab.check()
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
        outcome = lab.start(command, sink=lambda line: lines.append(line.text)).wait()
    if outcome.code:
        sys.exit("\n".join([*lines, str(outcome)]))
    figures = json.loads(next(line for line in lines if line.startswith("{")))
    report(figures, f"{given.replicas} replicas, {given.rate}, {given.delay}", given.quick)


def report(figures: dict[str, dict[str, Any]], link: str, quick: bool) -> None:
    print(f"{STAGES} stages, {MODEL}, micro-batches of {BATCH} x {CONTEXT}, {link}")
    print(f"{'':24}{'ms/micro-batch':>16}{'tokens/s':>10}{'of compute':>12}{'of torch 1f1b':>15}")
    for name, f in figures.items():
        of_compute = f["tokens_per_s"] / figures["compute"]["tokens_per_s"]
        of_torch = f["tokens_per_s"] / figures["torch 1f1b"]["tokens_per_s"]
        print(
            f"{name:24}{f['ms_per_micro_batch']:16.1f}{f['tokens_per_s']:10d}"
            f"{of_compute:12.3f}{of_torch:15.2f}"
        )
    print(json.dumps({"figures": figures, "checks": checks(figures), "quick": quick}))


def checks(figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Targets: at least 1.3 of torch's 1F1B, and at least 0.9 of the compute."""
    return {
        name: {
            "of torch 1f1b": round(f["tokens_per_s"] / figures["torch 1f1b"]["tokens_per_s"], 3),
            "of compute": round(f["tokens_per_s"] / figures["compute"]["tokens_per_s"], 3),
        }
        for name, f in figures.items()
        if name.startswith("async")
    }


if __name__ == "__main__":
    worker("--quick" in sys.argv) if "RANK" in os.environ else main()
