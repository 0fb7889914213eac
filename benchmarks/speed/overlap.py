"""How much of the compute's speed the local-update methods keep on a slow link.

    python -m benchmarks.speed.overlap                  2 workers, 3.2M parameters, 100, 10 Mbit/s
    python -m benchmarks.speed.overlap --rate 100mbit   this rate only
    python -m benchmarks.speed.overlap --quick          1M parameters, one repetition, 100 Mbit/s or
                                                        the --rate given

Two emulated hosts in the lab, real sockets, methods interleaved (harness/interleaved.py).
Efficiency is tokens/s over the same loop with no communication; `none, again` is that loop as a
method of its own, and shows what the measurement resolves. `post-local-sgd` is PyTorch's own
PostLocalSGDOptimizer. Prints a table for each rate, the memory of the outer state, and as its last
line one JSON object: {"efficiency": {rate: {method: ...}}, "outer_bytes_per_parameter": {...}}.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from benchmarks.harness.arguments import Size, end, parser
from benchmarks.harness.hosts import on_hosts
from benchmarks.harness.interleaved import Shape, TimedMethod, method, show, time_methods
from benchmarks.harness.learning import joined
from thinwire.lab import Link
from thinwire.methods.base import WireOptimizer
from thinwire.methods.local.auto_period import PROBE_STEPS
from thinwire.methods.local.rounds import LocalRounds
from thinwire.train.methods.replica import Replica
from thinwire.train.tasks.models import GPT

SHAPES = {
    Size.FULL: Shape("gpt-3m", batch=8, context=128),
    Size.QUICK: Shape("gpt-1m", batch=8, context=128),
    Size.TINY: Shape("gpt-0.3m", batch=1, context=16),
}


def post_local_sgd(every: int) -> Callable[[GPT, torch.optim.Optimizer], Replica]:
    def build(model: GPT, inner: torch.optim.Optimizer) -> Replica:
        averager = PeriodicModelAverager(period=every, warmup_steps=0)
        return Replica(model, PostLocalSGDOptimizer(inner, averager))

    return build


def at_100_mbit(every: int) -> list[TimedMethod]:
    rounds = every, 2 * every, every  # untimed, timed, in a round
    return [
        TimedMethod("none", method("none"), 1, every),
        TimedMethod("none, again", method("none"), *rounds),
        TimedMethod("ddp", method("ddp"), 1, every // 2),
        TimedMethod("post-local-sgd", post_local_sgd(every), *rounds),
        TimedMethod("co2", method("co2", every=str(every)), *rounds),
        TimedMethod("overlapped", method("overlapped", every=str(every)), *rounds),
    ]


def at_10_mbit(every: int) -> list[TimedMethod]:
    auto = {"every": "auto", "codec": "int4"}
    return [
        TimedMethod("none", method("none"), 1, every),
        TimedMethod("none, again", method("none"), every, 2 * every, every),
        TimedMethod("ddp", method("ddp"), 0, 1),
        TimedMethod("co2, int4, auto", method("co2", **auto), 0, 0, probe=PROBE_STEPS),
        TimedMethod(
            "overlapped, int4, auto", method("overlapped", **auto), 0, 0, probe=PROBE_STEPS
        ),
    ]


RATES = {"100mbit": at_100_mbit, "10mbit": at_10_mbit}


def worker(rate: str, size: Size) -> Any:
    size = Size(size)
    with joined() as world:
        if world.rank == 0:  # what every=auto has chosen
            logging.basicConfig(level=logging.INFO, format="%(message)s")
        methods = RATES[rate](size.of(full=8, quick=8, tiny=2))
        repetitions = size.of(full=6, quick=1, tiny=1)
        figures = time_methods(methods, repetitions, SHAPES[size], world)
        return figures, memory(methods)


def memory(methods: list[TimedMethod]) -> dict[str, float]:
    """Bytes of outer state per parameter."""
    found = {}
    for timed in methods:
        optimizer = timed.replica.optimizer
        if isinstance(optimizer, WireOptimizer) and isinstance(optimizer.engine, LocalRounds):
            numel = sum(p.numel() for p in timed.replica.model.parameters())
            found[timed.name] = round(optimizer.engine.outer_bytes / numel, 3)
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rate", choices=RATES, help="this rate only")
    given = arguments.parse_args()
    efficiency: dict[str, Any] = {}
    sizes: dict[str, float] = {}
    every_rate = given.size is Size.FULL and not given.rate
    for rate in RATES if every_rate else [given.rate or "100mbit"]:
        link = given.size.emulated(Link.of(rate, delay="1ms"))
        answers = on_hosts(worker, rate, given.size, hosts=2, link=link, check=True)
        efficiency[rate], outer = answers[0]
        sizes |= outer
        print(f"\n2 workers, {SHAPES[given.size].model}, {rate}")
        show(efficiency[rate])
    for name, bytes_each in sizes.items():
        print(f"outer state of {name}: {bytes_each:g} bytes per parameter")
    end({"efficiency": efficiency, "outer_bytes_per_parameter": sizes}, given.size)


if __name__ == "__main__":
    main()
