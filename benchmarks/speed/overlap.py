"""How much of the compute's speed each method keeps on a slow link.

    python benchmarks/overlap.py             2 workers, 3.2M parameters, 100 and 10 Mbit/s
    python benchmarks/overlap.py --quick     2 repetitions, 100 Mbit/s or the --rate given

Two emulated hosts in the lab, real sockets, methods interleaved in one run (see side_by_side.py).
Efficiency is tokens/s over the same loop with no communication; `none, again` is that loop as a
contender, and shows what the measurement resolves. `post-local-sgd` is PyTorch's own
PostLocalSGDOptimizer. Prints a table for each rate, the memory of the outer state, and as its last
line one JSON object: {"efficiency": {rate: {method: ...}}, "outer_bytes_per_parameter": {...}}.
"""

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

sys.path.insert(0, str(Path(__file__).parent))
from side_by_side import Contender, compete, in_lab, method, show  # isort: skip

import thinwire as tw
from thinwire.lab import Link
from thinwire.optim.auto_period import PROBE_STEPS
from thinwire.train.models import GPT
from thinwire.train.replica import Replica

MODEL, BATCH, CONTEXT, EVERY = "gpt-3m", 8, 128, 8


def post_local_sgd(model: GPT, inner: torch.optim.Optimizer) -> Replica:
    averager = PeriodicModelAverager(period=EVERY, warmup_steps=0)
    return Replica(model, PostLocalSGDOptimizer(inner, averager))


def at_100_mbit() -> list[Contender]:
    every = {"every": str(EVERY)}
    return [
        Contender("none", method("none"), 1, EVERY),
        Contender("none, again", method("none"), EVERY, 2 * EVERY, EVERY),
        Contender("ddp", method("ddp"), 1, 4),
        Contender("post-local-sgd", post_local_sgd, EVERY, 2 * EVERY, EVERY),
        Contender("co2", method("co2", **every), EVERY, 2 * EVERY, EVERY),
        Contender("overlapped", method("overlapped", **every), EVERY, 2 * EVERY, EVERY),
    ]


def at_10_mbit() -> list[Contender]:
    auto = {"every": "auto", "codec": "int4"}
    return [
        Contender("none", method("none"), 1, EVERY),
        Contender("none, again", method("none"), EVERY, 2 * EVERY, EVERY),
        Contender("ddp", method("ddp"), 0, 1),
        Contender("co2, int4, auto", method("co2", **auto), 0, 0, probe=PROBE_STEPS),
        Contender("overlapped, int4, auto", method("overlapped", **auto), 0, 0, probe=PROBE_STEPS),
    ]


RATES = {"100mbit": at_100_mbit, "10mbit": at_10_mbit}
REPETITIONS = 6


def worker(rate: str, repetitions: int) -> None:
    if os.environ["RANK"] == "0":
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    contenders = RATES[rate]()
    figures = compete(contenders, repetitions, model=MODEL, batch=BATCH, context=CONTEXT)
    if os.environ["RANK"] == "0":
        print(json.dumps({"figures": figures, "memory": memory(contenders)}), flush=True)
    tw.shutdown()


def memory(contenders: list[Contender]) -> dict[str, float]:
    """Bytes of outer state per parameter."""
    found = {}
    for contender in contenders:
        optimizer = contender.replica.optimizer
        if isinstance(optimizer, tw.LocalUpdates):
            numel = sum(p.numel() for p in contender.replica.model.parameters())
            found[contender.name] = round(optimizer.outer_bytes / numel, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rate", choices=RATES, help="this rate only")
    given = parser.parse_args()
    quick = given.quick
    efficiency: dict[str, Any] = {}
    sizes: dict[str, float] = {}
    for rate in [given.rate or "100mbit"] if quick or given.rate else RATES:
        link = Link.of(rate, delay="1ms")
        answer, notes = in_lab(__file__, [rate, str(2 if quick else REPETITIONS)], 2, link)
        efficiency[rate], sizes = answer["figures"], sizes | answer["memory"]
        print("\n".join([f"\n2 workers, {MODEL}, {rate}", *(f"  {note}" for note in notes)]))
        show(answer["figures"])
    for name, size in sizes.items():
        print(f"outer state of {name}: {size:g} bytes per parameter")
    print(json.dumps({"efficiency": efficiency, "outer_bytes_per_parameter": sizes}))


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2])) if "RANK" in os.environ else main()
