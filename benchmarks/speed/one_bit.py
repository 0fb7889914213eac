"""How much of the compute's speed the one-bit methods keep once the variance is frozen.

    python benchmarks/one_bit_speed.py                2 workers, then 4; 3.2M parameters, 100 Mbit/s
    python benchmarks/one_bit_speed.py --workers 2    these only: nine minutes on a quiet machine
    python benchmarks/one_bit_speed.py --only late    contenders with this in their name, and `none`
    python benchmarks/one_bit_speed.py --delay 10ms   of the links; 1 ms unless told
    python benchmarks/one_bit_speed.py --quick        2 workers, fewer contenders and repetitions

Emulated hosts in the lab, real sockets, methods interleaved in one run (see
side_by_side.py). Efficiency is tokens/s over the same loop with no communication and as many
workers; `none, in step` is that loop with a barrier before every update, which sends no data: what
a method that meets at every step can keep at best where one worker is now and then late. The
one-bit methods have left their dense warm-up behind before anything is timed. `clip 0` does not
clip, so their buckets travel during the backward pass; with `clip 1` they wait for its end. `late`
takes a step with the momentum of the step before, and waits for neither bits nor norm.
`powersgd` is PyTorch's DDP with its own PowerSGD hook, rank 1, in one bucket, since with more
it aborts on gloo. Prints a table for each number of workers and as its last line one JSON object:
{"efficiency": {workers: {method: {"ms_per_step", "efficiency", ...}}}, "target": {method: met}}.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from side_by_side import Contender, compete, in_lab, method, show  # isort: skip

import thinwire as tw
from thinwire.lab import Link
from thinwire.train.models import GPT
from thinwire.train.replica import Replica
from thinwire.wire.wire import Wire

MODEL, BATCH, CONTEXT, RATE = "gpt-3m", 8, 128, "100mbit"
TARGET = 0.92
FROZEN = 2  # dense steps: v need not be good, only frozen
ONE_BUCKET = 1000  # MB


def powersgd(model: GPT, inner: torch.optim.Optimizer) -> Replica:
    ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook)
    replica = Replica(model, inner)
    replica.module = ddp
    return replica


def in_step(model: GPT, inner: torch.optim.Optimizer) -> Replica:
    wire = Wire(name="in step")
    inner.register_step_pre_hook(lambda *_: wire.barrier())
    return Replica(model, inner)


def contenders(quick: bool) -> list[Contender]:
    timed = 4 if quick else 8

    def frozen(name: str, clip: float, late: bool = False) -> Contender:
        label = f"{name}, {'late, ' if late else ''}clip {clip:.0f}"
        build = method(name, freeze_at=FROZEN, late=late)
        return Contender(label, build, FROZEN + 2, timed, clip=clip)

    none = Contender("none", method("none"), 1, timed)
    meeting = Contender("none, in step", in_step, 2, timed)
    ddp = Contender("ddp", method("ddp"), 1, timed // 2)
    sketch = Contender("powersgd", powersgd, 3, timed)
    adam, late = frozen("one-bit-adam", 0.0), frozen("one-bit-adam", 0.0, late=True)
    if quick:
        return [none, meeting, adam, late, ddp, sketch]
    more = [frozen("one-bit-lamb", 0.0), frozen("one-bit-adam", 1.0), frozen("one-bit-lamb", 1.0)]
    later = [
        frozen("one-bit-lamb", 0.0, late=True),
        frozen("one-bit-adam", 1.0, late=True),
        frozen("one-bit-lamb", 1.0, late=True),
    ]
    always = method("zero-one-adam", freeze_at=FROZEN, longest=1)
    often = method("zero-one-adam", freeze_at=FROZEN, local_double_after=1, longest=4)
    local = [
        Contender("zero-one-adam, every 4", often, 8, timed, 4, clip=0.0),
        Contender("zero-one-adam, every step", always, FROZEN + 2, timed, clip=0.0),
    ]
    return [none, meeting, adam, *more, late, *later, *local, ddp, sketch]


def worker(repetitions: int, only: str, quick: bool) -> None:
    given = [c for c in contenders(quick) if c.name == "none" or only in c.name]
    figures = compete(given, repetitions, model=MODEL, batch=BATCH, context=CONTEXT)
    if os.environ["RANK"] == "0":
        print(json.dumps(figures), flush=True)
    tw.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int, help="this number only")
    parser.add_argument("--only", default="", help="contenders with this in their name")
    parser.add_argument("--delay", default="1ms")
    given = parser.parse_args()
    efficiency = {}
    for workers in [given.workers or 2] if given.quick or given.workers else [2, 4]:
        figures = measure(workers, given.delay, given.only, given.quick)
        efficiency[str(workers)] = figures
        print(f"\n{workers} workers, {MODEL}, {RATE}, {given.delay}")
        show(figures)
    print(json.dumps({"efficiency": efficiency, "target": met(efficiency)}))


def measure(workers: int, delay: str, only: str, quick: bool) -> dict[str, dict[str, float]]:
    arguments = ["1", only, "quick"] if quick else ["4", only]
    figures: dict[str, dict[str, float]]
    figures, _ = in_lab(__file__, arguments, workers, Link.of(RATE, delay=delay))
    return figures


def met(efficiency: dict[str, dict[str, dict[str, float]]]) -> dict[str, bool]:
    """Whether each one-bit method keeps its share of the speed with two workers."""
    return {
        name: f["efficiency"] >= TARGET
        for name, f in efficiency.get("2", {}).items()
        if name.startswith(("one-bit", "zero-one"))
    }


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(int(sys.argv[1]), sys.argv[2], "quick" in sys.argv)
    else:
        main()
