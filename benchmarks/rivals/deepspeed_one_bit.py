"""Our OneBitAdam beside DeepSpeed 0.19.6's, the last release that has one: step time, collectives.

    benchmarks/rivals/deepspeed_venv.sh /tmp/ds                           an environment of its own
    /tmp/ds/bin/python -m benchmarks.rivals.deepspeed_one_bit             loopback, then the lab
    /tmp/ds/bin/python -m benchmarks.rivals.deepspeed_one_bit --quick     loopback, fewer steps

Two workers on gloo, the same model of 3.2M parameters, batch and data, both optimizers past their
dense warm-up, interleaved (harness/interleaved.py): on loopback, where only the computer's work
counts, and in the lab at 100 Mbit/s and 1 ms. Collectives are counted where both libraries
call torch.distributed.

What DeepSpeed lacks on a CPU is mended from outside: deepspeed_mends.py.
Prints a table for each network and as its last line one JSON object:
{"figures": {network: {method: {"ms_per_step", "collectives_per_step"}}}, "faster": {...}}.
"""

# First of all: it counts what is imported after it.
from benchmarks.rivals.counting import calls

# isort: split

import warnings
from typing import Any

import torch

from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.hosts import on_hosts
from benchmarks.harness.interleaved import Figures, Shape, TimedMethod, method, time_methods
from benchmarks.harness.learning import joined
from benchmarks.rivals.deepspeed import EngineLoss
from benchmarks.rivals.deepspeed_mends import mended_deepspeed
from thinwire.lab import Link
from thinwire.train.methods.replica import Replica
from thinwire.train.tasks.models import GPT

SHAPES = {
    Size.FULL: Shape("gpt-3m", batch=8, context=128),
    Size.QUICK: Shape("gpt-3m", batch=8, context=128),
    Size.TINY: Shape("gpt-0.3m", batch=1, context=16),
}
WORKERS = 2
FROZEN = 2
NETWORKS: dict[str, Link | None] = {"loopback": None, "100mbit": Link.of("100mbit", delay="1ms")}
OURS, THEIRS = "thinwire one-bit-adam", "deepspeed OneBitAdam"


class EngineReplica(Replica):
    def __init__(self, model: GPT, engine: Any) -> None:
        super().__init__(model, engine.optimizer)
        self.engine = engine
        self.module = lambda x, y: EngineLoss(engine, engine(x, y))  # type: ignore[assignment]

    def step(self, clip: float) -> float:
        self.engine.step()
        self.account.tick()
        return 0.0


def deepspeed_one_bit(model: GPT, inner: torch.optim.Optimizer) -> Replica:
    deepspeed = mended_deepspeed()
    settings = {"lr": 1e-3, "freeze_step": FROZEN, "comm_backend_name": "compressed"}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 8,  # it only reports with it
            "optimizer": {"type": "OneBitAdam", "params": settings},
        },
    )
    return EngineReplica(model, engine)


class CountedMethod(TimedMethod):
    """Knows how many collectives its last step made."""

    collectives = 0

    def step(self) -> None:
        before = calls()
        super().step()
        self.collectives = calls() - before


def worker(size: Size) -> Figures:
    size = Size(size)
    warnings.simplefilter("ignore")
    repetitions, timed = size.of(full=(4, 8), quick=(1, 3), tiny=(1, 1))
    one_bit = method("one-bit-adam", freeze_at=FROZEN)
    methods = [
        CountedMethod("none", method("none"), 2, timed, clip=0.0),
        CountedMethod(OURS, one_bit, FROZEN + 3, timed, clip=0.0),
        CountedMethod(THEIRS, deepspeed_one_bit, FROZEN + 3, timed, clip=0.0),
    ]
    with joined(timeout=300) as world:
        figures = time_methods(methods, repetitions, SHAPES[size], world)
    for each in methods:
        figures[each.name]["collectives_per_step"] = each.collectives
    theirs = methods[-1].replica.optimizer
    assert theirs.adam_freeze_key, "DeepSpeed was still in its dense warm-up"  # type: ignore[attr-defined]
    return figures


def main() -> None:
    size: Size = parser(__doc__).parse_args().size
    figures = {
        name: on_hosts(worker, size, hosts=WORKERS, link=link, check=True)[0]
        for name, link in NETWORKS.items()
        if size is Size.FULL or name == "loopback"
    }
    for name, found in figures.items():
        show(name, found, size)
    faster = {
        name: round(found[THEIRS]["ms_per_step"] / found[OURS]["ms_per_step"], 3)
        for name, found in figures.items()
    }
    end({"figures": figures, "faster": faster}, size)


def show(network: str, figures: Figures, size: Size) -> None:
    print(f"\n{WORKERS} workers, {SHAPES[size].model}, {network}")
    table = Table("", "ms/step", "over none", "collectives/step")
    for name, f in figures.items():
        over = f["ms_per_step"] - figures["none"]["ms_per_step"]
        paces = f"{f['ms_per_step']:.1f}", f"{over:.1f}"
        table.row(name, *paces, f"{f['collectives_per_step']:.0f}")


if __name__ == "__main__":
    main()
