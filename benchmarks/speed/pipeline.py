"""How much of the compute's speed a pipeline keeps on a slow link.

    python -m benchmarks.speed.pipeline                2 stages, 3.2M parameters, 100 Mbit/s, 10 ms
    python -m benchmarks.speed.pipeline --replicas 2   2 x 2: replicas average, too
    python -m benchmarks.speed.pipeline --quick        one turn each, fewer pipelines

Emulated hosts in the lab, one stage each, real sockets. With two replicas those of torch average
every gradient and those of thinwire 5 % of their weights (SparseAverage). Every rank holds all
pipelines at once and they take turns, several times over; a turn's first updates (the warm-up) and
its last ones (the drain) are not timed. The figure is the median time of 4 micro-batches in a row,
over all turns, of the slower rank: neighbours on the machine slow single ones at random.

`compute` is the baseline: both stages at once, each on values of its own, forward, backward and
step for every micro-batch, nothing sent. torch's schedules send float32 and flush before every
update of 4 micro-batches. Prints a table and, as its last line, one JSON object:
{"figures": {pipeline: {"ms_per_micro_batch", "tokens_per_s", ...}}, "checks": {...}}.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.hosts import on_hosts
from benchmarks.harness.interleaved import Shape, interleave
from benchmarks.harness.learning import joined
from thinwire.lab import Link
from thinwire.methods.dense.gradient_average import GradientAverage
from thinwire.methods.sparse.sparse_average import SparseAverage
from thinwire.pipeline import AsyncPipeline, Record, TorchPipeline, split
from thinwire.pipeline.stage import ClippedStep
from thinwire.train.data.corpus import Corpus, load_corpus
from thinwire.train.data.tokens import Batches, DataConfig
from thinwire.train.loop.pipelining import make_mesh
from thinwire.train.tasks.models import ModelConfig, build_model, token_loss
from thinwire.wire.account import Account
from thinwire.wire.codecs import Dense, Int8
from thinwire.wire.wire import Wire

STAGES, CUTS, PER_UPDATE = 2, [3], 4
SHAPES = {
    Size.FULL: Shape("gpt-3m", batch=8, context=128),
    Size.QUICK: Shape("gpt-3m", batch=8, context=128),
    Size.TINY: Shape("gpt-0.3m", batch=1, context=16),
}
BF16 = Dense(torch.bfloat16)
BOTH = {"codec": BF16, "gradient_codec": BF16}

Make = Callable[[nn.Module, torch.optim.Optimizer, DeviceMesh, Tensor], Any]
"""(module, optimizer, mesh, values of the shape that passes between stages) -> a pipeline."""


class Compute:
    """A stage on its own: what the pipeline could do at best."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, values: Tensor
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.stage = mesh["stage"].get_local_rank()
        self.account = Account()
        self._step = ClippedStep(module, optimizer, 1.0, self.account)
        self._values = values

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
class TimedPipeline:
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

    def prepare(self, shape: Shape, corpus: Corpus, mesh: DeviceMesh) -> None:
        config = ModelConfig(model=shape.model, tied="no")
        model = build_model(config, corpus.vocab, shape.context, seed=0)
        values = torch.randn(shape.batch, shape.context, model.config.width)
        module = split(model, STAGES, at=CUTS)[mesh["stage"].get_local_rank()]
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.pipe = self.make(module, optimizer, mesh, values)
        replicas = mesh["replica"]
        reader = replicas.get_local_rank(), replicas.size()
        source = Batches(corpus.train, shape.context, shape.batch, *reader, seed=0)
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


def asynchronous(updates: int, **settings: Any) -> TimedPipeline:
    def make(
        module: nn.Module, inner: torch.optim.Optimizer, mesh: DeviceMesh, values: Tensor
    ) -> AsyncPipeline:
        several = mesh["replica"].size() > 1
        optimizer = SparseAverage(inner, group=mesh["replica"]) if several else inner
        return AsyncPipeline(module, optimizer, group=mesh["stage"], loss=token_loss, **settings)

    return TimedPipeline(make, updates, skip=4 + settings.get("lead", 0))


def synchronous(schedule: Literal["gpipe", "1f1b"], updates: int) -> TimedPipeline:
    def make(
        module: nn.Module, inner: torch.optim.Optimizer, mesh: DeviceMesh, values: Tensor
    ) -> TorchPipeline:
        several = mesh["replica"].size() > 1
        optimizer = GradientAverage(inner, group=mesh["replica"]) if several else inner
        return TorchPipeline(
            module,
            optimizer,
            group=mesh["stage"],
            loss=token_loss,
            schedule=schedule,
            accumulate=PER_UPDATE,
        )

    return TimedPipeline(make, updates, skip=1, micro_batches=PER_UPDATE)


def pipelines(size: Size) -> dict[str, TimedPipeline]:
    few, many = size.of(full=(6, 30), quick=(4, 20), tiny=(4, 16))
    found = {
        "compute": TimedPipeline(Compute, many, skip=1),
        "torch 1f1b": synchronous("1f1b", few),
        "torch gpipe": synchronous("gpipe", few),
        "async, fp32": asynchronous(many),
        "async, fp32, lead 2": asynchronous(many, lead=2),
        "async, bf16": asynchronous(many, **BOTH),
        "async, bf16, lead 1": asynchronous(many, lead=1, **BOTH),
        "async, bf16, lead 2": asynchronous(many, lead=2, **BOTH),
        "async, int8, lead 1": asynchronous(many, lead=1, codec=Int8(), gradient_codec=Int8()),
    }
    kept = ("compute", "torch 1f1b", "async, fp32", "async, bf16, lead 1")
    return found if size is Size.FULL else {name: found[name] for name in kept}


def worker(size: Size) -> dict[str, dict[str, Any]]:
    size = Size(size)
    shape = SHAPES[size]
    with joined() as world:
        torch.manual_seed(0)
        corpus = load_corpus(DataConfig())
        control = Wire(name="turns")
        mesh = make_mesh(world, STAGES)
        timed = pipelines(size)
        for each in timed.values():
            each.prepare(shape, corpus, mesh)
        turns = [partial(each.turn, control) for each in timed.values()]
        interleave(turns, size.of(full=5, quick=1, tiny=1))
        tokens = mesh["replica"].size() * shape.batch * shape.context
        return {name: figures(each, tokens, control) for name, each in timed.items()}


def figures(timed: TimedPipeline, tokens: int, control: Wire) -> dict[str, Any]:
    slowest, exposed = control.agree([timed.seconds, statistics.median(timed.exposed)])
    return {
        "ms_per_micro_batch": round(1000 * slowest, 1),
        "tokens_per_s": round(tokens / slowest),
        "exposed_ms": round(1000 * exposed, 1),
        "turns_ms": [round(1000 * statistics.median(turn), 1) for turn in timed.turns],
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=1)
    arguments.add_argument("--rate", default="100mbit")
    arguments.add_argument("--delay", default="10ms")
    given = arguments.parse_args()
    link = given.size.emulated(Link.of(given.rate, delay=given.delay))
    hosts = STAGES * given.replicas
    found = on_hosts(worker, given.size, hosts=hosts, link=link, check=True)[0]
    report(found, f"{given.replicas} replicas, {given.rate}, {given.delay}", given.size)


def report(found: dict[str, dict[str, Any]], link: str, size: Size) -> None:
    shape = SHAPES[size]
    print(
        f"{STAGES} stages, {shape.model}, micro-batches of {shape.batch} x {shape.context}, {link}"
    )
    table = Table("", "ms/micro-batch", "tokens/s", "of compute", "of torch 1f1b", first=24)
    for name, f in found.items():
        shares = (f"{f['tokens_per_s'] / found[of]['tokens_per_s']:.3f}" for of in BASELINES)
        table.row(name, f"{f['ms_per_micro_batch']:.1f}", f"{f['tokens_per_s']}", *shares)
    end({"figures": found, "checks": checks(found)}, size)


BASELINES = ("compute", "torch 1f1b")


def checks(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Targets: at least 1.3 of torch's 1F1B, and at least 0.9 of the compute."""
    return {
        name: {
            f"of {of}": round(f["tokens_per_s"] / found[of]["tokens_per_s"], 3) for of in BASELINES
        }
        for name, f in found.items()
        if name.startswith("async")
    }


if __name__ == "__main__":
    main()
